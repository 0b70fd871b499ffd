"""What a draft and its verify pass cost, in units of one plain step: c per drafted token, and v.

They are measured on real steps, apart from any timed generation: behind the same text, in the same cache, with the
same batch, a few plain steps and a few with a draft take turns. (A few, because a step that follows one of another kind
is slower than one of many alike, as they are in the loop.) A plain step and a verify pass hold all that the loop does
in them: forward pass, distribution, rule, next token, the copy to the host and its text. A draft includes what is done
to keep what was accepted of it.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import Any, TypeVar

import torch

from speculator.decoding.cuda_graphs import Captured, capturable
from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Shape
from speculator.decoding.engine import Engine, Verified
from speculator.decoding.request import Request
from speculator.decoding.sampling import Sampling
from speculator.device import synchronize
from speculator.drafters import Drafter, FixedTree, HeadDrafter
from speculator.drafters.hybrid import Hybrid
from speculator.drafters.ngram import Found
from speculator.heads import Speculator
from speculator.target.model import Target

Result = TypeVar("Result")
BLOCK = 5
"""Steps of one kind in a row: the first is not counted."""
_ROUNDS = (1, 2)
"""Blocks of each shape, round by round; in a round the shapes take turns."""
_MORE = 4
"""Blocks more for the sizes that matter most, where there is time."""


@dataclass
class StepSeconds:
    """Seconds of the parts of steps, in sums over blocks of as many plain steps and steps with a draft.

    Attributes:
        plain: of plain steps.
        draft: of drafting, what is learnt of the draft's fate included.
        verify: of verify passes.
    """

    plain: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)

    def figures(self, num_speculative_tokens: int) -> dict[str, float]:
        """c, per token of a whole draft, and v, of the mean verify pass."""
        draft, verify = self.ratios()
        return {
            "draft_over_decode": draft / num_speculative_tokens,
            "verify_over_decode": verify,
            "decode_seconds": _interquartile_mean(self.plain) / (BLOCK - 1),
        }

    def ratios(self) -> tuple[float, float]:
        """Seconds of a draft and of its verify pass, over those of a plain step.

        Each block is compared with its own plain steps, taken just before it. The interquartile mean over blocks: one
        stall does not count.
        """
        draft = _interquartile_mean(part / plain for part, plain in zip(self.draft, self.plain, strict=True))
        return draft, _interquartile_mean(part / plain for part, plain in zip(self.verify, self.plain, strict=True))


def _interquartile_mean(values: Iterable[float]) -> float:
    """The mean of the values without the lowest and the highest quarter."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


@torch.inference_mode()
def timed_steps(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    sampling: Sampling,
    count: int,
    costs: StepSeconds,
    rule: str | None = None,
) -> Iterator[tuple[Draft, Verified]]:
    """Decode `count` steps behind `prompts`; yields each step's draft and result, and adds its seconds to `costs`.

    Every block of `BLOCK` drafted steps follows as many plain steps, which are undone, so both are timed after the same
    sequence. The first step of a block and blocks that captured a graph do not count. Sequences may run past the end of
    the context, where positions are clamped: their tokens are meaningless, their time is not.
    """
    limit = count * (drafter.num_speculative_tokens + 1) + BLOCK + 2
    engine = Engine(target, drafter, slots=len(prompts), rule=rule, capacity=max(map(len, prompts)) + limit)
    own = [Sampling(sampling.temperature, seed=sampling.seed + row) for row in range(len(prompts))]
    requests = [engine.enqueue(Request(*row, limit)) for row in zip(prompts, own, strict=True)]
    engine.admit()
    while engine.scheduler.prefilling:
        engine.prefill()
    cache, who, capturing = engine.cache, engine.drafter, engine.capturing
    plainly, propose, verify, keep = map(engine.capturable_method, ("decode_rows", "draft", "verify", "commit"))

    def plain_steps() -> float:
        """Seconds of a block, without its first step."""
        lengths, pending = cache.lengths.clone(), engine.pending.clone()
        engine.drafter, engine.capturing = None, capturable(target, None)
        seconds = [
            clock(lambda: engine.append_tokens(plainly(engine.select_decoding_rows()).tolist()))[0]
            for _ in range(BLOCK)
        ]
        engine.drafter, engine.capturing = who, capturing
        cache.lengths.copy_(lengths)
        engine.pending.copy_(pending)
        for request in requests:
            del request.sequence[-BLOCK:]
        return sum(seconds[1:])

    plain, sums, prepared = 0.0, [0.0, 0.0], 0
    for number in range(count):
        place = number % BLOCK
        if place == 0:
            prepared = Captured.prepared
            plain, sums = plain_steps(), [0.0, 0.0]
        sequences = engine.select_decoding_rows()
        drafting, (draft, u) = clock(propose, sequences)
        verifying, result = clock(verify, draft, u)
        learning, _ = clock(keep, result)
        telling, _ = clock(lambda report: engine.append_tokens(report.tolist()), result.report)
        if place:
            sums = [sums[0] + drafting + learning, sums[1] + verifying + telling]
        if place == BLOCK - 1 and Captured.prepared == prepared:
            for part, seconds in zip((costs.plain, costs.draft, costs.verify), (plain, *sums), strict=True):
                part.append(seconds)
        yield draft, result


def measure(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    sampling: Sampling,
    blocks: int,
    costs: StepSeconds,
    rule: str | None = None,
) -> None:
    """Add the seconds of about `blocks` blocks of steps behind `prompts`."""
    captures = 3 if capturable(target, drafter) else 0  # when they begin, and when they outgrow a bucket
    for _ in timed_steps(target, drafter, prompts, sampling, (blocks + captures) * BLOCK, costs, rule):
        pass


def clock(work: Callable[..., Result], *given: Any) -> tuple[float, Result]:
    """Seconds of a call, of what it starts on the device included, and what it gives."""
    synchronize()
    started = time.perf_counter()
    result = work(*given)
    synchronize()
    return time.perf_counter() - started, result


@dataclass
class CostEntry:
    """What steps of so many rows cost behind sequences of so many tokens.

    Attributes:
        greedy: at temperature 0, or at 1.
        seconds: of a plain step.
        shapes: what was measured, each with what drafting it and verifying it cost, in plain steps.
    """

    rows: int
    context: int
    greedy: bool
    seconds: float
    shapes: list[tuple[Shape, float, float]]

    def __post_init__(self):
        own = [each for each in self.shapes if not isinstance(each[0], Hybrid)]
        chains = sorted((s.depth, draft, verify) for s, draft, verify in own if not isinstance(s, FixedTree))
        self._drafts = isotonic((depth, draft, 1) for depth, draft, _ in chains)
        trees = [(s.nodes, verify, 1) for s, _, verify in own if isinstance(s, FixedTree)]
        # A tree's pass costs more than a chain's over as many tokens: it tells of chains no longer measured.
        wider = [tree for tree in trees if not chains or tree[0] > chains[-1][0]]
        self._passes = isotonic([(0, 1, 1), *((depth, verify, 1) for depth, _, verify in chains), *wider])
        of_trees = dict(isotonic(trees))
        self._trees = {s.paths: (draft, of_trees[s.nodes]) for s, draft, _ in own if isinstance(s, FixedTree)}
        self._joining = 0.0  # a path to a draft: what is measured beyond the draft and the pass over as many tokens
        mixed = [draft + verify - self.of(s) for s, draft, verify in self.shapes if isinstance(s, Hybrid)]
        self._joining = max(0.0, statistics.fmean(mixed)) if mixed else inf

    def of(self, what: Shape | int) -> float:
        """A step with a draft of this shape, or of so many copied tokens, in plain steps.

        A mixed one is infinite where none was measured.
        """
        if isinstance(what, int):
            return _interpolate(self._drafts, 0) + _interpolate(self._passes, what)
        if isinstance(what, Hybrid):
            return self._draft(what.inner) + _interpolate(self._passes, what.nodes) + self._joining
        if isinstance(what, FixedTree) and what.paths in self._trees:
            return sum(self._trees[what.paths])
        return self._draft(what) + _interpolate(self._passes, what.nodes)

    def known_better(self, shapes: Sequence[tuple[Shape, float, float]]) -> CostEntry:
        """The same with these costs, measured for longer; what joining a path to a draft costs stays."""
        none = [each for each in self.shapes if not each[0].nodes]
        made = CostEntry(self.rows, self.context, self.greedy, self.seconds, [*none, *shapes])
        for shape, _, verify in self.shapes:
            if isinstance(shape, Hybrid):
                draft = made._draft(shape.inner) + _interpolate(made._passes, shape.nodes) + self._joining - verify
                made.shapes.append((shape, draft, verify))
        made._joining = self._joining
        return made

    def _draft(self, shape: Shape) -> float:
        if isinstance(shape, FixedTree) and shape.paths in self._trees:
            return self._trees[shape.paths][0]
        return _interpolate(self._drafts, shape.depth)


def isotonic(points: Iterable[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """Weighted isotonic regression by pool-adjacent-violators: the values nearest to the points that never fall.

    Without it a noisy measurement could say that more tokens cost less.

    Args:
        points: (x, value, weight) in any order; values of one x are averaged.

    Returns:
        (x, value), ascending in x.
    """
    pools: list[tuple[list[int], float, float]] = []  # x, sum and weight
    for x, alike in groupby(sorted(points), key=itemgetter(0)):
        own = [(value * weight, weight) for _, value, weight in alike]
        pools.append(([x], sum(value for value, _ in own), sum(weight for _, weight in own)))
        while len(pools) > 1 and pools[-2][1] / pools[-2][2] > pools[-1][1] / pools[-1][2]:
            every, value, weight = pools.pop()
            pools[-1] = (pools[-1][0] + every, pools[-1][1] + value, pools[-1][2] + weight)
    return [(x, value / weight) for every, value, weight in pools for x in every]


def _interpolate(points: list[tuple[int, float]], x: int) -> float:
    """The value at x, on the line through the two points around it, or the two nearest to it; at least 0."""
    if len(points) == 1:
        return points[0][1]
    at = min(max(1, bisect_left(points, (x,))), len(points) - 1)
    (a, low), (b, high) = points[at - 1 : at + 1]
    return max(0.0, low + (high - low) * (x - a) / (b - a))


class CostTable:
    """What steps cost on one machine, as measured at some numbers of rows and lengths of sequences."""

    def __init__(self, entries: Sequence[CostEntry]):
        self.entries = list(entries)
        self._known: dict[tuple, float] = {}

    def cost(self, what: Shape | int, greedy: bool, rows: int, longest: int) -> float:
        """The cost in plain steps (`CostEntry.of`), from the entry of the fewest rows that are at least `rows`, on
        sequences whose length is nearest to `longest`, in powers of two."""
        octave = longest.bit_length()
        key = (what, greedy, rows, octave)
        if key not in self._known:
            self._known[key] = self._entry(greedy, rows, octave).of(what)
        return self._known[key]

    def _entry(self, greedy: bool, rows: int, octave: int) -> CostEntry:
        def distance(entry: CostEntry) -> tuple:
            apart = (entry.rows < rows, abs(entry.rows - rows))
            return (entry.greedy != greedy, *apart, abs(entry.context.bit_length() - octave))

        return min(self.entries, key=distance)


def measure_table(
    target: Target,
    head: Speculator,
    shapes: Sequence[Shape],
    sizes: Sequence[tuple[int, int, bool]],
    seconds: float,
) -> list[CostEntry]:
    """Measure steps of the head with these shapes, and without a draft.

    Args:
        sizes: rows, length of their sequences, whether greedily: the most wanted first.
        seconds: when so many have gone by, no other size is begun, and the first is measured by few steps.
    """
    began = time.perf_counter()

    def late() -> bool:
        return target.broadcast_object(time.perf_counter() - began > seconds)

    def measured(size: tuple[int, int, bool], blocks: int) -> None:
        rows, context, greedy = size
        prompts = [[(7 * i + 3 * row) % target.vocab_size for i in range(context)] for row in range(rows)]
        for shape, own in zip(shapes, costs.setdefault(size, [StepSeconds() for _ in shapes]), strict=True):
            if isinstance(shape, Hybrid):
                shape.found = Found.of([[0] * shape.depth] * rows, target.device)
            measure(target, HeadDrafter(head, shape), prompts, Sampling(0.0 if greedy else 1.0), blocks, own)

    costs: dict[tuple[int, int, bool], list[StepSeconds]] = {}
    for size in sizes:
        for blocks in _ROUNDS:
            if size not in costs or not late():
                measured(size, blocks)
        if late():
            break
    for greedy in (True, False):
        first = next((size for size in costs if size[2] == greedy), None)
        if first and not late():
            measured(first, _MORE)
    entries = []
    for (rows, context, greedy), each in costs.items():
        plain = _interquartile_mean(seconds for own in each for seconds in own.plain) / (BLOCK - 1)
        ratios = [(shape, *own.ratios()) for shape, own in zip(shapes, each, strict=True)]
        entries.append(CostEntry(rows, context, greedy, plain, ratios))
    return entries
