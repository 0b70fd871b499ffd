"""The flat layout of EAGLE-3 heads: a Llama config of the one layer, as SGLang, SpecForge, EAGLE and vLLM read it.

A tap is named twice, since servers count it otherwise: vLLM's key at the top says k, SGLang's in `eagle_config` k - 1,
the layer that it comes out of. Rope is written twice too, for readers before `rope_parameters`. The draft vocabulary is
d2t, by how much each row's token lies above its place, and t2d, which tokens have a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from speculator.checkpoints import layout
from speculator.checkpoints.layout import Layout, Server
from speculator.device import dtype_name
from speculator.errors import UserError, refuse
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Speculator

SHAPE: dict[str, type] = {
    "vocab_size": int,
    "emb_dim": int,
    "inner_dim": int,
    "n_predict": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "rms_norm_eps": float,
    "rope_parameters": dict,
    "max_position_embeddings": int,
    "attention_bias": bool,
    "qk_norm": bool,
    "norm_before_residual": bool,
    "norm_before_fc": bool,
    "fc_norm": bool,
    "norm_output": bool,
}
KEPT = {**layout.KEPT, "aux_layers": list, "sliding_window": int, "own_embedding": bool}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
_STEPS = 7  # unrolled by EAGLE and SpecForge, which do not write it
_LAYER, _OURS = "midlayer.", "layers.0."


def llama(config: Eagle3SpeculatorConfig) -> dict[str, Any]:
    """The one layer as a complete config of transformers: some readers have no defaults."""
    written = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.emb_dim,
        "intermediate_size": config.inner_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": config.rope_parameters,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if config.sliding_window is None:
        return written
    return {**written, "layer_types": ["sliding_attention"], "sliding_window": config.sliding_window}


def from_llama(read: dict[str, Any], file: Path) -> dict[str, Any]:
    """The shape, from a config of the one layer; what it leaves out has transformers' defaults.

    Raises:
        UserError: no such config, or one of something else.
    """
    kind = read.get("model_type", "llama")
    kinds: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    refuse((kind not in kinds, f"{file}: model_type is {kind!r}; known: {', '.join(kinds)}"))
    fields = {name: value for name, value in read.items() if name != "model_type"}
    try:
        layer: Any = kinds[kind](**fields)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"{file}: {' '.join(str(error).split())}") from None
    types, size = getattr(layer, "layer_types", None) or [], read.get("target_hidden_size")
    refuse(
        (layer.num_hidden_layers != 1, f"{file}: {layer.num_hidden_layers} layers; a head has 1 here"),
        (layer.hidden_act != "silu", f"{file}: hidden_act is {layer.hidden_act!r}; known is 'silu' only"),
        (getattr(layer, "mlp_bias", False), f"{file}: mlp_bias is true; heads have none here"),
        (size not in (None, layer.hidden_size), f"{file}: target_hidden_size is {size}, not {layer.hidden_size}"),
    )
    same = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters")
    return {
        **{name: getattr(layer, name) for name in (*same, "max_position_embeddings", "attention_bias")},
        "emb_dim": layer.hidden_size,
        "inner_dim": layer.intermediate_size,
        "qk_norm": kind == "qwen3",
        "sliding_window": layer.sliding_window if list(types) == ["sliding_attention"] else None,
    }


def drafted(size: Any, vocab_size: int) -> Any:
    """V_d as read: null and V are both no draft vocabulary."""
    return None if size == vocab_size else size


def tables(head: Eagle3Speculator) -> dict[str, Tensor]:
    """The head's tensors, its draft vocabulary as d2t and t2d; no embedding, unless it has its own."""
    tensors = dict(head.state_dict())
    tokens = tensors.pop("draft_tokens", None)
    if tokens is not None:
        mask = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=tokens.device)
        mask[tokens] = True
        tensors |= {"d2t": tokens - torch.arange(len(tokens), device=tokens.device), "t2d": mask}
    return tensors


def from_tables(where: Path, head: Eagle3Speculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`draft_tokens` from d2t, and t2d has to say the same; without a draft vocabulary they have to name every token.

    Raises:
        UserError: they differ, or have another shape or dtype.
    """
    config: Any = head.config
    tensors, rows = dict(tensors), config.output_size
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        refuse((mask is not None, f"{where}: tensors that are missing: d2t"))
        return tensors
    integer = not offsets.is_floating_point() and offsets.dtype != torch.bool
    refuse(
        (offsets.shape != (rows,), f"{where}: d2t is {list(offsets.shape)}, config.json says {[rows]}"),
        (not integer, f"{where}: d2t is stored as {dtype_name(offsets.dtype)}, not int64"),
        (mask is None, f"{where}: tensors that are missing: t2d"),
    )
    assert mask is not None
    tokens = offsets.long() + torch.arange(rows)
    same = mask.shape == (config.vocab_size,) and torch.equal(mask.nonzero()[:, 0], tokens)
    refuse((not same, f"{where}: d2t and t2d are not of the same draft vocabulary, in ascending order"))
    return tensors if config.draft_vocab_size is None else {**tensors, "draft_tokens": tokens}


def fields(config: Eagle3SpeculatorConfig, dtype: str) -> dict[str, Any]:
    """config.json, every field written out."""
    rope = dict(config.rope_parameters or {})
    theta = rope.pop("rope_theta")
    aux_layers: dict[str, Any] = {}
    if config.aux_layers is not None:
        nested = {TAPS: [k - 1 for k in config.aux_layers], "use_aux_hidden_state": True}
        aux_layers = {TAPS: config.aux_layers, "eagle_config": nested}
    base = config.base_model_name_or_path
    return {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else EAGLE3.architecture],
        **llama(config),
        "torch_dtype": dtype,
        "transformers_version": transformers.__version__,
        "draft_vocab_size": config.output_size,
        **{name: getattr(config, name) for name in FLAGS},
        **aux_layers,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "ttt_length": config.n_predict,
        **({"base_model_name_or_path": base} if base else {}),
    }


def translate(read: dict[str, Any], file: Path) -> dict[str, Any]:
    """The fields under the names that they have here.

    Raises:
        UserError: a layer of another kind, or keys that name different taps.
    """
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        refuse((name not in read, f"{file}: no {name} in it"))
    nested = read.get("eagle_config") or {}
    refuse(
        (not isinstance(nested, dict), f"{file}: eagle_config is {nested!r}, not an object"),
        ("draft_vocab_size" not in read, f"{file}: no draft_vocab_size in it"),
    )
    refuse((nested.get("use_aux_hidden_state") is False, f"{file}: use_aux_hidden_state is false: it reads no taps"))
    said = [(read.get(TAPS), 0), (nested.get(TAPS), 1)]
    for ids, _ in said:
        wrong = ids is not None and not (isinstance(ids, list) and all(type(k) is int for k in ids))
        refuse((wrong, f"{file}: {TAPS} is {ids!r}, not a list of layers"))
    named = [[k + more for k in ids] for ids, more in said if ids]
    refuse(
        (
            len(named) == 2 and named[0] != named[1],
            f"{file}: {TAPS} says {said[0][0]} at the top and {said[1][0]} in eagle_config, where each is one less",
        )
    )
    flags = {name: nested.get(name, read.get(name, False)) for name in FLAGS}
    shape = from_llama({**read, **flags}, file)
    return {
        **shape,
        **flags,
        "n_predict": read.get("ttt_length", _STEPS),
        "draft_vocab_size": drafted(read["draft_vocab_size"], shape["vocab_size"]),
        "aux_layers": named[0] if named else None,
        **{name: read.get(name) for name in ("base_model_name_or_path", "trained_length", "training_data")},
    }


def pack(head: Eagle3Speculator) -> dict[str, Tensor]:
    """The tensors as stored."""
    return {name.replace(_OURS, _LAYER, 1): tensor for name, tensor in tables(head).items()}


def unpack(where: Path, head: Eagle3Speculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors as the head has them; an embedding that is there is its own.

    Raises:
        UserError: the layer is there under two names, or the draft vocabulary is none.
    """
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        as_ours = _OURS + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name
        refuse((as_ours in ours, f"{where}: {as_ours} is there as {_LAYER} and as {_OURS}"))
        ours[as_ours] = tensor
    if EMBEDDING in ours:
        with torch.device("meta"):
            head.create_embedding()
    return from_tables(where, head, ours)


def vllm(config: Eagle3SpeculatorConfig, folder: str) -> Server:
    """How vLLM takes either layout."""
    base = config.base_model_name_or_path or "BASE"
    how = f'{{"model": "{folder}", "method": "eagle3", "num_speculative_tokens": {config.n_predict}}}'
    return Server("vLLM 0.32 and 0.33", True, f"vllm serve {base} --speculative-config '{how}'")


def servers(config: Eagle3SpeculatorConfig, folder: str) -> list[Server]:
    """Who loads it. SGLang and EAGLE's own code pass over what they do not know, without a word."""
    base = config.base_model_name_or_path or "BASE"
    foreign = {
        "norm_before_residual": config.norm_before_residual,
        "attention_bias": config.attention_bias,
        "sliding_window": config.sliding_window is not None,
        "qk_norm": config.qk_norm,
        "an embedding of its own": config.own_embedding,
    }
    sglang = [name for name, there in foreign.items() if there]
    eagle = sglang + [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    how = f"sglang serve --model-path {base} --speculative-algorithm EAGLE3 --speculative-draft-model-path {folder}"
    passed = "passes over {}, without a word, and drafts something else".format
    return [
        vllm(config, folder),
        Server("SGLang 0.5.23", not sglang, passed(", ".join(sglang)) if sglang else how),
        Server("SpecForge, EAGLE's own code", not eagle, passed(", ".join(eagle)) if eagle else "by the folder"),
    ]


EAGLE3 = Layout(
    name="eagle3",
    head=Eagle3Speculator,
    architecture="LlamaForCausalLMEagle3",
    fields=fields,
    servers=servers,
    translate=translate,
    also=("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),
    shape=SHAPE,
    kept=KEPT,
    pack=pack,
    unpack=unpack,
)
