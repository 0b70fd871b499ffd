"""Cost table of decoding steps: seconds of a step over those of a plain step, interpolated between measurements.

Adaptive drafting reads it before every step. `speculator.drafters.measure` makes its entries; `decoding.json` has them.
"""

from __future__ import annotations

import logging
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any

from speculator.decoding.drafter import Shape
from speculator.drafters.fixed_tree import FixedTree
from speculator.drafters.shapes import Chain

_log = logging.getLogger(__name__)
_CONTRADICTION, _PAIRS = 1.3, 8
"""Ratio of a step's time to its cost that contradicts it, and pairs of steps after which that is believed."""


@dataclass
class CostEntry:
    """Measured costs of a step of `rows` rows, in units of a plain step.

    Attributes:
        rows: number of rows that decode.
        greedy: measured at temperature 0, else at 1.
        drafts: by shape, the cost of a step in which every row has this draft of the head.
        verify: cost of a step in which the head drafts nothing, by the number of lookup tokens in all rows together.
    """

    rows: int
    greedy: bool
    drafts: dict[Shape, float]
    verify: dict[int, float] = field(default_factory=dict)

    def __post_init__(self):
        chains = {s.nodes: cost for s, cost in self.drafts.items() if isinstance(s, Chain)}
        # Not measured: at most what chains of as many tokens cost.
        verify = self.verify if len(self.verify) > 1 else {self.rows * n: cost for n, cost in chains.items()}
        self._verify, self._chains = _rising({0: 1.0} | self.verify | verify), _rising({0: 1.0} | chains)
        self._trees = {s.paths: cost for s, cost in self.drafts.items() if isinstance(s, FixedTree)}

    def of(self, shape: Shape | None, tokens: float) -> float:
        """Return the cost of a step in plain steps, interpolated; infinite for a tree that was not measured.

        Args:
            shape: what the head drafts; None: nothing.
            tokens: drafted tokens that all rows together verify. A row may verify a lookup path in place of the draft.
        """
        # The measured step verified `rows * shape.nodes` tokens. What it cost is kept, and the difference in verified
        # tokens is added: a chain of 2 in 2 rows, of which one verifies a path of 8, has 10 tokens in place of 4.
        verified = _interpolate(self._verify, tokens)
        if shape is None:
            return verified
        if isinstance(shape, FixedTree):
            own = self._trees.get(shape.paths, inf)
        else:
            own = _interpolate(self._chains, shape.nodes)
        return own + verified - _interpolate(self._verify, self.rows * shape.nodes)


def _rising(points: dict[int, float]) -> list[tuple[int, float]]:
    """Return the points (x, cost) in order, each at least as high as those before; noise may have made it lower."""
    # The costs 1, 1.3, 1.2, 1.5 become 1, 1.3, 1.3, 1.5.
    return list(zip(sorted(points), accumulate((points[x] for x in sorted(points)), max), strict=True))


def _interpolate(points: list[tuple[int, float]], x: float) -> float:
    """Return the value at x of the line through the two points around it, or through the last two."""
    if len(points) == 1:
        return points[0][1]
    # Index of the right one of the two points: at least 1, and the last point for an x beyond all.
    at = min(max(1, bisect_left(points, (x,))), len(points) - 1)
    (a, low), (b, high) = points[at - 1 : at + 1]
    return low + (high - low) * (x - a) / (b - a)


class CostTable:
    """Step costs of one machine, measured at some numbers of rows; call it for the cost of a step.

    Args:
        entries: the measurements.
        learns: correct the table if steps take much longer or shorter than it says.
    """

    def __init__(self, entries: Sequence[CostEntry], learns: bool = True):
        self.entries, self._learns = sorted(entries, key=lambda entry: entry.rows), learns
        self._known: dict[tuple[Shape | None, int, bool, int], float] = {}
        self._factors: dict[tuple[bool, int], float] = {}
        self._before: dict[tuple[bool, int], tuple[bool, float, float]] = {}
        self._ratios: dict[tuple[bool, int], deque[float]] = {}

    def __call__(self, shape: Shape | None, tokens: int, greedy: bool, rows: int) -> float:
        """Return the cost of a step, in plain steps of as many rows, interpolated between numbers of rows.

        Args:
            shape, tokens: see `CostEntry.of`.
            greedy: all rows are at temperature 0.
            rows: number of rows that decode.
        """
        key = (shape, tokens, greedy, rows)
        if key not in self._known:
            entries = [entry for entry in self.entries if entry.greedy == greedy] or self.entries
            more = next((entry for entry in entries if entry.rows >= rows), entries[-1])
            less = next((entry for entry in reversed(entries) if entry.rows <= rows), more)
            # Each entry answers for as many tokens per row: for 6 rows with 12 tokens, that of 4 rows is asked about 8.
            low, high = (entry.of(shape, tokens / rows * entry.rows) for entry in (less, more))
            share = (rows - less.rows) / (more.rows - less.rows) if less.rows < rows < more.rows else 1.0
            cost = high if high == inf else low + (high - low) * share
            self._known[key] = 1 + (cost - 1) * self._factors.get(_alike(greedy, rows), 1.0)
        return self._known[key]

    def observe(self, shape: Shape | None, tokens: int, greedy: bool, rows: int, seconds: float) -> None:
        """Record a step's time, and correct the costs if they are wrong by 30% or more over several steps.

        Only a step with a draft and the neighbouring step without one are compared: the ratio of their times with
        that of their costs. A correction holds for similar numbers of rows, see `_alike`.

        Args:
            shape, tokens, greedy, rows: see `__call__`.
            seconds: measured time of the step.
        """
        if not self._learns:
            return
        key, drafted, cost = _alike(greedy, rows), bool(tokens or shape), self(shape, tokens, greedy, rows)
        was_drafted, seconds_before, cost_before = self._before.get(key, (drafted, seconds, cost))
        self._before[key] = drafted, seconds, cost
        # Only neighbouring steps are compared, because steps take longer as the texts grow.
        if drafted == was_drafted:
            return
        # 1 if the two steps' times are in the ratio of their costs: a draft of cost 1.4 that takes 2.1 plain steps
        # gives 1.5.
        ratio = seconds * cost_before / (seconds_before * cost)
        ratios = self._ratios.setdefault(key, deque(maxlen=_PAIRS))
        ratios.append(ratio if drafted else 1 / ratio)
        # The median, because a step that captures a graph or is interrupted takes many times as long.
        took = statistics.median(ratios)
        if len(ratios) < _PAIRS or 1 / _CONTRADICTION < took < _CONTRADICTION:
            return
        cost = max(cost, cost_before)  # of the step with a draft
        if not self._factors:
            message = "steps with drafts at %d rows take %.2f times as long as their measured cost says: corrected"
            _log.warning(message, rows, took)
        # A factor on what the draft adds: 1 + (cost - 1) f is the cost that was seen.
        self._factors[key] = self._factors.get(key, 1.0) * max(0.1, took * cost - 1) / max(0.1, cost - 1)
        self._known.clear()
        ratios.clear()


def _alike(greedy: bool, rows: int) -> tuple[bool, int]:
    """Return a key of the steps that are corrected together: those of 1, 2, 3 to 4, 5 to 8, ... rows."""
    return greedy, (rows - 1).bit_length()


def entry_to_json(entry: CostEntry) -> dict[str, Any]:
    """Return an entry as JSON values, for decoding.json."""
    drafts = [{**shape_to_json(shape), "cost": cost} for shape, cost in entry.drafts.items()]
    return {
        "rows": entry.rows,
        "greedy": entry.greedy,
        "verify": list(map(list, entry.verify.items())),
        "drafts": drafts,
    }


def entry_from_json(read: dict[str, Any]) -> CostEntry:
    """Undo `entry_to_json`. Raises KeyError, TypeError or UserError on anything else."""
    drafts = {shape_from_json(step): step["cost"] for step in read["drafts"]}
    return CostEntry(read["rows"], read["greedy"], drafts, dict(read["verify"]))


def shape_to_json(shape: Shape) -> dict[str, Any]:
    """Return a chain or a fixed tree as JSON values: {"chain": length} or {"tree": paths}."""
    if isinstance(shape, FixedTree):
        return {"tree": [list(path) for path in shape.paths]}
    return {"chain": shape.nodes}


def shape_from_json(read: dict[str, Any]) -> Shape:
    """Undo `shape_to_json`."""
    return FixedTree(read["tree"]) if "tree" in read else Chain(read["chain"])
