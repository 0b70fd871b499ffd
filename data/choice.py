"""Who drafts while the target writes its own text: what a head may draft, and which of it is the fastest here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from torch import uint8

from data.batches import awaited, begun
from speculator.decoding.drafter import Shape
from speculator.decoding.engine import Engine
from speculator.decoding.sampling import Sampling
from speculator.drafters import Chain, Drafter, FixedTree, HeadDrafter
from speculator.drafters.tuned import LONGEST_CHAIN, described, shape_from_json, shape_to_json, tuned_shapes
from speculator.errors import UserError
from speculator.heads import Speculator
from speculator.target.model import Target

_TURNS = 2
"""All are clocked so often on the same text, one after the other, and the better counts: some moments are slow."""
_SHARE = 0.05
"""To choose, at most this share of all tokens is decoded."""
_TOKENS = 64
"""Tokens of each slot in a turn, at most ..."""
_ENOUGH = 256
"""... but where slots are few so many of all, as acceptance varies."""
_LEAST = 16
"""Tokens of each slot in a turn, without which nothing is chosen."""
_WARM = 4
"""Tokens of each slot before the first turn: a new shape allocates."""


@dataclass
class Drafts:
    """A head whose draft is chosen where it drafts.

    Attributes:
        folder: where the head lies: it may have been tuned.
    """

    head: Speculator
    folder: str | Path

    def drafters(self, target: Target, temperatures: Iterable[float], batch_size: int) -> Iterator[HeadDrafter]:
        """Chains of one token up to all that the head has, then other shapes that were tuned for these temperatures."""
        shapes: dict[str, Shape] = {}
        for length in range(1, min(self.head.n_predict, LONGEST_CHAIN) + 1):
            chain = Chain(length)
            shapes[described(chain)] = chain
            yield HeadDrafter(self.head, chain)
        for tuned in tuned_shapes(self.folder, target, self.head, temperatures, batch_size).values():
            if tuned is not None and shapes.setdefault(described(tuned), tuned) is tuned:
                yield HeadDrafter(self.head, tuned)


def identity(drafter: Drafter | Drafts | None, weights: str | None = None) -> str | None:
    """Names a drafter. What it drafts decides which uniform decides what, so a head's weights are part of its name.

    Args:
        weights: what `digest` gives for the head's, where it was called before.
    """
    if drafter is None:
        return None
    if isinstance(drafter, Drafts):
        return f"head, the fastest here, weights {weights_digest(drafter.head)}"
    name = f"{drafter.name}, {drafter.nodes} tokens, {drafter.rules[0]} rule"
    if not isinstance(drafter, HeadDrafter):
        return name
    if isinstance(drafter.shape, FixedTree):
        name += f", tree {hashlib.sha256(repr(drafter.shape.paths).encode()).hexdigest()[:8]}"
    return f"{name}, weights {weights or weights_digest(drafter.head)}"


def weights_digest(head: Speculator) -> str:
    """Of a head's weights."""
    made = hashlib.sha256()
    for weight in head.state_dict().values():
        made.update(weight.detach().cpu().contiguous().flatten().view(uint8).numpy().tobytes())
    return made.hexdigest()[:16]


@dataclass(frozen=True)
class Chosen:
    """Who drafts.

    Attributes:
        clocked: {"tokens_per_second": of each candidate, "seconds": of all, "shape": the fastest's, as `decoding.json`
            names it}; None where none was clocked.
        fresh: whether it was made now, and not read in a folder that is gone on with.
    """

    drafter: HeadDrafter | None
    clocked: dict[str, Any] | None = None
    fresh: bool = True

    def __str__(self) -> str:
        speeds = (self.clocked or {"tokens_per_second": {}})["tokens_per_second"]
        listed = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
        return f"{_named(self.drafter)} is the fastest here (tokens/s: {listed})"


def choose(
    drafts: Drafts,
    target: Target,
    folder: Path,
    requests: Sequence[tuple[list[int], Sampling]],
    sample: Sequence[int],
    *,
    batch_size: int,
    plain: bool,
    max_new_tokens: int,
    **how: Any,
) -> Chosen:
    """The drafter of all requests: the one that a folder names where they are begun, otherwise the fastest here.

    Where clocking would be too large a share of so few tokens it is a chain of one token. Of several processes the
    first one clocks, or the first group; the others wait for its folder.

    Args:
        requests: prompts, and how each is sampled.
        sample: some of them, on which the candidates are clocked.
        batch_size: of them are decoded at a time.
        plain: whether no draft is a candidate.
        how: see `fastest`.
    """
    temperatures = sorted({sampling.temperature for _, sampling in requests})
    candidates, slots = drafts.drafters(target, temperatures, batch_size), min(batch_size, len(requests))
    count = drafts.head.n_predict + len(temperatures) + 1  # chains, what was tuned for each, none
    tokens = (int(_SHARE * len(requests) * max_new_tokens / (count * slots)) - _WARM) // _TURNS
    tokens = min(tokens, max(_TOKENS, _ENOUGH // slots)) if tokens >= min(_LEAST, max_new_tokens) else 0
    known = awaited(folder, target.group) if tokens else target.broadcast_object(begun(folder))
    if known is not None:
        return _known(drafts, folder, known, plain)
    if not tokens:
        return Chosen(HeadDrafter(drafts.head, 1))
    tried = [*candidates, *([None] if plain else [])]
    own = [requests[row] for row in sample]
    return fastest(target, tried, own, tokens, slots=slots, max_new_tokens=max_new_tokens, **how)


def _known(drafts: Drafts, folder: Path, record: dict[str, Any], plain: bool) -> Chosen:
    """The drafter that a folder's record names, of these."""
    name, weights, clocked = record.get("drafter"), weights_digest(drafts.head), record.get("choice")
    if name is None and plain:
        return Chosen(None, clocked, False)
    shapes: list[Shape] = [Chain(length) for length in range(1, drafts.head.n_predict + 1)]
    with suppress(KeyError, TypeError, ValueError):
        shapes += [shape_from_json(clocked["shape"])] if clocked else []
    for shape in shapes:
        drafter = HeadDrafter(drafts.head, shape)
        if identity(drafter, weights) == name:
            return Chosen(drafter, clocked, False)
    raise UserError(
        f"{folder} was made with drafter {json.dumps(name)}, which is none of the head {drafts.folder}, weights "
        f"{weights}: take another folder, or remove that one"
    )


def fastest(
    target: Target,
    candidates: Sequence[HeadDrafter | None],
    requests: Sequence[tuple[list[int], Sampling]],
    tokens: int,
    *,
    slots: int,
    capacity: int,
    **how: Any,
) -> Chosen:
    """Decode the same prompts with every candidate, None without a draft; the first of a group of processes decides.

    Only steps in which no slot is empty are clocked: most are so, and beside empty ones a draft costs less.

    Args:
        candidates: drafters of one head.
        requests: prompts and how each is sampled; those beyond `slots` join as others end.
        tokens: of each slot in a turn.
        slots, capacity, how: as for the engine, and for its requests.
    """
    began = monotonic()
    # The largest first: what follows fits into its memory. All drafts in one cache, as when the text is made.
    order = sorted(candidates, key=lambda each: -each.nodes if each else 0)
    drafting, plain = (Engine(target, who, slots=slots, capacity=capacity) for who in (copy(order[0]), None))
    speeds = {_named(each): 0.0 for each in candidates}
    for turn in range(_TURNS):
        for each in order:
            engine = drafting if each else plain
            if each:
                engine.reshape(each.shape)
            if not turn:
                _clock(engine, requests, _WARM * slots, how)
            made, seconds = _clock(engine, requests, tokens * slots, how)
            if seconds:
                speeds[_named(each)] = max(speeds[_named(each)], made / seconds)
    clocked = target.broadcast_object({"tokens_per_second": speeds, "seconds": monotonic() - began})
    best = max(candidates, key=lambda each: clocked["tokens_per_second"][_named(each)])
    return Chosen(best, {**clocked, "shape": shape_to_json(best.shape) if best else None})


def _clock(
    engine: Engine, requests: Sequence[tuple[list[int], Sampling]], most: int, how: dict[str, Any]
) -> tuple[int, float]:
    """Decode until there are so many tokens, or a slot is empty; gives them, and the seconds of the steps."""
    began, slots = engine.decode_seconds, len(engine.scheduler.slots)
    asked = [engine.submit(prompt, sampling, **how) for prompt, sampling in requests]
    tokens, going = 0, True
    while going:
        going = engine.step()
        tokens = sum(max(0, len(each.tokens) - 1) for each in asked)  # the first is the prefill's
        going = going and tokens < most and sum(not each.finish_reason for each in asked) >= slots
    for each in asked:
        each.cancel()
    return tokens, engine.decode_seconds - began


def _named(drafter: HeadDrafter | None) -> str:
    return "no draft" if drafter is None else described(drafter.shape)
