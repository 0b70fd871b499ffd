"""What the layouts of heads with attention layers share: rows of a transformers config, and draft vocabularies."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.table import Key, Lack, Table, constant, keys, same
from speculator.device import dtype_name
from speculator.errors import UserError, refuse
from speculator.files import JsonObject
from speculator.heads.base import Speculator

EMBEDDING = "embed_tokens.weight"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
VERSION = constant("transformers_version", transformers.__version__)
VOCABULARY = Key(
    "draft_vocab_size",
    "draft_vocab_size",
    lambda config: config.output_size,
    back=lambda size, read: None if size == read["vocab_size"] else size,
    optional=True,
)
LAYER = (
    Key("emb_dim", "hidden_size"),
    Key("inner_dim", "intermediate_size"),
    *same("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    constant("hidden_act", "silu", must=True),
    *same("rms_norm_eps", "rope_parameters", "max_position_embeddings"),
    constant("tie_word_embeddings", False),
)
"""Rows of a layer's transformers config. All are written, because some readers have no defaults."""
NEUTRAL: JsonObject = {
    **dict.fromkeys(("mlp_bias", "rope_interleave", "rope_interleaved", "use_qk_norm"), False),
    **dict.fromkeys(("clip_qkv", "attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size"), None),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar"), None),
    **dict.fromkeys(("rotary_pct", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1),
    **dict.fromkeys(("num_local_experts", "num_experts"), 0),
    "is_neox_style": True,
}
"""Keys of other families' layers, with the values at which they compute what Llama's and Qwen 3's do."""
FULL_HEADS = Lack(
    lambda c: c.emb_dim % c.num_attention_heads,
    "the layout needs a hidden size that is a multiple of the {0.num_attention_heads} attention heads; "
    "it is {0.emb_dim}".format,
)
"""As some configs require."""
_OF_LAYERS = {
    *(row.theirs for row in LAYER),
    *("model_type", "num_hidden_layers", "attention_bias", "layer_types", "sliding_window"),
}
_HARMLESS = {
    *("eagle_config", "dflash_config", "target_hidden_size", "torch_dtype", "rope_theta", "rope_scaling", "auto_map"),
    *("sliding_window", "layer_types", "max_window_layers", "use_sliding_window", "partial_rotary_factor"),
    *("target_model_type", "num_aux_hidden_states", "num_target_layers", "unk_token_id", "qk_norm"),
    *("transformer_layer_config", "is_causal", "causal", "use_swa", "swa_window_size", "use_aux_hidden_state"),
}
"""Keys that others write, which are read or change no draft."""
_log = logging.getLogger(__name__)


def read_layers(read: ForeignConfig, file: Path, table: Table, *kinds: str) -> ForeignConfig:
    """Return transformers' values, and its defaults, of the keys of config.json that describe the layers.

    Logs a warning for unknown keys. Raises a UserError for values with which the layers would compute something else.

    Args:
        read: content of config.json, or of its part for the layers.
        file: config.json, for errors.
        table: of the layout; keys that it lacks are unknown.
        kinds: allowed values of `model_type`; the first is the default.
    """
    kind = read.get("model_type", kinds[0])
    refuse((kind not in kinds, f"{file}: model_type is {kind!r}; must be {' or '.join(map(repr, kinds))}"))
    try:
        given = {name: value for name, value in read.items() if name != "model_type"}
        layers: Any = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**given)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"{file}: {' '.join(str(error).split())}") from None
    size = read.get("target_hidden_size")
    known = {*type(layers)().to_dict(), *NEUTRAL, *_HARMLESS, *(row.theirs.split("/")[0] for row in keys(table))}
    nested = known | {row.theirs.split("/")[-1] for row in keys(table)}
    strange = [name for name in read if name not in known and not name.startswith(("_", "speculators_"))]
    for part in ("eagle_config", "dflash_config"):
        strange += [f"{name} in {part}" for name in read.get(part) or () if name not in nested]
    if strange:
        _log.warning(f"{file}: {', '.join(strange)} not read: a layer that it changes would draft something else here")
    refuse(
        *(
            (read.get(name, value) not in (None, value), f"{file}: {name} is {read.get(name)!r}; must be {value!r}")
            for name, value in NEUTRAL.items()
        ),
        (size not in (None, layers.hidden_size), f"{file}: target_hidden_size is {size}, not {layers.hidden_size}"),
    )
    return {name: getattr(layers, name) for name in _OF_LAYERS if hasattr(layers, name)}


def with_d2t(head: Speculator) -> dict[str, Tensor]:
    """Return the head's tensors by name, with a draft vocabulary, if any, as d2t [V_d] and t2d [V], as servers read it.

    They replace `draft_tokens`. Key i of the output matrix is token i + d2t[i], and t2d is True at these tokens.
    """
    tensors = dict(head.state_dict())
    tokens = tensors.pop("draft_tokens", None)
    if tokens is not None:
        mask = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=tokens.device)
        mask[tokens] = True
        # For the tokens [2, 3, 7], d2t is [2, 2, 5].
        tensors |= {"d2t": tokens - torch.arange(len(tokens), device=tokens.device), "t2d": mask}
    return tensors


def from_d2t(where: Path, head: Speculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors with `draft_tokens` instead of d2t and t2d, the inverse of `with_d2t`.

    Raises a UserError, which names the folder `where`, if a draft vocabulary lacks d2t, if d2t has another shape or no
    integer dtype, or if t2d is there and differs.
    """
    config: Any = head.config
    tensors, whole = dict(tensors), config.draft_vocab_size is None
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        refuse((not whole, f"{where}: missing tensors: d2t"))
        return tensors
    integer = not offsets.is_floating_point() and offsets.dtype != torch.bool
    shape = (config.output_size,)
    refuse(
        (offsets.shape != shape, f"{where}: d2t is {list(offsets.shape)}, config.json says {list(shape)}"),
        (not integer, f"{where}: d2t is {dtype_name(offsets.dtype)}, not int64"),
    )
    # Key i is token i + d2t[i]: [2, 2, 5] stands for the tokens 2, 3, 7.
    tokens = offsets.long() + torch.arange(len(offsets))
    # t2d follows from d2t, and some heads come without it.
    same = mask is None or (mask.shape == (config.vocab_size,) and torch.equal(mask.nonzero()[:, 0], tokens))
    refuse(
        (not same, f"{where}: d2t and t2d describe different draft vocabularies, or not in ascending order"),
        (whole and offsets.any(), f"{where}: d2t moves tokens, but config.json has no draft vocabulary"),
    )
    return tensors if whole else {**tensors, "draft_tokens": tokens}
