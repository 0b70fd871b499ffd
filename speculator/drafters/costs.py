"""Cost table of decoding steps: seconds of a step over those of a plain step, fitted to measurements.

Adaptive drafting reads it before every step. `speculator.drafters.measure` makes its entries; `decoding.json` has them.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from speculator.decoding.drafter import Shape
from speculator.errors import UserError

_REWEIGHTINGS = 20  # rounds of weighted least squares, which converge to the least absolute errors
_EXACT = 0.01  # smallest error, in plain steps, that is used as a weight
_log = logging.getLogger(__name__)
_CONTRADICTION, _PAIRS = 1.3, 8
"""Ratio of a step's time to its cost that contradicts it, and pairs of steps after which that is believed."""


@dataclass
class CostEntry:
    """What a step of `rows` rows costs more than a plain one, in units of a plain step.

    Attributes:
        greedy: measured at temperature 0, else at 1.
        head: added if the head drafts, however little.
        path: added if a row verifies a lookup path: rows of unlike lengths attend apart.
        level: added for each level that the head drafts.
        token: added for each drafted token that the target verifies, in all rows together.
    """

    rows: int
    greedy: bool
    head: float
    path: float
    level: float
    token: float

    def of(self, levels: int, tokens: float, path: bool) -> float:
        """Return the cost of a step in plain steps.

        Args:
            levels: levels that the head drafts; 0: it drafts nothing.
            tokens: drafted tokens that all rows together verify.
            path: a row verifies a lookup path in place of the head's draft.
        """
        return 1 + self.head * (levels > 0) + self.path * path + self.level * levels + self.token * tokens


def entries_from_json(read: Sequence[dict[str, Any]]) -> list[CostEntry]:
    """Undo `dataclasses.asdict` of each entry. Raises UserError on anything else, such as costs in an older form."""
    try:
        entries = [CostEntry(**entry) for entry in read]
        for entry in entries:
            entry.of(1, 1, True)
    except TypeError:
        raise UserError("the recorded step costs were written by another version: start in a new folder") from None
    return entries


def fitted(rows: int, greedy: bool, steps: Sequence[tuple[int, int, bool, float]]) -> CostEntry:
    """Fit an entry to measured steps, by the least sum of absolute errors; no parameter is negative.

    With a measured cost for each draft, the choice would fall on those that noise made too cheap.

    Args:
        steps: levels, tokens and path (see `CostEntry.of`) and measured cost of each step; at least one.
    """
    sizes = [(levels > 0, path, levels, tokens) for levels, tokens, path, _ in steps]
    costs = [cost - 1 for *_, cost in steps]
    x, y = (torch.tensor(each, dtype=torch.double, device="cpu") for each in (sizes, costs))
    # Scaled to 1, so that the cost of a single draft is shared out evenly among the parameters.
    scale = x.amax(0).clamp_min(1)
    found, weights = torch.zeros_like(scale), torch.ones_like(y)
    for _ in range(_REWEIGHTINGS):
        found, left = torch.zeros_like(found), [*range(len(scale))]
        while left:
            solution = torch.linalg.lstsq(weights[:, None] * (x / scale)[:, left], weights * y, driver="gelsd").solution
            if solution.min() >= 0:
                found[left] = solution
                break
            left.pop(int(solution.argmin()))
        # A square weighted by 1 / |last error| is that error's absolute value.
        weights = (x / scale @ found - y).abs().clamp_min(_EXACT).rsqrt()
    return CostEntry(rows, greedy, *(found / scale).tolist())


class CostTable:
    """Step costs of one machine, measured at some numbers of rows; call it for the cost of a step.

    Args:
        learns: correct the table if steps take much longer or shorter than it says.
    """

    def __init__(self, entries: Sequence[CostEntry], learns: bool = True):
        self.entries, self._learns = sorted(entries, key=lambda entry: entry.rows), learns
        self._known: dict[tuple[int, int, bool, bool, int], float] = {}
        self._factors: dict[tuple[bool, int], float] = {}
        self._before: tuple[bool, int, bool, float, float] | None = None
        self._pairs: dict[tuple[bool, int], deque[tuple[float, float]]] = {}

    def __call__(self, shape: Shape | None, tokens: int, path: bool, greedy: bool, rows: int) -> float:
        """Return the cost of a step, in plain steps of as many rows, interpolated between numbers of rows.

        Args:
            shape: what the head drafts; None: nothing.
            tokens, path: see `CostEntry.of`.
            greedy: all rows are at temperature 0.
        """
        levels = shape.levels if shape else 0
        key = (levels, tokens, path, greedy, rows)
        if key not in self._known:
            entries = [entry for entry in self.entries if entry.greedy == greedy] or self.entries
            more = next((entry for entry in entries if entry.rows >= rows), entries[-1])
            less = next((entry for entry in reversed(entries) if entry.rows <= rows), more)
            # Each entry answers for as many tokens per row: for 6 rows with 12 tokens, that of 4 rows is asked about 8.
            # Beyond the most rows that were measured, a token costs what it costs there.
            scales = [1 if rows > more.rows else entry.rows / rows for entry in (less, more)]
            low, high = (
                entry.of(levels, tokens * scale, path) for entry, scale in zip((less, more), scales, strict=True)
            )
            share = (rows - less.rows) / (more.rows - less.rows) if less.rows < rows < more.rows else 1.0
            self._known[key] = 1 + (low + (high - low) * share - 1) * self._factors.get(_key(greedy, rows), 1.0)
        return self._known[key]

    def observe(self, shape: Shape | None, tokens: int, path: bool, greedy: bool, rows: int, seconds: float) -> None:
        """Record a step's time, and correct the costs if they are wrong by 30% or more over several steps.

        A step with a draft is compared with a plain one just before or after it, because steps take longer as the texts
        grow. A correction holds for similar numbers of rows, see `_key`.
        """
        if not self._learns:
            return
        key, drafted, cost = _key(greedy, rows), bool(tokens or shape), self(shape, tokens, path, greedy, rows)
        before, self._before = self._before, (greedy, rows, drafted, seconds, cost)
        if before is None or before[:3] != (greedy, rows, not drafted):
            return
        # What the step with a draft took, in plain steps, and what the table says.
        pair = (seconds / before[3], cost) if drafted else (before[3] / seconds, before[4])
        pairs = self._pairs.setdefault(key, deque(maxlen=_PAIRS))
        pairs.append(pair)
        # Medians, because a step that captures a graph or is interrupted takes many times as long.
        ratio = statistics.median(took / said for took, said in pairs)
        if len(pairs) < _PAIRS or 1 / _CONTRADICTION < ratio < _CONTRADICTION:
            return
        if not self._factors:
            message = "steps with drafts at %d rows take %.2f times as long as their measured cost says: corrected"
            _log.warning(message, rows, ratio)
        # A factor on what the draft adds to a plain step: a cost of 1.4 that takes 1.8 has the factor 2.
        factor = statistics.median(max(0.1, took - 1) / max(0.1, said - 1) for took, said in pairs)
        self._factors[key] = self._factors.get(key, 1.0) * factor
        self._known.clear()
        pairs.clear()


def _key(greedy: bool, rows: int) -> tuple[bool, int]:
    """Return a key of the steps that are corrected together: those of 1, 2, 3 to 4, 5 to 8, ... rows."""
    return greedy, (rows - 1).bit_length()
