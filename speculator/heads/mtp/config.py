"""Config of MTP layers (`speculator.heads.mtp.model`)."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from speculator.files import JsonObject
from speculator.heads.unrolled import UnrolledConfig

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Fields of a model's text config that hold the number of its MTP layers, by family."""
# Fields of the target's config that describe its files or the whole model, not the layers that a block is built of.
_NOT_THE_BLOCKS = (
    *("transformers_version", "architectures", "_name_or_path", "dtype", "quantization_config", "id2label", "label2id"),
    *("tie_word_embeddings", "per_layer_config", *COUNTS),
)
_DENSE = ("exaone_moe",)
"""Families with experts whose MTP layers have none."""
_ONE_TOKEN = {"vocab_size": 1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class MTPSpeculatorConfig(UnrolledConfig):
    """Shape of an `MTPSpeculator`.

    Args:
        inner_dim: inner size of a dense layer's MLP.
        n_predict: steps unrolled in training, and the default length of a draft; it can draft deeper.
        block: text config of the target's family that builds the layer; None: a layer of Llama.
        zero_first: the embedding at position 0 is zero, as vLLM has it for DeepSeek and GLM.
        recycle_normed: the next step reads the state after the layer's final norm; vLLM's GLM-4.5 reads it before.
    """

    model_type = "mtp_speculator"

    block: dict | None = None
    zero_first: bool = False
    recycle_normed: bool = True
    target_options: ClassVar[tuple[str, ...]] = ("block",)
    extensions: ClassVar[tuple[str, ...]] = ("zero_first", "recycle_normed")
    ships_with_target: ClassVar[bool] = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.block is None:
            heads = max(1, self.emb_dim // 64)
            size = {"hidden_size": self.emb_dim, "intermediate_size": self.inner_dim, "num_attention_heads": heads}
            self.block = {"model_type": "llama", "num_hidden_layers": 1, **size, **_ONE_TOKEN}

    @classmethod
    def for_target(cls, target: PreTrainedConfig, **changes: Any) -> MTPSpeculatorConfig:
        """Build a config whose layer is of the target's own class; `changes` override it."""
        block = block_of(target)
        shape = {"vocab_size": target.vocab_size, "emb_dim": target.hidden_size}
        if isinstance(block.get("intermediate_size"), int):
            block["intermediate_size"] = shape["inner_dim"] = changes.get("inner_dim") or block["intermediate_size"]
        return cls(**{**shape, "block": block, **changes})

    @property
    def max_speculative_tokens(self) -> None:
        return None

    @property
    def cached_values(self) -> int:
        block: Any = self.block
        heads = block["num_attention_heads"]
        if block.get("kv_lora_rank"):
            return heads * (block["qk_nope_head_dim"] + block["qk_rope_head_dim"] + block["v_head_dim"])
        kv_heads = block.get("num_key_value_heads") or heads
        return 2 * kv_heads * (block.get("head_dim") or self.emb_dim // heads)

    def activation_bytes(self, length: int) -> int:  # a few states per step are kept; one step is recomputed at a time
        block: Any = self.block
        chosen = block.get("num_experts_per_tok") or 0
        widest = chosen * (block.get("moe_intermediate_size") or 0) or block.get("intermediate_size") or self.inner_dim
        steps = self.n_predict * 4 * (4 * self.emb_dim + self.cached_values)
        return steps + 4 * (8 * self.emb_dim + 4 * widest)

    def starts_from_target(self, requested: bool) -> bool:
        return False  # it copies no matrix: it is read from the target's folder

    def describe(self) -> str:
        block: Any = self.block
        parts = [
            super().describe(),
            f"one layer, of {block['model_type']}",
            *(["zero_first"] if self.zero_first else []),
            *([] if self.recycle_normed else ["recycles the state before the norm"]),
        ]
        return ", ".join(parts)


def promised(text: PreTrainedConfig) -> int:
    """Return the number of MTP layers that a model's text config states; 0 if it states none."""
    return next((count for name in COUNTS if (count := getattr(text, name, None))), 0)


def block_of(target: PreTrainedConfig) -> JsonObject:
    """Return the text config of a model that consists of the MTP layer of a target.

    transformers builds the layer from it; its vocabulary has one token. Fields that describe the target's layers one
    by one are replaced by those of the MTP layer, by default full attention and experts (a dense MLP in `_DENSE`).
    """
    text = copy.deepcopy(target)
    mlp = "dense" if text.model_type in _DENSE else "sparse"
    per_layer = {
        "layer_types": (getattr(text, "mtp_layer_types", None) or ["full_attention"])[:1],
        "mlp_layer_types": (getattr(text, "mtp_mlp_layer_types", None) or [mlp])[:1],
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    fields = {name: value for name, value in text.to_dict().items() if name not in _NOT_THE_BLOCKS}
    fields |= {name: value for name, value in per_layer.items() if fields.get(name) is not None}
    return {**fields, **_ONE_TOKEN, "num_hidden_layers": 1}
