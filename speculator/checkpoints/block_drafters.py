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
from typing import Any

from torch import Tensor

from speculator.checkpoints import commands, limits, speculators
from speculator.checkpoints.base_model import base_matrix, lack_of
from speculator.checkpoints.commands import BASE, line_for_folder
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.layers import EMBEDDING, LAYER, VERSION, VOCABULARY, from_d2t, read_layers, with_d2t
from speculator.checkpoints.layout import ORIGIN, Layout, Server, base_config
from speculator.checkpoints.limits import exceeded
from speculator.checkpoints.table import ABSENT, DTYPE, Key, Lack, Table, constant, given_for, only, same, within
from speculator.checkpoints.targets import LLAMA_CPP, SGLANG, VLLM, refusal
from speculator.errors import refuse
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.dspark.model import DSparkSpeculator

OUTPUT = "lm_head.weight"
_PREFIX = "model."
_TAPS = 2
"""Number of neighbouring positions that a convolution of this library mixes; the key is `conv_kernel_size`."""
_NEUTRAL = {"output_multiplier": 1, "input_embedding_scale": 1, "final_logit_softcapping": 0}
"""Keys of DFlash 2 that change embeddings or logits, and the values with which they change nothing."""
_SPECULATORS = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel"}
"""Architectures that the `speculators` library writes, by its name of the algorithm."""


def kind_of(config: DSparkSpeculatorConfig) -> str:
    """Return the algorithm: "dflash2" with a part of DFlash 2, "dspark" with one of DSpark, else "dflash"."""
    return "dflash2" if config.is_dflash2 else config.method(vars(config))


# --- what the layouts can't hold

NO_EMBEDDING = Lack(
    lambda c: 0 in (c.aux_layers or ()),
    "aux_layers 0: servers number a layer by its output, so they can't name the embedding".format,
)
BOTH_PARTS = (
    Lack(
        lambda c: c.is_dflash2 and not c.conv_group_size,
        "servers run DFlash 2 with convolutions only, and this head has none".format,
    ),
    Lack(
        lambda c: c.is_dflash2 and not c.selector_rank,
        "servers run DFlash 2 with a selector only, and this head has none".format,
    ),
)


def no_dflash2(name: str, advice: str) -> tuple[Lack, ...]:
    """Return what the layout `name` of DSpark and DFlash heads lacks."""
    return (
        only("conv_group_size", 0, f"{name} has no convolutions: {advice}"),
        only("selector_rank", 0, f"{name} has no selector: {advice}"),
    )


def no_dspark(name: str, anchor: str = "drafts its first token") -> tuple[Lack, ...]:
    """Return what the layout `name` of DFlash heads lacks; `anchor` says in a message what a head's anchor drafts."""
    return (
        only("markov_rank", 0, f"{name} has no Markov head, and this head has one of rank {{0.markov_rank}}"),
        only("confidence_head", False, f"{name} has no confidence head, and this head has one"),
        only("sample_from_anchor", False, f"{name} drafts nothing in the anchor's slot, and this head {anchor}"),
    )


# --- where they hold the rest


def _target_layers(config: Any) -> Any:
    base = base_config(config.base_model_name_or_path)
    return base.get_text_config().num_hidden_layers if base else ABSENT


ALL_LAYERS = (
    *LAYER,
    constant("model_type", "qwen3"),
    *same("num_hidden_layers"),
    constant("attention_bias", False, must=True),
    Key(
        None,
        "layer_types",
        lambda c: ["sliding_attention" if c.sliding_window else "full_attention"] * c.num_hidden_layers,
    ),
    *same("sliding_window", optional=True),
    # llama.cpp reads it, others read layer_types.
    Key(None, "use_sliding_window", lambda c: True if c.sliding_window else ABSENT),
)
"""Rows of a transformers Qwen 3 config that describes the layers."""
SLOTS = Key(
    "n_predict", "block_size", lambda c: c.block_size, back=lambda size, c: size - (not c["sample_from_anchor"])
)
BLOCK = (
    # A layer is named by its output there, and here by the number of layers before the state.
    Key(
        "aux_layers",
        "target_layer_ids",
        lambda c: [k - 1 for k in c.aux_layers or ()],
        back=lambda ids, read: [k + 1 for k in ids],
    ),
    *same("mask_token_id"),
    SLOTS,
)
FLAT: Table = (
    NO_EMBEDDING,
    *ALL_LAYERS,
    Key(DTYPE, "dtype"),
    VERSION,
    VOCABULARY,
    Key(None, "rope_theta", lambda c: c.rope_parameters["rope_theta"]),
    *same("is_causal", optional=True),
    *BLOCK,
    *within("dflash_config", BLOCK),
    Key(None, "num_target_layers", _target_layers),
    *ORIGIN,
)
"""Rows that the `dspark`, `dflash` and `dflash2` layouts share."""
OWN = (
    *same("markov_rank"),
    constant("markov_head_type", "vanilla", must=True),
    Key("confidence_head", "enable_confidence_head"),
    Key(None, "confidence_head_with_markov", lambda c: c.confidence_head and c.markov_rank > 0),
)
"""Rows of what a DSpark head has and a DFlash head lacks."""
PARTS = (constant("conv_kernel_size", _TAPS), *same("conv_group_size", "selector_rank", "selector_top_k"))
"""Rows of DFlash 2's convolutions and selector."""
TABLES: dict[str, Table] = {
    "dspark": (*no_dflash2("dspark", "use dflash2"), *FLAT, *same("sample_from_anchor"), *OWN),
    "dflash": (*no_dspark("dflash"), *no_dflash2("dflash", "use dflash2"), *FLAT),
    "dflash2": (
        *BOTH_PARTS,
        *(Lack(lambda c: not c.is_dflash2, BOTH_PARTS[0].why), *no_dspark("dflash2")),
        *FLAT,
        *within("dflash_config", PARTS),
    ),
}
LIBRARY: Table = (
    Lack(
        lambda c: c.is_causal and c.sliding_window is None,
        "the speculators layout has no causal blocks with full attention: use dspark".format,
    ),
    *BOTH_PARTS,
    Key(None, "architectures", lambda c: [_SPECULATORS[kind_of(c)]]),
    Key(None, "speculators_model_type", kind_of),
    constant("speculators_version", speculators.VERSION),
    Key(DTYPE, "dtype"),
    VERSION,
    VOCABULARY,
    SLOTS,
    *same("mask_token_id", "sample_from_anchor"),
    *given_for(lambda c: kind_of(c) == "dspark", OWN),
    *given_for(lambda c: kind_of(c) == "dflash2", PARTS),
    Key("is_causal", "sliding_window_non_causal", lambda c: not c.is_causal, back=lambda both, read: not both),
    constant("target_hidden_size", None),
    Key("aux_layers", "aux_hidden_state_layer_ids", lambda c: c.aux_layers),
    *speculators.method(kind_of),
    *within("transformer_layer_config", ALL_LAYERS),
    *ORIGIN,
)


def canonical(read: ForeignConfig, file: Path) -> ForeignConfig:
    """Return the content of a config.json of servers or the `speculators` library as this library writes it.

    Absent keys get the writers' defaults; `file` is for errors.
    """
    library = "transformer_layer_config" in read  # the speculators library's
    layers_at = "aux_hidden_state_layer_ids" if library else "target_layer_ids"
    read = {**read, **read["transformer_layer_config"]} if library else read
    # `dflash_config` wins over the top level, and null in it counts as absent.
    nested = {**read, **{name: value for name, value in (read.get("dflash_config") or {}).items() if value is not None}}
    dflash, dflash2 = (word in read["architectures"][0] for word in ("DFlash", "DFlash2"))
    parts = [row.theirs for row in PARTS if row.ours]
    for name in (layers_at, "mask_token_id", "block_size", *parts * dflash2):
        refuse((nested.get(name) is None, f"{file}: {name} is missing"))
    own = {row.theirs for row in PARTS}.union(_NEUTRAL) if dflash2 else ()
    table = LIBRARY + TABLES["dspark"] if library else TABLES["dflash2"] + TABLES["dspark"]
    layers = read_layers({name: value for name, value in read.items() if name not in own}, file, table, "qwen3")
    from_anchor = False if dflash else nested.get("sample_from_anchor", None if library else True)
    rank = 0 if dflash else nested.get("markov_rank", 0)
    confidence = bool(nested.get("enable_confidence_head", False))
    types = set(read.get("layer_types") or ())
    sliding = "sliding_attention" in types or nested.get("use_swa", False)
    # Absent keys: in servers, layers with a window are causal, and with use_swa they are not. DFlash 2 never is.
    causal = (
        not read.get("sliding_window_non_causal", dflash2) if library else not dflash2 and "sliding_attention" in types
    )
    causal = read.get("is_causal", nested.get("causal", sliding and causal))
    refuse(
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
    flat = {
        **nested,
        **layers,
        **({} if dflash2 else dict.fromkeys(parts)),
        "sliding_window": nested.get("swa_window_size", read.get("sliding_window")) if sliding else None,
        "draft_vocab_size": read.get("draft_vocab_size", 32000 if library else None),
        "sample_from_anchor": from_anchor,
        "markov_rank": rank,
        "enable_confidence_head": confidence,
        "is_causal": causal,
        "sliding_window_non_causal": not causal,
    }
    return {**flat, "dflash_config": flat, "transformer_layer_config": flat}


def pack(head: DSparkSpeculator) -> dict[str, Tensor]:
    """Return the tensors to store, by name; with a draft vocabulary, also its rows of the target's output matrix."""
    tensors = with_d2t(head)
    if head.draft_tokens is not None:
        rows = head.draft_rows(base_matrix(head.config, "output").to(head.device))
        tensors[OUTPUT] = rows.to(head.dtype).contiguous()
    return tensors


def unpack(where: Path, head: DSparkSpeculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors by the head's names, without copies of the target's embedding and output matrix.

    A draft vocabulary is `draft_tokens` instead of d2t and t2d; `where`, the folder, is for errors.
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
        Server(f"speculators {speculators.VERSION}", True, f"{model}.from_pretrained({json.dumps(folder)})" + window),
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
        run = f"llama-server -md HEAD.gguf --spec-type draft-{method} --spec-draft-n-max {config.n_predict}"
        lacks = {server: ", ".join(exceeded(limits.BLOCK[name][server], config)) for server in limits.BLOCK[name]}

        def why(server: str) -> str | None:
            return f"does not run {lacks[server]}" if lacks[server] else refusal(server, base, method)

        on, ran = (VLLM, True) if name == "dflash" else (f"{VLLM} on a GPU", False)
        return [
            Server.of(on, why(VLLM), commands.vllm(base, **options), ran),
            Server.of(SGLANG, why(SGLANG), line_for_folder(base, *serve), ran=False),
            Server.of(LLAMA_CPP, why(LLAMA_CPP), f"{convert}, then {run}"),
        ]

    return listed


DSPARK = Layout(
    name="dspark",
    head=DSparkSpeculator,
    architecture="Qwen3DSparkModel",
    table=TABLES["dspark"],
    servers=servers("dspark"),
    canonical=canonical,
    also=("DSparkDraftModel",),
    needs=lambda config: None if config.draft_vocab_size is None else lack_of(config, "output"),
    pack=pack,
    unpack=unpack,
)
DFLASH, DFLASH2 = (
    replace(DSPARK, name=name, architecture=architecture, table=TABLES[name], servers=servers(name), also=())
    for name, architecture in (("dflash", "DFlashDraftModel"), ("dflash2", "DFlash2DraftModel"))
)
SPECULATORS_BLOCK = replace(
    DSPARK,
    name="speculators",
    architecture="DSparkSpeculator",
    table=LIBRARY,
    servers=speculators_servers,
    also=("DFlashSpeculator", "DSparkDraftModel", "DFlashDraftModel", "DFlash2DraftModel", "DFlash2Speculator"),
    mark="speculators_model_type",
)
