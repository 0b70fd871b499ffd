"""The layouts of block drafters: a flat Qwen 3 config of the layers for servers, and that of the `speculators` library.

Embedding and output matrix are the target's and not stored, but for the rows of a draft vocabulary: those are stored as
`lm_head`, with d2t and t2d as in `eagle3`. The auxiliary layers, the mask and the block size are written twice, in
`dflash_config` and at top level, because servers look in different places. A layer is named by its output there: k - 1
for the k layers before a hidden state. The `speculators` library (0.9.0) has the same tensors and another config.json,
whose auxiliary layers are k. For a target of 28 layers and `aux_layers` 2 14 25 the servers' ids are 1 13 24. The
`dflash2` layout is `dflash` with the sizes of DFlash 2's parts in `dflash_config`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import transformers
from torch import Tensor

from speculator.checkpoints import commands, layout, llama_cpp, sglang, vllm
from speculator.checkpoints.base_model import base_matrix
from speculator.checkpoints.commands import BASE, line_for_folder
from speculator.checkpoints.eagle3 import (
    ATTENTION,
    EMBEDDING,
    draft_vocab_size,
    from_d2t,
    layer_config,
    read_layers,
    with_d2t,
)
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.layout import ORIGIN, Layout, Server, base_config, origin
from speculator.checkpoints.speculators import VERSION, method
from speculator.errors import refuse
from speculator.files import JsonObject
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.dspark.model import DSparkSpeculator

SHAPE = {**ATTENTION, "num_hidden_layers": int, "aux_layers": list}
KEPT = {
    **layout.KEPT,
    "mask_token_id": int,
    "markov_rank": int,
    "sample_from_anchor": bool,
    "is_causal": bool,
    "sliding_window": int,
    "confidence_head": bool,
    "conv_group_size": int,
    "selector_rank": int,
    "selector_top_k": int,
}
OUTPUT = "lm_head.weight"
_NESTED = "dflash_config"
_LAYERS = "target_layer_ids"
_PREFIX = "model."
_TAPS = 2
"""Number of neighbouring positions that a convolution of this library mixes; the key is `conv_kernel_size`."""
_DFLASH2 = ("conv_group_size", "selector_rank", "selector_top_k")
_NEUTRAL = {"output_multiplier": 1, "input_embedding_scale": 1, "final_logit_softcapping": 0}
"""Keys of DFlash 2 that change embeddings or logits, and the values with which they change nothing."""


def qwen3(config: DSparkSpeculatorConfig) -> JsonObject:
    """Return the fields of a transformers Qwen 3 config that describes a block drafter's layers."""
    count, window = config.num_hidden_layers, config.sliding_window
    own: JsonObject = {"num_hidden_layers": count, "attention_bias": False}
    if window is None:
        own["layer_types"] = ["full_attention"] * count
    else:  # llama.cpp reads use_sliding_window, others read layer_types
        own |= {"layer_types": ["sliding_attention"] * count, "sliding_window": window, "use_sliding_window": True}
    return layer_config(config, model_type="qwen3", **own)


def _block(config: DSparkSpeculatorConfig) -> JsonObject:
    """Return auxiliary layers, mask token and block size: config.json has them at top level and in `dflash_config`.

    Raises a UserError for auxiliary layer 0, the embedding, which servers can't name.
    """
    # Servers count the layer whose output is read, this library the layers before the state: k = 0 is the embedding,
    # which has no number there.
    aux_layers = [k - 1 for k in config.aux_layers or ()]
    refuse((-1 in aux_layers, "aux_layers 0: servers number a layer by its output, so they can't name the embedding"))
    return {_LAYERS: aux_layers, "mask_token_id": config.mask_token_id, "block_size": config.block_size}


def common_fields(config: DSparkSpeculatorConfig, dtype: str) -> JsonObject:
    """Return the fields of config.json that the `dspark`, `dflash` and `dflash2` layouts share."""
    block, base = _block(config), base_config(config.base_model_name_or_path)
    return {
        **qwen3(config),
        "dtype": dtype,
        "transformers_version": transformers.__version__,
        "draft_vocab_size": config.output_size,
        "rope_theta": (config.rope_parameters or {})["rope_theta"],
        "is_causal": config.is_causal,
        **block,
        _NESTED: block,
        **({"num_target_layers": base.get_text_config().num_hidden_layers} if base else {}),
        **origin(config),
    }


def own_fields(config: DSparkSpeculatorConfig) -> JsonObject:
    """Return the fields of config.json that a DSpark head has and a DFlash head lacks."""
    return {
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head and config.markov_rank > 0,
    }


def dspark_fields(config: DSparkSpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json in the `dspark` layout."""
    refuse((config.is_dflash2, f"dspark has no {parts_of(config)}: use dflash2"))
    return {"architectures": [DSPARK.architecture], **common_fields(config, dtype), **own_fields(config)}


def dflash2_parts(config: DSparkSpeculatorConfig) -> JsonObject:
    """Return the sizes of DFlash 2's convolutions and selector by key; raise a UserError if a head lacks either."""
    refuse(
        (not config.conv_group_size, "servers run DFlash 2 with convolutions only, and this head has none"),
        (not config.selector_rank, "servers run DFlash 2 with a selector only, and this head has none"),
    )
    return {"conv_kernel_size": _TAPS, **{name: getattr(config, name) for name in _DFLASH2}}


def dflash2_fields(config: DSparkSpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json in the `dflash2` layout."""
    made: JsonObject = {"architectures": [DFLASH2.architecture], **common_fields(config, dtype)}
    return {**made, _NESTED: {**_block(config), **dflash2_parts(config)}}


def dflash_fields(config: DSparkSpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json in the `dflash` layout."""
    refuse(
        (config.markov_rank, f"dflash has no Markov head, and this head has one of rank {config.markov_rank}"),
        (config.confidence_head, "dflash has no confidence head, and this head has one"),
        (config.sample_from_anchor, "dflash drafts nothing in the anchor's slot, and this head drafts its first token"),
        (config.is_dflash2, f"dflash has no {parts_of(config)}: use dflash2"),
    )
    return {"architectures": [DFLASH.architecture], **common_fields(config, dtype)}


def parts_of(config: DSparkSpeculatorConfig) -> str:
    """Return a head's parts of DFlash 2 for messages of the form "the layout has no convolutions and no selector"."""
    found = ["convolutions"] * bool(config.conv_group_size) + ["selector"] * bool(config.selector_rank)
    return " and no ".join(found)


def kind_of(config: DSparkSpeculatorConfig) -> str:
    """Return the algorithm: "dflash2" with a part of DFlash 2, "dspark" with one of DSpark, else "dflash"."""
    return "dflash2" if config.is_dflash2 else config.method(vars(config))


def speculators_fields(config: DSparkSpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json in the layout of the `speculators` library."""
    full = config.sliding_window is None
    refuse((config.is_causal and full, "the speculators layout has no causal blocks with full attention: use dspark"))
    kind = kind_of(config)
    own = own_fields(config) if kind == "dspark" else {"sample_from_anchor": False}
    if kind == "dflash2":
        own |= dflash2_parts(config)
    return {
        "architectures": [_SPECULATORS[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "dtype": dtype,
        "transformers_version": transformers.__version__,
        "draft_vocab_size": config.output_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        **own,
        "sliding_window_non_causal": not config.is_causal,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": config.aux_layers,
        "speculators_config": method(config, kind),
        "transformer_layer_config": qwen3(config),
        **origin(config),
    }


def translate(read: ForeignConfig, file: Path) -> JsonObject:
    """Convert config.json of servers or the `speculators` library to the fields of `DSparkSpeculatorConfig`.

    Absent fields get the servers' defaults. Raises a UserError, which names `file`, for a head that can't run here.
    """
    foreign = "transformer_layer_config" in read  # the speculators library's
    if foreign:
        read = {**read, **read["transformer_layer_config"]}
        read[_LAYERS] = [k - 1 for k in read["aux_hidden_state_layer_ids"]]
        read["base_model_name_or_path"] = read["speculators_config"]["verifier"]["name_or_path"]
    # `dflash_config` wins over the top level, and null in it counts as absent.
    nested = {**read, **{name: value for name, value in (read.get(_NESTED) or {}).items() if value is not None}}
    for name in (_LAYERS, "mask_token_id", "block_size"):
        refuse((nested.get(name) is None, f"{file}: {name} is missing"))
    dflash, dflash2 = (word in read["architectures"][0] for word in ("DFlash", "DFlash2"))
    own = ("conv_kernel_size", *_DFLASH2, *_NEUTRAL) if dflash2 else ()
    layers, shape = read_layers({name: value for name, value in read.items() if name not in own}, file, "qwen3")
    from_anchor = False if dflash else nested.get("sample_from_anchor", None if foreign else True)
    rank = 0 if dflash else nested.get("markov_rank", 0)
    confidence = bool(nested.get("enable_confidence_head", False))
    kind, types = nested.get("markov_head_type", "vanilla"), set(read.get("layer_types") or ())
    sliding = "sliding_attention" in types or nested.get("use_swa", False)
    # Absent keys: in servers, layers with a window are causal, and with use_swa they are not. DFlash 2 never is.
    causal = (
        not read.get("sliding_window_non_causal", dflash2) if foreign else not dflash2 and "sliding_attention" in types
    )
    refuse(
        (layers.attention_bias, f"{file}: attention_bias must be false"),
        (kind != "vanilla", f"{file}: markov_head_type is {kind!r}; must be 'vanilla'"),
        (
            sliding and len(types) > 1,
            f"{file}: layer_types must be the same for all layers: {', '.join(sorted(types))}",
        ),
        (from_anchor is None, f"{file}: sample_from_anchor is missing; vLLM assumes false, and speculators true"),
        (dflash and nested.get("sample_from_anchor"), f"{file}: sample_from_anchor must be false for DFlash"),
        (
            confidence and rank and nested.get("confidence_head_with_markov") is False,
            f"{file}: confidence_head_with_markov must be true",
        ),
        (
            dflash2 and nested.get("conv_kernel_size") != _TAPS,
            f"{file}: conv_kernel_size is {nested.get('conv_kernel_size')}; must be {_TAPS}",
        ),
        *(
            (
                dflash2 and nested.get(name) not in (value, None),
                f"{file}: {name} is {nested.get(name)}; must be {value}",
            )
            for name, value in _NEUTRAL.items()
        ),
    )
    return {
        **shape,
        "num_hidden_layers": layers.num_hidden_layers,
        "n_predict": nested["block_size"] - (not from_anchor),
        "draft_vocab_size": draft_vocab_size(
            read.get("draft_vocab_size", 32000 if foreign else None), layers.vocab_size
        ),
        "aux_layers": [k + 1 for k in nested[_LAYERS]],
        "mask_token_id": nested["mask_token_id"],
        "markov_rank": rank,
        "sample_from_anchor": from_anchor,
        "sliding_window": nested.get("swa_window_size", read.get("sliding_window")) if sliding else None,
        "is_causal": read.get("is_causal", nested.get("causal", sliding and causal)),
        "confidence_head": confidence,
        **({name: nested[name] for name in _DFLASH2} if dflash2 else {}),
        **{name: read.get(name) for name in ORIGIN},
    }


def pack(head: DSparkSpeculator) -> dict[str, Tensor]:
    """Return the tensors to store, by name; with a draft vocabulary, also its rows of the target's output matrix."""
    tensors = with_d2t(head)
    if head.draft_tokens is not None:
        rows = head.draft_rows(base_matrix(head.config, "output").to(head.device))
        tensors[OUTPUT] = rows.to(head.dtype).contiguous()
    return tensors


def unpack(where: Path, head: DSparkSpeculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors by the head's names, without copies of the target's embedding and output matrix.

    A draft vocabulary is `draft_tokens` instead of d2t and t2d. Raises a UserError if a shape is wrong or d2t missing.

    Args:
        where: the folder, for errors.
    """
    config = head.config
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    for name, rows in ((EMBEDDING, config.vocab_size), (OUTPUT, config.output_size)):
        if (copied := tensors.pop(name, None)) is not None:
            found, shape = list(copied.shape), [rows, config.emb_dim]
            refuse((found != shape, f"{where}: {name} is {found}, config.json says {shape}"))
    return from_d2t(where, head, tensors)


def speculators_servers(config: DSparkSpeculatorConfig, folder: str) -> list[Server]:
    """List the programs that may load a block drafter of the `speculators` layout, with the call for `folder`."""
    kind = kind_of(config)
    model = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}[kind]
    window = ", which counts the sliding window from a block's anchor" if config.sliding_window else ""
    return [
        Server(f"speculators {VERSION}", True, f"{model}.from_pretrained({json.dumps(folder)})" + window),
        Server("vLLM, SGLang, llama.cpp", None, f"use export --format {kind}"),
    ]


def servers(name: str) -> Callable[[DSparkSpeculatorConfig, str], list[Server]]:
    """Return `Layout.servers` of the flat layout of this name: "dspark", "dflash" or "dflash2".

    The returned function lists vLLM, SGLang and llama.cpp, each with its command or what it lacks for the head.
    """

    def listed(config: DSparkSpeculatorConfig, folder: str) -> list[Server]:
        base = config.base_model_name_or_path
        method = "dspark" if name == "dspark" else "dflash"  # to servers DFlash 2 is DFlash of another architecture
        options = {"model": folder, "method": method, "num_speculative_tokens": config.n_predict}
        # SGLang counts the slots of a block, the anchor's included, and vLLM the drafted tokens.
        slots = config.n_predict + 1
        head = ("--speculative-draft-model-path", folder, "--speculative-algorithm", method.upper())
        serve = ("sglang", "serve", "--model-path", BASE, *head, "--speculative-num-draft-tokens", str(slots))
        convert = line_for_folder(base, "convert_hf_to_gguf.py", folder, "--target-model-dir", BASE)
        cut = ["a draft vocabulary"] * (config.draft_vocab_size is not None)
        no_markov = ["a DSpark head of Markov rank 0"] * (name == "dspark" and not config.markov_rank)

        def server(program: str, lacks: list[str], how: str, refused: str | None, ran: bool) -> Server:
            why = f"does not run {', '.join(lacks)}" if lacks else refused
            return Server(program, not why, why or how, ran=ran)

        llama = llama_cpp.lacks_of_block(config, name)
        run = f"llama-server -md HEAD.gguf --spec-type draft-{method} --spec-draft-n-max {config.n_predict}"
        on = vllm.NAME if name == "dflash" else f"{vllm.NAME} on a GPU"
        return [
            server(on, no_markov, commands.vllm(base, **options), vllm.refusal(base), name == "dflash"),
            server(sglang.NAME, cut + no_markov, line_for_folder(base, *serve), sglang.refusal(base, method), False),
            server(llama_cpp.NAME, llama, f"{convert}, then {run}", llama_cpp.refusal(base), True),
        ]

    return listed


_SPECULATORS = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel"}
"""Architectures that the `speculators` library writes, by its name of the algorithm."""
DSPARK = Layout(
    name="dspark",
    head=DSparkSpeculator,
    architecture="Qwen3DSparkModel",
    fields=dspark_fields,
    servers=servers("dspark"),
    translate=translate,
    also=("DSparkDraftModel",),
    shape=SHAPE,
    kept=KEPT,
    pack=pack,
    unpack=unpack,
)
DFLASH = replace(
    DSPARK,
    name="dflash",
    architecture="DFlashDraftModel",
    fields=dflash_fields,
    servers=servers("dflash"),
    also=(),
)
DFLASH2 = replace(
    DFLASH,
    name="dflash2",
    architecture="DFlash2DraftModel",
    fields=dflash2_fields,
    servers=servers("dflash2"),
)
SPECULATORS_BLOCK = replace(
    DSPARK,
    name="speculators",
    architecture="DSparkSpeculator",
    fields=speculators_fields,
    servers=speculators_servers,
    also=("DFlashSpeculator", "DSparkDraftModel", "DFlashDraftModel", "DFlash2DraftModel", "DFlash2Speculator"),
    mark="speculators_model_type",
)
