"""Parts of heads that servers ignore or do not run, by the sources of the versions in targets.yaml."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from speculator.checkpoints import sglang
from speculator.checkpoints.targets import LLAMA_CPP, SGLANG, VLLM
from speculator.heads.attention.base import DEFAULT_AUX_LAYERS

Limit = str | Callable[[Any], Any]
"""A flag that must be off, or a function of the head's config whose result, if true, names what exceeds the server."""


def exceeded(limits: Iterable[Limit], config: Any) -> list[str]:
    """Return the names of the limits that a head with this config exceeds."""
    found = (getattr(config, each) and each if isinstance(each, str) else each(config) for each in limits)
    return [name for name in found if name]


def _other_rope(*runs: str) -> Limit:
    def named(config: Any) -> Any:
        kind = (config.rope_parameters or {}).get("rope_type", "default")
        return kind not in runs and f"the {kind} rope"

    return named


def _unnamed_aux_layers(config: Any) -> Any:
    layers = config.aux_layers
    return layers and sglang.write_ids(layers, config.base_model_name_or_path) is None and "aux_layers"


def _wide_selector(config: Any) -> Any:
    top_k = config.selector_top_k if config.selector_rank else 0
    least = top_k * (top_k + 1)
    return config.emb_dim < least and f"a selector over {top_k} tokens below hidden size {least}"


_WINDOW: tuple[Limit, ...] = (lambda c: c.sliding_window is not None and "sliding_window",)
_NO_MARKOV: tuple[Limit, ...] = (lambda c: not c.markov_rank and "a DSpark head of Markov rank 0",)
_CUT: tuple[Limit, ...] = (lambda c: c.draft_vocab_size is not None and "a draft vocabulary",)
EAGLE3: dict[str, tuple[Limit, ...]] = {
    SGLANG: (
        *("norm_before_residual", "attention_bias", *_WINDOW, "qk_norm"),
        lambda c: c.own_embedding and "an embedding of its own",
        _unnamed_aux_layers,
    ),
    LLAMA_CPP: (
        *("fc_norm", "norm_output", "qk_norm", "attention_bias", "own_embedding", *_WINDOW),
        _other_rope("default", "llama3"),
        lambda c: c.num_aux_layers != DEFAULT_AUX_LAYERS and f"{c.num_aux_layers} auxiliary layers",
    ),
}
_DFLASH: dict[str, tuple[Limit, ...]] = {
    VLLM: (),
    SGLANG: _CUT,
    LLAMA_CPP: (
        *(_other_rope("default"), _wide_selector),
        lambda c: c.draft_vocab_size is not None and "a draft vocabulary of a DFlash head",
    ),
}
BLOCK: dict[str, dict[str, tuple[Limit, ...]]] = {
    "dspark": {VLLM: _NO_MARKOV, SGLANG: (*_CUT, *_NO_MARKOV), LLAMA_CPP: (_other_rope("default"), *_NO_MARKOV)},
    **dict.fromkeys(("dflash", "dflash2"), _DFLASH),
}
"""By layout and server."""
