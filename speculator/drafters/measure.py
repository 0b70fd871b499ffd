"""Measure how long decoding steps take, on real steps of an engine.

`measure_costs` times whole steps with several drafts and numbers of rows, for the table of `speculator.drafters.costs`.
`paired_steps` times those of one drafter after given texts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, TypeVar

import torch

from speculator.decoding.drafter import LogitsSource, LookupPaths, Shape
from speculator.decoding.engine import Engine
from speculator.decoding.request import Request
from speculator.decoding.sampling import Sampling
from speculator.device import synchronize
from speculator.drafters import Drafter, HeadDrafter
from speculator.drafters.adaptive import PathOrDraft
from speculator.drafters.costs import CostEntry, fitted
from speculator.drafters.price import LONGEST_PATH
from speculator.heads import Speculator
from speculator.kernels import cuda_graphs
from speculator.kernels.cuda_graphs import Captured, capturable
from speculator.target.model import Target
from speculator.terminal import log

Result = TypeVar("Result")
_TRIES = 4  # timed runs of the same work until no CUDA graph had to be captured
_ROUNDS = 5  # steps with each draft when whole steps are measured
_CAPTURE_STEPS = 3  # steps until a new shape is replayed as a CUDA graph without further checks
_PROMPT = 256  # tokens of the rows' prompt: attention and so drafted tokens cost more after long texts
_OWN = 8  # tokens at the end of a prompt that differ between rows
_SHORT_PATH = 2
_PATHS, _NOTHING = PathOrDraft(LONGEST_PATH), PathOrDraft(0)


def interquartile_mean(values: Iterable[float]) -> float:
    """Return the mean without the lowest and the highest quarter: of 1 2 3 9 it is 2.5."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


@torch.inference_mode()
def paired_steps(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    count: int,
    rule: str | None = None,
) -> list[tuple[float, float]]:
    """Decode after `prompts` without and with a drafter in turns; return the seconds of `count` pairs of steps.

    Pairs that captured a graph don't count. Sequences may run past the end of the context, where positions are clamped:
    the tokens are then meaningless, but their time is not.
    """
    room = (count + _CAPTURE_STEPS) * (drafter.num_speculative_tokens + 1) + 2
    capacity = max(map(len, prompts)) + room
    engines = [Engine(target, who, slots=len(prompts), rule=rule, capacity=capacity) for who in (None, drafter)]
    requests = []
    for engine in engines:
        for row, prompt in enumerate(prompts):
            own = Sampling(sampling.temperature, seed=sampling.seed + row)
            requests.append(engine.enqueue(Request(target.text(prompt), own, max_new_tokens=room)))
        engine.admit()
        while engine.scheduler.prefilling:
            engine.prefill()
    pairs: list[tuple[float, float]] = []
    for _ in range(count + _CAPTURE_STEPS):
        prepared = Captured.prepared
        plain, drafted = (clock(engine.step)[0] for engine in engines)
        if Captured.prepared == prepared:
            pairs.append((plain, drafted))
        if len(pairs) == count:
            break
    for request in requests:  # the steps of one that has failed do nothing
        request.check()
    return pairs


def without_captures(work: Callable[[], Result]) -> Result:
    """Run `work` until it captures no CUDA graph, which would take most of its time, and return its last result."""
    for _ in range(_TRIES):
        prepared = Captured.prepared
        result = work()
        if Captured.prepared == prepared:
            return result
    log(f"a timed run captured CUDA graphs in all of {_TRIES} tries: its figures are too slow")
    return result


def clock(work: Callable[..., Result], *given: Any) -> tuple[float, Result]:
    synchronize()
    started = time.perf_counter()
    result = work(*given)
    synchronize()
    return time.perf_counter() - started, result


def packs_rows(target: Target) -> bool:
    """Return whether a step without a tree computes only the tokens that exist, and no row is padded to the longest."""
    return not target.recurrent and target.device.type == "cpu" and "cpu" not in cuda_graphs.DEVICES


@torch.inference_mode()
def measure_costs(
    target: Target, head: Speculator | None, shapes: Sequence[Shape], sizes: Sequence[tuple[int, bool]], seconds: float
) -> list[CostEntry]:
    """Time whole steps of the engine, and return an entry of the cost table for each of `sizes`.

    Each of the drafts, long lookup paths in all rows and in one, and short ones in half of the rows take turns. Before
    each of these steps comes one without a draft, and only the two are compared: the speed of a machine changes within
    seconds. Where rows are padded to the longest, a path in one row costs as much as paths in all, and only these are
    measured.

    Args:
        head: None: only lookup paths are measured, which tell what the target's verification costs.
        shapes: drafts of the head, the most important first.
        sizes: (rows, greedy), the most important first.
        seconds: time limit. It is checked before every step; what is not measured by then is left out.
    """
    deadline = time.perf_counter() + seconds
    drafter = Drafter() if head is None else HeadDrafter(head)
    drafter.memory = LogitsSource() if head is None else drafter.memory
    drafter.reshape(max((*shapes, _PATHS), key=lambda shape: shape.nodes))
    drafter.memory.paths = LookupPaths(LONGEST_PATH)
    engines = {rows: Engine(target, drafter, slots=rows) for rows, _ in sizes}
    packed = packs_rows(target)
    steps: dict[tuple[int, bool], list[tuple[int, int, bool, float]]] = {size: [] for size in sizes}
    # The most important drafts come first, because the time may end within a round.
    for _ in range(_ROUNDS + (_CAPTURE_STEPS if capturable(target, drafter) else 0)):
        for (rows, greedy), own in steps.items():
            paths = [(rows, LONGEST_PATH), *[(rows, _SHORT_PATH)] * (head is None)]
            if packed:
                paths += [(max(1, rows // 2), _SHORT_PATH), *[(1, LONGEST_PATH)] * (rows > 1)]
            for what, cost in _round(engines[rows], greedy, [*shapes[:2], *paths, *shapes[2:]], deadline):
                if isinstance(what, tuple):
                    own.append((0, prod(what), True, cost))
                else:
                    own.append((what.levels, rows * what.nodes, False, cost))
    return [fitted(*size, own) for size, own in steps.items() if own]


def _round(
    engine: Engine, greedy: bool, drafts: Sequence[Shape | tuple[int, int]], deadline: float
) -> Iterator[tuple[Shape | tuple[int, int], float]]:
    """Decode in all slots; yield each draft, and the time of a step with it over that of the step before, without one.

    Args:
        drafts: shapes of the head's draft, and (rows that have a lookup path, its tokens) where it drafts nothing.
        deadline: value of the clock at which measuring stops.
    """
    rows, size, slots = engine.rows, engine.target.vocab_size, len(engine.scheduler.slots)
    if time.perf_counter() > deadline:
        return
    # One prompt for all rows but for its last tokens: the first row's keys and values are copied. Rows of equal texts,
    # and paths of one token, would choose the same experts, whose weights are then read once for all.
    # Recurrent states can't be copied, so every row computes its prompt, and attention is a smaller part of a step.
    length = _PROMPT // 4 if engine.target.recurrent else _PROMPT
    prompt = [7 * i % size for i in range(min(length, engine.target.context_length // 4))]
    draw, temperature, requests = random.Random(0), 0.0 if greedy else 1.0, []
    for row in range(slots):
        prompt[-_OWN:] = draw.choices(range(size), k=len(prompt[-_OWN:]))
        requests.append(engine.submit(list(prompt), Sampling(temperature, seed=row), eos_token_ids=()))
    engine.admit()
    while engine.scheduler.prefilling and time.perf_counter() < deadline:
        engine.prefill()

    def step(shape: Shape) -> float | None:
        """Return the seconds of a step; None if there was no time for it, or it captured a graph."""
        if time.perf_counter() > deadline or any(request.finish_reason for request in requests):
            return None
        rows.reshape(shape)
        prepared = Captured.prepared
        took, _ = clock(engine.step)
        return took if Captured.prepared == prepared else None

    for what in drafts:
        if isinstance(what, tuple):
            # Spread over the rows, as found paths are: neighbours of unequal lengths attend apart. Two paths in 8 rows
            # are in rows 2 and 6.
            count, length = what
            own = {(2 * i + 1) * slots // (2 * count) for i in range(count)}
            rows.memory.paths.put([draw.choices(range(size), k=length) * (row in own) for row in range(slots)])
        plain, drafted = step(_NOTHING), step(_PATHS if isinstance(what, tuple) else what)
        if plain and drafted:
            yield what, drafted / plain
    for request in requests:
        request.check()
        request.cancel()
