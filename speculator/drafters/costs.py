"""Costs of decoding steps in units of one plain step, measured on real steps.

Reports split the cost of a drafted step into c per drafted token and v for verification (2211.17192). Adaptive drafting
needs whole steps only, for several drafts and numbers of rows.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any, TypeVar

import torch

from speculator.decoding.cuda_graphs import Captured, capturable
from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Shape
from speculator.decoding.engine import Engine, Verified
from speculator.decoding.request import Request
from speculator.decoding.sampling import Sampling
from speculator.device import synchronize
from speculator.drafters import Chain, Drafter, FixedTree, HeadDrafter
from speculator.drafters.adaptive import LookupPath
from speculator.drafters.hybrid import Hybrid
from speculator.drafters.ngram import Found
from speculator.heads import Speculator
from speculator.target.model import Target

Result = TypeVar("Result")
BLOCK = 5
"""Steps of one kind in a row when c and v are measured; the first is not counted."""
_ROUNDS, _TIMED_STEPS = 3, 3
"""Turns of each draft when whole steps are measured, and steps in a turn."""
_CAPTURE_STEPS = 3  # steps until a new shape is replayed as a CUDA graph without further checks
_PROMPT = 8  # tokens of the rows' prompts


@dataclass
class StepSeconds:
    """Seconds of `BLOCK` - 1 steps, one entry per block: plain steps, and the two parts of drafted steps.

    Attributes:
        plain: plain steps.
        draft: selecting the rows, drafting, and updating the drafter.
        verify: verification, the accept rule, the commit and the copy to the host.
    """

    plain: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)

    def figures(self, num_speculative_tokens: int) -> dict[str, float]:
        """Cost c per token of a whole draft, cost v of a verification, and seconds of a plain step."""
        draft, verify = self.ratios()
        return {
            "draft_over_decode": draft / num_speculative_tokens,
            "verify_over_decode": verify,
            "decode_seconds": _interquartile_mean(self.plain) / (BLOCK - 1),
        }

    def ratios(self) -> tuple[float, float]:
        """Seconds of drafting and of verification over those of a plain step: interquartile means over the blocks.

        Each block is compared with the plain steps just before it.
        """
        draft = _interquartile_mean(part / plain for part, plain in zip(self.draft, self.plain, strict=True))
        return draft, _interquartile_mean(part / plain for part, plain in zip(self.verify, self.plain, strict=True))


def _interquartile_mean(values: Iterable[float]) -> float:
    """Mean without the lowest and the highest quarter."""
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
    """Decode `count` steps after `prompts`; yield each step's draft and result, and add its seconds to `costs`.

    Every block of `BLOCK` drafted steps follows as many plain steps, which are undone, so both are timed after the same
    sequence. The first step of a block, and blocks that captured a graph, don't count. Sequences may run past the end
    of the context, where positions are clamped: the tokens are then meaningless, but their time is not.
    """
    # Room for every draft accepted as a whole, and for the plain steps that are undone.
    limit = count * (drafter.num_speculative_tokens + 1) + BLOCK + 2
    engine = Engine(target, drafter, slots=len(prompts), rule=rule, capacity=max(map(len, prompts)) + limit)
    own = [Sampling(sampling.temperature, seed=sampling.seed + row) for row in range(len(prompts))]
    requests = [engine.enqueue(Request(*row, limit)) for row in zip(prompts, own, strict=True)]
    engine.admit()
    while engine.scheduler.prefilling:
        engine.prefill()
    cache, who, capturing = engine.cache, engine.drafter, engine.capturing
    methods = ("decode_rows", "draft", "verify", "commit", "update_drafter")
    plainly, propose, verify, commit, update = map(engine.capturable_method, methods)

    def plain_steps() -> float:
        """Seconds of a block of plain steps, without the first one."""
        # Undoing a step is setting back lengths, recurrent states and the pending tokens; keys above the length are
        # free.
        state = [*cache.state, engine.pending]
        before = [each.clone() for each in state]
        engine.drafter, engine.capturing = None, capturable(target, None)
        seconds = [
            clock(lambda: engine.append_tokens(plainly(engine.select_decoding_rows()).tolist()))[0]
            for _ in range(BLOCK)
        ]
        engine.drafter, engine.capturing = who, capturing
        for each, old in zip(state, before, strict=True):
            each.copy_(old)
        for request in requests:
            del request.sequence[-BLOCK:], request.steps[-BLOCK:]
        return sum(seconds[1:])

    plain, sums, prepared = 0.0, [0.0, 0.0], 0
    for number in range(count):
        place = number % BLOCK
        if place == 0:
            prepared = Captured.prepared
            plain, sums = plain_steps(), [0.0, 0.0]
        drafting, (draft, noise) = clock(lambda: propose(engine.select_decoding_rows()))
        verifying, result = clock(verify, draft, noise)
        committing, _ = clock(commit, result)
        updating, _ = clock(update, result)
        appending, _ = clock(lambda report: engine.append_tokens(report.tolist()), result.report)
        # The first step of a block doesn't count: it follows steps of the other kind.
        if place:
            sums = [sums[0] + drafting + updating, sums[1] + verifying + committing + appending]
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
    """Add the seconds of about `blocks` blocks of steps after `prompts` to `costs`."""
    captures = 3 if capturable(target, drafter) else 0  # blocks lost at the start, and where the cache grows
    for _ in timed_steps(target, drafter, prompts, sampling, (blocks + captures) * BLOCK, costs, rule):
        pass


def clock(work: Callable[..., Result], *given: Any) -> tuple[float, Result]:
    """Run `work`, wait for the device, and return the seconds and the result."""
    synchronize()
    started = time.perf_counter()
    result = work(*given)
    synchronize()
    return time.perf_counter() - started, result


@dataclass
class CostEntry:
    """Costs of steps of `rows` rows, in plain steps.

    Attributes:
        greedy: measured at temperature 0, else at 1.
        costs: seconds of a whole step with each draft over those of a plain step.
    """

    rows: int
    greedy: bool
    costs: dict[Shape, float]

    def __post_init__(self):
        paths = {0: 1.0} | {s.nodes: cost for s, cost in self.costs.items() if isinstance(s, LookupPath)}
        chains = {0: paths[0]} | {s.nodes: cost for s, cost in self.costs.items() if isinstance(s, Chain)}
        if len(paths) == 1:  # not measured: at most what a chain of as many tokens costs
            paths |= chains
        self._paths, self._chains = _rising(paths), _rising(chains)
        self._trees = {s.paths: cost for s, cost in self.costs.items() if isinstance(s, FixedTree)}
        hybrids = [cost - self._separately(s) for s, cost in self.costs.items() if isinstance(s, Hybrid)]
        self._joining = max(0.0, statistics.fmean(hybrids)) if hybrids else inf

    def of(self, shape: Shape) -> float:
        """The cost of a step: as measured for a tree, else interpolated over the measured chains and paths.

        A hybrid draft is infinitely expensive if none was measured, and so is a tree that was not.
        """
        if isinstance(shape, LookupPath):
            return _interpolate(self._paths, shape.nodes)
        if isinstance(shape, Hybrid):
            return self._separately(shape) + self._joining
        if isinstance(shape, FixedTree):
            return self._trees.get(shape.paths, inf)
        return _interpolate(self._chains, shape.nodes)

    def _separately(self, hybrid: Hybrid) -> float:
        """Cost of the head's part, plus verification of the path's tokens."""
        inner = hybrid.inner.nodes
        path = _interpolate(self._paths, inner + hybrid.length) - _interpolate(self._paths, inner)
        return self.of(hybrid.inner) + path


def _rising(points: dict[int, float]) -> list[tuple[int, float]]:
    """The points in order, each at least as high as those before: noise could say that more tokens cost less."""
    return list(zip(sorted(points), accumulate((points[x] for x in sorted(points)), max), strict=True))


def _interpolate(points: list[tuple[int, float]], x: int) -> float:
    """The value at x on the line through the two points around it, or the last two."""
    if len(points) == 1:
        return points[0][1]
    at = min(max(1, bisect_left(points, (x,))), len(points) - 1)
    (a, low), (b, high) = points[at - 1 : at + 1]
    return low + (high - low) * (x - a) / (b - a)


class CostTable:
    """Step costs of one machine, measured at some numbers of rows."""

    def __init__(self, entries: Sequence[CostEntry]):
        self.entries = list(entries)
        self._known: dict[tuple[Shape, bool, int], float] = {}

    def __call__(self, shape: Shape, greedy: bool, rows: int) -> float:
        """The cost in plain steps, from the entry of the fewest rows that are at least `rows`."""
        key = (shape, greedy, rows)
        if key not in self._known:
            self._known[key] = min(self.entries, key=lambda entry: _distance(entry, greedy, rows)).of(shape)
        return self._known[key]


def _distance(entry: CostEntry, greedy: bool, rows: int) -> tuple[bool, bool, int]:
    return entry.greedy != greedy, entry.rows < rows, abs(entry.rows - rows)


def entry_to_json(entry: CostEntry) -> dict[str, Any]:
    """Convert an entry for decoding.json."""
    steps = [{**shape_to_json(shape), "cost": cost} for shape, cost in entry.costs.items()]
    return {"rows": entry.rows, "greedy": entry.greedy, "steps": steps}


def entry_from_json(read: dict[str, Any]) -> CostEntry:
    """Undo `entry_to_json`. Raises KeyError, TypeError or UserError on anything else."""
    return CostEntry(read["rows"], read["greedy"], {shape_from_json(step): step["cost"] for step in read["steps"]})


def shape_to_json(shape: Shape) -> dict[str, Any]:
    """Convert a chain, a fixed tree, a lookup path, or a hybrid of these, for JSON."""
    if isinstance(shape, Hybrid):
        return {**shape_to_json(shape.inner), "path": shape.length}
    if isinstance(shape, FixedTree):
        return {"tree": [list(path) for path in shape.paths]}
    return {"path" if isinstance(shape, LookupPath) else "chain": shape.nodes}


def shape_from_json(read: dict[str, Any]) -> Shape:
    """Undo `shape_to_json`."""
    if "tree" in read or "chain" in read:
        inner = FixedTree(read["tree"]) if "tree" in read else Chain(read["chain"])
        return Hybrid(inner, read["path"]) if "path" in read else inner
    return LookupPath(read["path"])


@torch.inference_mode()
def measure_costs(
    target: Target, head: Speculator, shapes: Sequence[Shape], sizes: Sequence[tuple[int, bool]], seconds: float
) -> list[CostEntry]:
    """Time whole engine steps with these drafts and without, in turns.

    Args:
        shapes: drafts, the most important first.
        sizes: (rows, greedy), the most important first.
        seconds: time limit. It is checked before every step; what is not measured by then is left out.
    """
    deadline = time.perf_counter() + seconds
    largest = max(shapes, key=lambda shape: shape.nodes)
    times: dict[tuple[int, bool], dict[Shape | None, list[float]]] = {}
    engines = {
        rows: (Engine(target, None, slots=rows), Engine(target, HeadDrafter(head, largest), slots=rows))
        for rows, _ in sizes
    }
    for _ in range(_ROUNDS):
        for rows, greedy in sizes:
            plain, drafting = engines[rows]
            for shape in (None, *shapes):
                own = times.setdefault((rows, greedy), {}).setdefault(shape, [])
                own += _step_seconds(drafting if shape else plain, shape, greedy, deadline)
    entries = []
    for (rows, greedy), by_shape in times.items():
        medians = {shape: statistics.median(own) for shape, own in by_shape.items() if own}
        costs = {shape: seconds / medians[None] for shape, seconds in medians.items() if shape} if medians else {}
        entries += [CostEntry(rows, greedy, costs)] if costs else []
    return entries


def _step_seconds(engine: Engine, shape: Shape | None, greedy: bool, deadline: float) -> list[float]:
    """Seconds of a few steps over full slots. The first step, which includes the prefill, and captures don't count."""
    target, slots, seconds = engine.target, len(engine.scheduler.slots), []
    if isinstance(shape, Hybrid | LookupPath):
        shape.found = Found.of([[0] * shape.depth] * slots, target.device)
    if shape:
        engine.reshape(shape)
    prompts = [[(7 * i + 3 * row) % target.vocab_size for i in range(_PROMPT)] for row in range(slots)]
    requests = [engine.submit(prompt, Sampling(0.0 if greedy else 1.0), eos_token_ids=()) for prompt in prompts]
    warm_up = 1 + (_CAPTURE_STEPS if engine.capturing else 0)
    for number in range(warm_up + _TIMED_STEPS):
        if time.perf_counter() > deadline or any(request.finish_reason for request in requests):
            break
        prepared = Captured.prepared
        took, _ = clock(engine.step)
        if number >= warm_up and Captured.prepared == prepared:
            seconds.append(took)
    for request in requests:
        request.cancel()
    return seconds
