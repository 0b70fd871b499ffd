"""The layouts of block drafters: a flat Qwen 3 config of the layers for servers, and that of the `speculators` library.

Embedding and output matrix are the target's and not stored, but for the rows of a draft vocabulary: those are stored as
`lm_head`, with d2t and t2d as in `eagle3`. The auxiliary layers, the mask and the block size are written twice, in
`dflash_config` and at top level, because servers look in different places. A layer is named by its output there: k - 1
for the k layers before a hidden state. The `speculators` library (0.9.0) has the same tensors and another config.json,
whose auxiliary layers are k.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import Qwen3Config

from speculator.checkpoints import layout
from speculator.checkpoints.arctic import base_archs
from speculator.checkpoints.eagle3 import EMBEDDING, draft_vocab_size, with_d2t
from speculator.checkpoints.layout import Layout, Server, base_config
from speculator.checkpoints.speculators import VERSION, base_matrix
from speculator.errors import UserError, refuse
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.dspark.model import DSparkSpeculator

SHAPE: dict[str, type] = {
    "vocab_size": int,
    "emb_dim": int,
    "inner_dim": int,
    "n_predict": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "rms_norm_eps": float,
    "rope_parameters": dict,
    "max_position_embeddings": int,
    "aux_layers": list,
}
KEPT = {
    **layout.KEPT,
    "mask_token_id": int,
    "markov_rank": int,
    "sample_from_anchor": bool,
    "is_causal": bool,
    "confidence_head": bool,
}
OUTPUT = "lm_head.weight"
_NESTED = "dflash_config"
_LAYERS = "target_layer_ids"
_PREFIX = "model."


def common_fields(config: DSparkSpeculatorConfig, dtype: str) -> dict[str, Any]:
    """Build what both layouts have in config.json."""
    rope = dict(config.rope_parameters or {})
    aux_layers = [k - 1 for k in config.aux_layers or ()]
    refuse((-1 in aux_layers, "aux_layers 0: servers number a layer by its output, so they can't name the embedding"))
    block = {_LAYERS: aux_layers, "mask_token_id": config.mask_token_id, "block_size": config.block_size}
    name = config.base_model_name_or_path
    base = base_config(name)
    return {
        "model_type": "qwen3",
        "dtype": dtype,
        "transformers_version": transformers.__version__,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.output_size,
        "hidden_size": config.emb_dim,
        "intermediate_size": config.inner_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "is_causal": config.is_causal,
        **block,
        _NESTED: block,
        **({"num_target_layers": base.num_hidden_layers} if base else {}),
        **({"base_model_name_or_path": name} if name else {}),
    }


def dspark_fields(config: DSparkSpeculatorConfig, dtype: str) -> dict[str, Any]:
    """Build config.json of a DSpark head."""
    return {
        "architectures": [DSPARK.architecture],
        **common_fields(config, dtype),
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head and config.markov_rank > 0,
    }


def dflash_fields(config: DSparkSpeculatorConfig, dtype: str) -> dict[str, Any]:
    """Build config.json of a DFlash head."""
    refuse(
        (config.markov_rank, f"dflash has no Markov head, and this head has one of rank {config.markov_rank}"),
        (config.confidence_head, "dflash has no confidence head, and this head has one"),
        (config.sample_from_anchor, "dflash drafts nothing in the anchor's slot, and this head drafts its first token"),
    )
    return {"architectures": [DFLASH.architecture], **common_fields(config, dtype)}


def speculators_fields(config: DSparkSpeculatorConfig, dtype: str) -> dict[str, Any]:
    """Build config.json of the `speculators` library: DFlash for a head that the dflash layout can store."""
    flat = dspark_fields(config, dtype)
    kind = "dspark" if config.markov_rank or config.confidence_head or config.sample_from_anchor else "dflash"
    top = ("dtype", "transformers_version", "draft_vocab_size", "block_size", "mask_token_id", "sample_from_anchor")
    dspark = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    layer = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
             "num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_parameters",
             "max_position_embeddings", "attention_bias", "tie_word_embeddings", "layer_types")  # fmt: skip
    refuse((config.is_causal, "the speculators layout has no causal blocks with full attention, and this head has"))
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.n_predict}
    return {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        **{name: flat[name] for name in (*top, *(dspark if kind == "dspark" else ()))},
        "sliding_window_non_causal": True,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": config.aux_layers,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": config.base_model_name_or_path,
                "architectures": base_archs(config).get("base_model_archs", []),
            },
        },
        "transformer_layer_config": {name: flat[name] for name in layer},
    }


def translate(read: dict[str, Any], file: Path) -> dict[str, Any]:
    """Rename the fields of config.json to this library's, with servers' defaults for absent ones."""
    foreign = "transformer_layer_config" in read  # the speculators library's
    try:
        if foreign:
            read = {**read, **read["transformer_layer_config"]}
            read[_LAYERS] = [k - 1 for k in read["aux_hidden_state_layer_ids"]]
            read["base_model_name_or_path"] = read["speculators_config"]["verifier"]["name_or_path"]
        nested: dict[str, Any] = {name: read.get(name) for name in (_LAYERS, "mask_token_id", "block_size")}
        nested |= {name: value for name, value in (read.get(_NESTED) or {}).items() if value is not None}
        layers: Any = Qwen3Config(**{name: value for name, value in read.items() if name != "model_type"})
        block, ids, mask = (nested[name] for name in ("block_size", _LAYERS, "mask_token_id"))
        for name, value in (("block_size", block), (_LAYERS, ids), ("mask_token_id", mask)):
            refuse((value is None, f"{file}: {name} is missing"))
        dflash = _kind(read) == "dflash"
        from_anchor = False if dflash else read.get("sample_from_anchor", None if foreign else True)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"{file}: missing or malformed: {' '.join(str(error).split())}") from None
    windows = {"sliding_attention"} & set(read.get("layer_types") or ())
    kind, model_type = read.get("markov_head_type", "vanilla"), read.get("model_type", "qwen3")
    size = read.get("target_hidden_size")
    confidence = bool(read.get("enable_confidence_head", False))
    rank = 0 if dflash else read.get("markov_rank", 0)
    refuse(
        (model_type != "qwen3", f"{file}: model_type is {model_type!r}; must be 'qwen3'"),
        (layers.hidden_act != "silu", f"{file}: hidden_act is {layers.hidden_act!r}; must be 'silu'"),
        (layers.attention_bias, f"{file}: attention_bias must be false"),
        (kind != "vanilla", f"{file}: markov_head_type is {kind!r}; must be 'vanilla'"),
        (windows, f"{file}: layer_types has sliding_attention; must be full_attention"),
        (from_anchor is None, f"{file}: sample_from_anchor is missing; vLLM assumes false, and speculators true"),
        (dflash and read.get("sample_from_anchor"), f"{file}: sample_from_anchor must be false for DFlash"),
        (size not in (None, layers.hidden_size), f"{file}: target_hidden_size is {size}, not {layers.hidden_size}"),
        (
            confidence and rank and read.get("confidence_head_with_markov") is False,
            f"{file}: confidence_head_with_markov must be true",
        ),
    )
    causal = read.get("is_causal", nested.get("causal", False))
    same = ("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    return {
        **{name: getattr(layers, name) for name in (*same, "rope_parameters", "max_position_embeddings")},
        "emb_dim": layers.hidden_size,
        "inner_dim": layers.intermediate_size,
        "n_predict": block - (not from_anchor),
        "draft_vocab_size": draft_vocab_size(read.get("draft_vocab_size", layers.vocab_size), layers.vocab_size),
        "aux_layers": [k + 1 for k in ids],
        "mask_token_id": mask,
        "markov_rank": rank,
        "sample_from_anchor": from_anchor,
        "is_causal": causal,
        "confidence_head": confidence,
        **{name: read.get(name) for name in ("base_model_name_or_path", "trained_length", "training_data")},
    }


def _kind(read: dict[str, Any]) -> str:
    return "dflash" if "DFlash" in str(read["architectures"][0]) else "dspark"


def pack(head: DSparkSpeculator) -> dict[str, Tensor]:
    """Return the tensors to store; a draft vocabulary with its rows of the target's output matrix."""
    tensors = with_d2t(head)
    if head.draft_tokens is not None:
        rows = head.draft_rows(base_matrix(head.config, "output").to(head.device))
        tensors[OUTPUT] = rows.to(head.dtype).contiguous()
    return tensors


def unpack(where: Path, head: DSparkSpeculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename stored tensors to the head's; copies of the target's matrices are left out."""
    config = head.config
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    for name, rows in ((EMBEDDING, config.vocab_size), (OUTPUT, config.output_size)):
        if (copied := tensors.pop(name, None)) is not None:
            found, shape = list(copied.shape), [rows, config.emb_dim]
            refuse((found != shape, f"{where}: {name} is {found}, config.json says {shape}"))
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    if config.draft_vocab_size is None:
        return tensors
    if offsets is None or offsets.shape != (config.draft_vocab_size,):
        given = "missing" if offsets is None else f"{list(offsets.shape)}, config.json says {[config.draft_vocab_size]}"
        raise UserError(f"{where}: d2t is {given}")
    return {**tensors, "draft_tokens": offsets.long() + torch.arange(len(offsets))}


def servers(name: str):
    """Return the function that lists the programs for a head in the layout of this name."""

    def listed(config: DSparkSpeculatorConfig, folder: str) -> list[Server]:
        base = config.base_model_name_or_path or "BASE"
        if name == "speculators":
            kind = "DSpark" if config.markov_rank or config.sample_from_anchor else "DFlash"
            how = f'{kind}DraftModel.from_pretrained("{folder}")'
            return [
                Server(f"speculators {VERSION}", True, how),
                Server("vLLM, SGLang, llama.cpp", False, f"untested: export --format {kind.lower()}"),
            ]
        vllm = f'{{"model": "{folder}", "method": "{name}", "num_speculative_tokens": {config.n_predict}}}'
        where = "vLLM 0.32" if name == "dflash" else "vLLM 0.32 on a GPU"
        cut = "draft vocabulary" if config.draft_vocab_size is not None else ""
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        no_markov = "DSpark head of Markov rank 0" if name == "dspark" and not config.markov_rank else ""
        sglang = [what for what in (cut, no_markov) if what]
        llama = [
            *([f"{rope} rope and takes the plain one"] if rope != "default" else []),
            *([cut] if cut and name == "dflash" else []),
        ]
        count = config.block_size if name == "dflash" else config.n_predict + 1
        sglang_flags = f"--speculative-algorithm {name.upper()} --speculative-num-draft-tokens {count}"
        return [
            Server(
                where,
                not no_markov,
                f"has no {no_markov}" if no_markov else f"vllm serve {base} --speculative-config '{vllm}'",
            ),
            Server(
                "SGLang 0.5.23",
                not sglang,
                f"has no {', '.join(sglang)}"
                if sglang
                else f"sglang serve --model-path {base} --speculative-draft-model-path {folder} {sglang_flags}",
            ),
            Server(
                "llama.cpp 0.5",
                not llama,
                f"has no {', '.join(llama)}"
                if llama
                else f"convert_hf_to_gguf.py {folder} --target-model-dir {base}, then llama-server -md HEAD.gguf "
                f"--spec-type draft-{name} --spec-draft-n-max {config.n_predict}",
            ),
        ]

    return listed


_SHARED: dict[str, Any] = {
    "head": DSparkSpeculator,
    "translate": translate,
    "shape": SHAPE,
    "kept": KEPT,
    "pack": pack,
    "unpack": unpack,
}
SPECULATORS_BLOCK = Layout(
    name="speculators",
    architecture="DSparkSpeculator",
    fields=speculators_fields,
    servers=servers("speculators"),
    also=("DFlashSpeculator", "DSparkDraftModel", "DFlashDraftModel"),
    mark="speculators_model_type",
    **_SHARED,
)
DSPARK = Layout(
    name="dspark",
    architecture="Qwen3DSparkModel",
    fields=dspark_fields,
    servers=servers("dspark"),
    also=("DSparkDraftModel",),
    **_SHARED,
)
DFLASH = Layout(
    name="dflash",
    architecture="DFlashDraftModel",
    fields=dflash_fields,
    servers=servers("dflash"),
    **_SHARED,
)
