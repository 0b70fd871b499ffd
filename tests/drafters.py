"""Drafters by name: a source and a shape, such as `head-chain` or `adaptive-attention`."""

from __future__ import annotations

from collections.abc import Callable

from conftest import (
    DFLASH,
    DFLASH2,
    alternating_drafter,
    tiny_block_head,
    tiny_head,
    tiny_model,
    tiny_mtp_head,
)

from speculator import (
    Candidates,
    Chain,
    Drafter,
    DraftModelDrafter,
    FixedTree,
    HeadDrafter,
    NgramDrafter,
    Target,
    Tree,
)
from speculator.heads import Speculator

DRAFT_TOKENS = [1, 4, 5, 9, 10, 14, 17, 19, 22, 26, 28, 31]
"""Draft vocabulary of the sources whose name begins with `pruned`."""

SHAPES = {
    "chain": Chain(3),
    "greedy-chain": Chain(3, sampled=False),
    "tree": Tree((4, 3, 2), nodes=8),
    "candidates": Candidates((3, 2, 1)),
    "fixed-tree": FixedTree([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)]),
}
HEADS: dict[str, Callable[[Target], Speculator]] = {
    "head": lambda target: tiny_head(),
    "attention": lambda target: tiny_head(architecture="eagle3"),
    "pruned": lambda target: tiny_head(draft_tokens=DRAFT_TOKENS),
    "block": tiny_block_head,
    "mtp": tiny_mtp_head,
    "pruned_block": lambda target: tiny_block_head(target, draft_tokens=DRAFT_TOKENS),
    "dflash": lambda target: tiny_block_head(target, **DFLASH),
    "dflash2": lambda target: tiny_block_head(target, **DFLASH2),
}


def make_drafter(name: str, target: Target | None = None) -> Drafter | None:
    """Make a drafter for a target, by default the tiny Llama."""
    target = target or Target(tiny_model(), None)
    source, _, shape = name.partition("-")
    if source == "none":
        return None
    if source == "ngram":
        return NgramDrafter()
    if source == "adaptive":
        return alternating_drafter(HEADS[shape](target).to(target.device, target.dtype))
    if source == "model":  # another random model than the target
        model = Target(tiny_model("qwen3").to(target.device, target.dtype), None)
        return DraftModelDrafter(model, target, SHAPES[shape])
    return HeadDrafter(HEADS[source](target).to(target.device, target.dtype), SHAPES[shape])
