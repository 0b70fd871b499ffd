"""The flat layout of EAGLE-3 heads: a Llama config of the one layer, as SGLang, SpecForge, EAGLE and vLLM read it.

The auxiliary layers are written twice, because servers count differently: vLLM's top-level key holds k, SGLang's key in
`eagle_config` k - 1 for most targets (`sglang.HOLDS_K`). Rope is also written twice, for readers older than
`rope_parameters`. The draft vocabulary is d2t, the difference of each row's token and index, and t2d, a mask of the
tokens that have a row.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from speculator.checkpoints import commands, files, layout, llama_cpp, sglang, vllm
from speculator.checkpoints.commands import BASE, line_for_folder
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.layout import ORIGIN, PREFIX, Layout, Server, base_config, origin
from speculator.device import dtype_name
from speculator.errors import UserError, refuse
from speculator.files import Json, JsonObject
from speculator.heads.attention.base import DEFAULT_AUX_LAYERS, AttentionConfig, default_aux_layers
from speculator.heads.base import Speculator
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Speculator

ATTENTION: dict[str, type] = {
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
}
"""Required fields of every head with attention layers."""
SHAPE = {
    **ATTENTION,
    "attention_bias": bool,
    "qk_norm": bool,
    "norm_before_residual": bool,
    "norm_before_fc": bool,
    "fc_norm": bool,
    "norm_output": bool,
}
_CONSTANT: JsonObject = {"hidden_act": "silu", "tie_word_embeddings": False}
LAYER: dict[str, str | None] = {
    "hidden_size": "emb_dim",
    "intermediate_size": "inner_dim",
    **{name: name for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")},
    "hidden_act": None,
    **{name: name for name in ("rms_norm_eps", "rope_parameters", "max_position_embeddings")},
    "tie_word_embeddings": None,
}
"""Fields of a layer's transformers config as written, with the head's fields that they hold; None: a constant."""
KEPT = {**layout.KEPT, "aux_layers": list, "sliding_window": int, "own_embedding": bool}
NEUTRAL: JsonObject = {
    "mlp_bias": False,
    "is_neox_style": True,
    "rope_interleave": False,
    "rope_interleaved": False,
    "rotary_pct": 1,
    "clip_qkv": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "num_local_experts": 0,
    "num_experts": 0,
    "use_qk_norm": False,
}
"""Fields of other families' layers, with the values at which they compute what Llama's and Qwen 3's do."""
_READ_OR_HARMLESS = {
    *(
        "eagle_config",
        "draft_vocab_size",
        "target_hidden_size",
        "ttt_length",
        "torch_dtype",
        "rope_theta",
        "rope_scaling",
    ),
    *("sliding_window", "layer_types", "max_window_layers", "use_sliding_window", "partial_rotary_factor", "auto_map"),
    *("target_model_type", "num_aux_hidden_states", "num_target_layers", "base_model_name_or_path", "trained_length"),
    *("training_data", "block_size", "mask_token_id", "target_layer_ids", "dflash_config", "is_causal", "causal"),
    *("sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *(
        "sliding_window_non_causal",
        "use_swa",
        "swa_window_size",
        "aux_hidden_state_layer_ids",
        "transformer_layer_config",
    ),
    *("base_model_adapter", "base_model_fingerprint", "unk_token_id", "attention_bias", "qk_norm"),
}
_NESTED = {
    *("use_aux_hidden_state", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("output_multiplier", "input_embedding_scale"),
}
"""Fields that are read or harmless in `eagle_config` and `dflash_config` only."""
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
_log = logging.getLogger(__name__)
_STEPS = 7  # in EAGLE and SpecForge, which do not write it
_LAYER, _OURS = "midlayer.", "layers.0."


def check_heads(config: AttentionConfig) -> None:
    """Raise a UserError if the hidden size is not a multiple of the number of heads, as some configs require."""
    heads, size = config.num_attention_heads, config.emb_dim
    refuse(
        (
            size % heads,
            f"the layout needs a hidden size that is a multiple of the {heads} attention heads; it is {size}",
        )
    )


def layer_config(config: AttentionConfig, **more: Json) -> JsonObject:
    """Return the fields of a transformers config that describes a head's attention layers, with `more` added.

    No field is left out, because some readers have no defaults.
    """
    made = {theirs: getattr(config, ours) if ours else _CONSTANT[theirs] for theirs, ours in LAYER.items()}
    return {**made, **more}


def llama(config: Eagle3SpeculatorConfig) -> JsonObject:
    """Return the fields of a transformers config of the head's only layer: Qwen 3's with `qk_norm`, else Llama's.

    Raises a UserError for a number of heads that a Llama config can't have.
    """
    model_type = "qwen3" if config.qk_norm else "llama"
    if not config.qk_norm:
        check_heads(config)
    own = {"num_hidden_layers": 1, "attention_bias": config.attention_bias, "mlp_bias": False}
    written = layer_config(config, model_type=model_type, **own)
    if config.sliding_window is None:
        return written
    window: JsonObject = {"layer_types": ["sliding_attention"], "sliding_window": config.sliding_window}
    # transformers' Qwen 3 has no window without it.
    return {**written, **window, **({"use_sliding_window": True} if config.qk_norm else {})}


def read_layers(read: ForeignConfig, file: Path, *kinds: str) -> tuple[Any, JsonObject]:
    """Return the transformers config that config.json describes, and the fields of `AttentionConfig` read from it.

    Logs a warning for unknown fields. Raises a UserError for values with which the layers would compute something else.

    Args:
        read: content of config.json; transformers' defaults replace absent fields.
        file: config.json, for errors.
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
    known = {*type(layers)().to_dict(), *NEUTRAL, *_READ_OR_HARMLESS, *FLAGS, AUX_LAYERS}
    strange = [name for name in read if name not in known and not name.startswith(("_", "speculators_"))]
    for part in ("eagle_config", "dflash_config"):
        strange += [f"{name} in {part}" for name in read.get(part) or () if name not in known | _NESTED]
    if strange:
        _log.warning(f"{file}: {', '.join(strange)} not read: a layer that it changes would draft something else here")
    refuse(
        *(
            (
                read.get(name, neutral) not in (None, neutral),
                f"{file}: {name} is {read.get(name)!r}; must be {neutral!r}",
            )
            for name, neutral in NEUTRAL.items()
        ),
        (layers.hidden_act != "silu", f"{file}: hidden_act is {layers.hidden_act!r}; must be 'silu'"),
        (size not in (None, layers.hidden_size), f"{file}: target_hidden_size is {size}, not {layers.hidden_size}"),
    )
    return layers, {ours: getattr(layers, theirs) for theirs, ours in LAYER.items() if ours}


def from_llama(read: ForeignConfig, file: Path) -> JsonObject:
    """Return the fields of a head's config that describe its only layer, which is written as Llama's or Qwen 3's.

    Args:
        read: content of config.json, or of its part for the layer.
        file: config.json, for errors.
    """
    layer, shape = read_layers(read, file, "llama", "qwen3")
    refuse(
        (layer.num_hidden_layers != 1, f"{file}: num_hidden_layers is {layer.num_hidden_layers}; must be 1"),
    )
    types = getattr(layer, "layer_types", None) or []
    return {
        **shape,
        "attention_bias": layer.attention_bias,
        "qk_norm": layer.model_type == "qwen3",
        "sliding_window": layer.sliding_window if list(types) == ["sliding_attention"] else None,
    }


def draft_vocab_size(size: Json, vocab_size: Json) -> Json:
    """Convert a stored draft vocabulary size to `SpeculatorConfig.draft_vocab_size`: None if it is the whole one."""
    return None if size == vocab_size else size


def with_d2t(head: Speculator) -> dict[str, Tensor]:
    """Return the head's tensors by name, with a draft vocabulary, if any, as d2t [V_d] and t2d [V], as servers read it.

    They replace `draft_tokens`. Row i of the output matrix is token i + d2t[i], and t2d is True at these tokens.
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

    Raises a UserError, which names the folder `where`, if a draft vocabulary lacks d2t, or if t2d is there and differs.
    """
    config: Any = head.config
    tensors, whole = dict(tensors), config.draft_vocab_size is None
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        refuse((not whole, f"{where}: missing tensors: d2t"))
        return tensors
    tokens = tokens_of(where, offsets, config.output_size)
    # t2d follows from d2t, and some heads come without it.
    same = mask is None or (mask.shape == (config.vocab_size,) and torch.equal(mask.nonzero()[:, 0], tokens))
    refuse(
        (not same, f"{where}: d2t and t2d describe different draft vocabularies, or not in ascending order"),
        (whole and offsets.any(), f"{where}: d2t moves tokens, but config.json has no draft vocabulary"),
    )
    return tensors if whole else {**tensors, "draft_tokens": tokens}


def tokens_of(where: Path, d2t: Tensor, rows: int) -> Tensor:  # [rows]
    """Return the token id i + d2t[i] of each row i of the output matrix.

    Raises a UserError, which names `where`, unless d2t has the shape [rows] and an integer dtype.
    """
    integer = not d2t.is_floating_point() and d2t.dtype != torch.bool
    refuse(
        (d2t.shape != (rows,), f"{where}: d2t is {list(d2t.shape)}, config.json says {[rows]}"),
        (not integer, f"{where}: d2t is {dtype_name(d2t.dtype)}, not int64"),
    )
    # Row i is token i + d2t[i]: [2, 2, 5] stands for the tokens 2, 3, 7.
    return d2t.long() + torch.arange(rows)


def fields(config: Eagle3SpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json, given the name of the weights' dtype.

    Every field is written out, because readers have different defaults.
    """
    rope = dict(config.rope_parameters or {})
    theta = rope.pop("rope_theta")
    # Written twice: vLLM reads the key at the top, SGLang the one in `eagle_config`.
    aux_layers: JsonObject = {}
    if config.aux_layers is not None:
        ids = sglang.write_ids(config.aux_layers, config.base_model_name_or_path)
        nested: JsonObject = {**({AUX_LAYERS: ids} if ids else {}), "use_aux_hidden_state": True}
        aux_layers = {AUX_LAYERS: config.aux_layers, "eagle_config": nested}
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
        **origin(config),
    }


def translate(read: ForeignConfig, file: Path) -> JsonObject:
    """Convert the content of config.json to the fields of `Eagle3SpeculatorConfig`; `file`, its path, is for errors.

    An embedding among the weights beside it counts as the head's own; `bind` drops it later if it equals the target's.
    """
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        refuse((name not in read, f"{file}: {name} is missing"))
    nested = read.get("eagle_config") or {}
    aux_layers = _aux_layers(read, nested, file)
    count = len(aux_layers or range(DEFAULT_AUX_LAYERS))
    refuse(
        (nested.get("use_aux_hidden_state") is False, f"{file}: use_aux_hidden_state must not be false"),
        *other_lists(read, file),
        (
            read.get("num_aux_hidden_states") not in (None, count),
            f"{file}: num_aux_hidden_states is {read.get('num_aux_hidden_states')}, and {count} layers are named",
        ),
    )
    flags = {name: nested.get(name, read.get(name, False)) for name in FLAGS}
    shape = from_llama({**read, **flags}, file)
    return {
        **shape,
        **flags,
        "n_predict": read.get("ttt_length", _STEPS),
        "draft_vocab_size": draft_vocab_size(read.get("draft_vocab_size"), shape["vocab_size"]),
        "aux_layers": aux_layers,
        "own_embedding": not files.read_names(file.parent).isdisjoint((EMBEDDING, PREFIX + EMBEDDING)),
        **{name: read.get(name) for name in ORIGIN},
    }


def other_lists(read: ForeignConfig, file: Path) -> list[tuple[bool, str]]:
    """Return faults for `refuse`: keys of block drafters, which other trainers number differently in such heads."""
    why = f"is not read in an EAGLE-3 head: name the layers, as k, in {AUX_LAYERS}"
    keys = ("target_layer_ids", "aux_hidden_state_layer_ids")
    return [(read.get(name) is not None, f"{file}: {name} {why}") for name in keys]


def _aux_layers(read: ForeignConfig, nested: ForeignConfig, file: Path) -> list[int] | None:
    """Return the auxiliary layers k by vLLM's key or SGLang's in `nested`, `eagle_config`; None if both are absent.

    Raises a UserError if they disagree. Logs a warning if only SGLang's is there and its numbering is not certain.
    """
    named, ids, base = read.get(AUX_LAYERS), nested.get(AUX_LAYERS), read.get("base_model_name_or_path")
    if not ids:
        return named
    if not isinstance(ids, list) or not all(isinstance(k, int) for k in ids):
        raise UserError(f"{file}: {AUX_LAYERS} in eagle_config is {ids!r}, not a list of layers")
    if named and named not in sglang.numberings(ids, base):
        raise UserError(f"{file}: {AUX_LAYERS} is {named}, and {ids} in eagle_config, where each must be 1 less")
    found = sglang.read_ids(ids, base)
    # The tests of `HOLDS_K` agree about lists that begin with 1, but for gpt-oss's last layer.
    if not named and base_config(base) is None and ids[0] != 1:
        _log.warning(
            f"{file}: {AUX_LAYERS} {ids} in eagle_config is read as the outputs of layers, so as {found}; for some "
            f"targets SGLang takes such a list as it is: then write it as {AUX_LAYERS} at the top level"
        )
    return named or found


def pack(head: Eagle3Speculator) -> dict[str, Tensor]:
    """Return the tensors to store, by their stored names; an embedding is among them if the head has its own."""
    return {name.replace(_OURS, _LAYER, 1): tensor for name, tensor in with_d2t(head).items()}


def unpack(where: Path, head: Eagle3Speculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors by the head's names, the inverse of `pack`; `where`, the folder, is for errors."""
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        our_name = _OURS + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name
        refuse((our_name in ours, f"{where}: {our_name} exists twice, as {_LAYER} and as {_OURS}"))
        ours[our_name] = tensor
    return from_d2t(where, head, ours)


def vllm_server(config: Eagle3SpeculatorConfig, folder: str) -> Server:
    """Return vLLM's `Server` entry for an EAGLE-3 head: its command, or the reason that it can't load the head."""
    if refused := vllm.refusal(config.base_model_name_or_path):
        return Server(vllm.NAME, False, refused)
    options = {"model": folder, "method": "eagle3", "num_speculative_tokens": config.n_predict}
    return Server("vLLM 0.32 and 0.33", True, commands.vllm(config.base_model_name_or_path, **options))


def _are_default(aux_layers: list[int], base: str | None) -> bool:
    """Return whether these are the default layers of the target, or of any if it isn't found."""
    target = base_config(base)
    layers = target.get_text_config().num_hidden_layers if target else max(aux_layers[-1] + 3, 7)
    return layers >= 7 and aux_layers == default_aux_layers(layers)


def servers(config: Eagle3SpeculatorConfig, folder: str) -> list[Server]:
    """List the programs that may load an `eagle3` head, each with its command or the reason that it can't.

    SGLang and EAGLE's own code count as unable if the head sets a field that they would silently ignore.
    """
    base, aux_layers = config.base_model_name_or_path, config.aux_layers
    foreign = {
        "norm_before_residual": config.norm_before_residual,
        "attention_bias": config.attention_bias,
        "sliding_window": config.sliding_window is not None,
        "qk_norm": config.qk_norm,
        "an embedding of its own": config.own_embedding,
    }
    ignored = [name for name, used in foreign.items() if used]
    eagle = ignored + [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)]
    if aux_layers and not _are_default(aux_layers, base):
        eagle.append("aux_layers")
    if (config.rope_parameters or {}).get("rope_type", "default") != "default":
        eagle.append("the rope")
    if aux_layers and sglang.write_ids(aux_layers, base) is None:
        ignored.append("aux_layers")
    llama = llama_cpp.lacks_of_eagle3(config)
    refused = f"does not run {', '.join(llama)}" if llama else llama_cpp.refusal(base)
    convert = line_for_folder(base, "convert_hf_to_gguf.py", folder, "--target-model-dir", BASE)
    algorithm = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", folder)
    how = line_for_folder(base, "sglang", "serve", "--model-path", BASE, *algorithm)
    ignores = "silently ignores {}, so it drafts something else".format
    unable = ignores(", ".join(ignored)) if ignored else sglang.refusal(base, "eagle3")
    return [
        vllm_server(config, folder),
        Server(sglang.NAME, not unable, unable or how, ran=False),
        Server(
            llama_cpp.NAME,
            refused is None,
            refused or f"{convert}, then llama-server -md HEAD.gguf --spec-type draft-eagle3",
        ),
        Server("EAGLE's own code", not eagle, ignores(", ".join(eagle)) if eagle else "by the folder", ran=False),
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
