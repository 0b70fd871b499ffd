"""The flat layout of EAGLE-3 heads: a Llama config of the one layer, as SGLang, SpecForge, EAGLE and vLLM read it.

The auxiliary layers are written twice, because servers count differently: vLLM's top-level key holds k, SGLang's key in
`eagle_config` k - 1 for most targets (`sglang.HOLDS_K`). Rope is also written twice, for readers older than
`rope_parameters`. The draft vocabulary is d2t, the difference of each row's token and index, and t2d, a mask of the
tokens that have a row.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from speculator.checkpoints import commands, files, limits, sglang
from speculator.checkpoints.commands import BASE, line_for_folder
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.layers import (
    AUX_LAYERS,
    EMBEDDING,
    FULL_HEADS,
    LAYER,
    VERSION,
    VOCABULARY,
    from_d2t,
    read_layers,
    with_d2t,
)
from speculator.checkpoints.layout import ORIGIN, PREFIX, Layout, Server, base_config
from speculator.checkpoints.limits import exceeded
from speculator.checkpoints.table import ABSENT, DTYPE, Key, Table, constant, same
from speculator.checkpoints.targets import LLAMA_CPP, SGLANG, VLLM, refusal
from speculator.errors import UserError, refuse
from speculator.files import JsonObject
from speculator.heads.attention.base import DEFAULT_AUX_LAYERS
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Speculator

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_log = logging.getLogger(__name__)
_STEPS = 7  # in EAGLE and SpecForge, which do not write it
_LAYER, _OURS = "midlayer.", "layers.0."
ORIGINAL_HEADS = replace(FULL_HEADS, has=lambda c: not c.qk_norm and FULL_HEADS.has(c))
ONE_LAYER = (
    *LAYER,
    Key("qk_norm", "model_type", lambda c: "qwen3" if c.qk_norm else "llama", back=lambda kind, read: kind == "qwen3"),
    constant("num_hidden_layers", 1, must=True),
    *same("attention_bias"),
    constant("mlp_bias", False),
    Key(None, "layer_types", lambda c: ["sliding_attention"] if c.sliding_window else ABSENT),
    *same("sliding_window", optional=True),
    # transformers' Qwen 3 has no window without it.
    Key(None, "use_sliding_window", lambda c: True if c.sliding_window and c.qk_norm else ABSENT),
)
"""Rows of a transformers config of the head's only layer: Qwen 3's with `qk_norm`, else Llama's."""


def _rope_scaling(config: Any) -> JsonObject | None:
    """Return `rope_scaling`, for readers older than `rope_parameters`."""
    rope = {name: value for name, value in config.rope_parameters.items() if name != "rope_theta"}
    return None if rope["rope_type"] == "default" else rope


def _nested(config: Any) -> Any:
    """Return `eagle_config`: SGLang reads the auxiliary layers there, and vLLM at the top."""
    if config.aux_layers is None:
        return ABSENT
    ids = sglang.write_ids(config.aux_layers, config.base_model_name_or_path)
    return {**({AUX_LAYERS: ids} if ids else {}), "use_aux_hidden_state": True}


TABLE: Table = (
    ORIGINAL_HEADS,
    Key(None, "architectures", lambda c: ["Eagle3Qwen3ForCausalLM"] if c.qk_norm else ABSENT),
    *ONE_LAYER,
    Key(DTYPE, "torch_dtype"),
    VERSION,
    VOCABULARY,
    *same(*FLAGS),
    Key("aux_layers", AUX_LAYERS, optional=True),
    Key(None, "eagle_config", _nested),
    Key(None, "rope_theta", lambda c: c.rope_parameters["rope_theta"]),
    Key(None, "rope_scaling", _rope_scaling),
    Key("n_predict", "ttt_length", default=_STEPS),
    *ORIGIN,
    Key("own_embedding", "own_embedding", lambda c: ABSENT),  # the tensors say it
)


def canonical(read: ForeignConfig, file: Path) -> ForeignConfig:
    """Return the content of a config.json of any writer as this library writes it; its path `file` is for errors.

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
    own = not files.read_names(file.parent).isdisjoint((EMBEDDING, PREFIX + EMBEDDING))
    read = {**read, **flags, AUX_LAYERS: aux_layers, "own_embedding": own}
    return {**read, **read_one_layer(read, file, TABLE)}


def read_one_layer(read: ForeignConfig, file: Path, table: Table) -> ForeignConfig:
    """Return the keys of `ONE_LAYER`, with transformers' defaults; see `read_layers`."""
    layer = read_layers(read, file, table, "llama", "qwen3")
    sliding = list(layer.get("layer_types") or ()) == ["sliding_attention"]
    return {**layer, "sliding_window": layer["sliding_window"] if sliding else None}


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
    if refused := refusal(VLLM, config.base_model_name_or_path):
        return Server(VLLM, False, refused)
    options = {"model": folder, "method": "eagle3", "num_speculative_tokens": config.n_predict}
    return Server("vLLM 0.32 and 0.33", True, commands.vllm(config.base_model_name_or_path, **options))


def servers(config: Eagle3SpeculatorConfig, folder: str) -> list[Server]:
    """List the programs that may load an `eagle3` head, each with its command or the reason that it can't.

    SGLang counts as unable if the head sets a field that it would silently ignore.
    """
    base = config.base_model_name_or_path
    ignored, lacks = (", ".join(exceeded(limits.EAGLE3[server], config)) for server in (SGLANG, LLAMA_CPP))
    algorithm = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", folder)
    serve = line_for_folder(base, "sglang", "serve", "--model-path", BASE, *algorithm)
    convert = line_for_folder(base, "convert_hf_to_gguf.py", folder, "--target-model-dir", BASE)
    run = f"{convert}, then llama-server -md HEAD.gguf --spec-type draft-eagle3"
    return [
        vllm_server(config, folder),
        Server.of(
            SGLANG,
            f"silently ignores {ignored}, so it drafts something else" if ignored else refusal(SGLANG, base),
            serve,
            ran=False,
        ),
        Server.of(LLAMA_CPP, f"does not run {lacks}" if lacks else refusal(LLAMA_CPP, base), run),
    ]


EAGLE3 = Layout(
    name="eagle3",
    head=Eagle3Speculator,
    architecture="LlamaForCausalLMEagle3",
    table=TABLE,
    servers=servers,
    canonical=canonical,
    also=("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),
    pack=pack,
    unpack=unpack,
)
