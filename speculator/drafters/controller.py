"""Choose the next step's draft: the one with the most expected tokens per second.

The choice uses measured step costs, and acceptance estimated from earlier steps. It is made before anything of the step
is drafted, so the accept rule of whatever is drafted keeps the target's distribution. It reads no clock: the same
requests in the same order, with the same costs, get the same drafts.

Tuning measures how often drafts are accepted on one text. On another text we assume that the log-odds of all depths are
shifted by the same amount. Every request has an exponential average of this shift, which starts at the average over all
requests and slowly returns to it. The head and n-gram lookup have a shift each. A hybrid draft needs a third one: both
sources are right on easy tokens, so a looked-up token is less often right where the head's token was rejected.

Lookup is observed in every step, the head only where it drafts. A head whose average is too low by chance would
therefore stay unused, so its choice adds half a standard error to the average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from math import exp, log, sqrt
from operator import mul

from speculator.decoding.drafter import Shape
from speculator.decoding.request import Request
from speculator.drafters.hybrid import Hybrid

_LOOKUP_VARIANCE = 2.0  # of a shift before its first outcome: looked-up tokens come in runs
_HEAD_VARIANCE, _SHARED_HEAD_VARIANCE = 0.5, 0.1  # the same for the head, of one request and of all
_OPTIMISM = 0.5  # standard errors
_ROW_FORGETS, _SHARED_FORGETS = 0.02, 0.002  # share of the way back to the first variance per step
_RETURN = 1 / 200  # share of the way back to the shared average per step
_PROBE_SHARE = 0.01  # share of the time for trying a head that does not seem to pay
_PROBE_STEPS = (16, 512)  # bounds of the number of steps between two such tries
_STEP, _LIMIT = 0.125, 8.0  # shifts are rounded to a grid, so that expected tokens come from a table
_GRID = [_STEP * i - _LIMIT for i in range(round(2 * _LIMIT / _STEP) + 1)]

Greedy = bool
StepCost = Callable[[Shape, Greedy, int], float]
"""(shape of the draft, at temperature 0, rows) -> seconds of the step over those of a plain step."""


class Shift:
    """Exponential average of how much more often drafts are accepted than was measured, in log-odds.

    Its variance falls with every outcome and rises with every step, so an old average follows new outcomes quickly.
    """

    def __init__(self, value: float, variance: float, forgets: float):
        self.value, self._variance, self._first_variance, self._forgets = value, variance, variance, forgets

    def observe(self, logit: float, accepted: bool) -> None:
        """Update with one token whose measured log-odds of acceptance are `logit`."""
        # A step of the gradient of the log-likelihood, as large as the value is uncertain: 1 - chance after a hit,
        # -chance after a miss.
        self.value += self._variance * (accepted - _chance(logit + self.value))
        self._variance /= 1 + self._variance / 4  # an outcome of chance 1/2 has the information 1/4

    def advance(self) -> None:
        """Account for a step."""
        self._variance += (self._first_variance - self._variance) * self._forgets

    @property
    def optimistic_bucket(self) -> int:
        """Index of the grid point nearest to the value plus half a standard error."""
        value = self.value + _OPTIMISM * sqrt(self._variance)
        return min(len(_GRID) - 1, max(0, round((value + _LIMIT) / _STEP)))


@dataclass(eq=False)
class Choice:
    """A shape that the head can draft.

    Attributes:
        shape: shape of the draft.
        acceptance: measured acceptance rates by depth, each conditional on the parent, for greedy (True) and sampled
            (False) rows. Rows of a missing kind never get this draft.
        ends: ends[kind][bucket][i] is the chance that exactly i tokens are accepted.
        expected: expected[kind][bucket] is the expected number of tokens of a step.
    """

    shape: Shape
    acceptance: dict[Greedy, Sequence[float]]
    logits: dict[Greedy, list[float]] = field(init=False)
    ends: dict[Greedy, list[list[float]]] = field(init=False)
    expected: dict[Greedy, list[float]] = field(init=False)

    def __post_init__(self):
        self.logits = {kind: [_logit(rate) for rate in rates] for kind, rates in self.acceptance.items()}
        self.ends = {kind: [_ends(logits, shift) for shift in _GRID] for kind, logits in self.logits.items()}
        self.expected = {
            kind: [sum(map(mul, range(1, len(ends) + 1), ends)) for ends in table] for kind, table in self.ends.items()
        }


def _logit(chance: float) -> float:
    # A measured rate of 0 or 1 comes from few samples, and its log-odds would be infinite.
    chance = min(0.99, max(0.01, chance))
    return log(chance / (1 - chance))


def _chance(logit: float) -> float:
    return 1 / (1 + exp(-logit))


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Expected tokens of a step, the bonus token included, from acceptance rates by depth."""
    return 1 + sum(accumulate(acceptance, mul))


def _ends(logits: Sequence[float], shift: float) -> list[float]:
    ends, reached = [], 1.0
    for logit in logits:
        chance = _chance(logit + shift)
        # Exactly i tokens: all before are accepted, this one is not. With the chances 0.8 and 0.5: 0.2, 0.4, and 0.4
        # for both.
        ends.append(reached * (1 - chance))
        reached *= chance
    return [*ends, reached]


def fastest_shape(choices: Sequence[Choice], cost: StepCost, greedy: Greedy, rows: int) -> Shape:
    """The shape with the most tokens per second at the measured acceptance rates."""
    rates = {
        choice.shape: choice.expected[greedy][len(_GRID) // 2] / cost(choice.shape, greedy, rows)
        for choice in choices
        if greedy in choice.expected
    }
    return max(rates, key=rates.__getitem__)


class _Shifts:
    """Shifts of the head's tokens, of looked-up tokens, and of looked-up tokens where the head's was rejected."""

    def __init__(self, head_variance: float, forgets: float, start: Sequence[float] = (0.0, 0.0, 0.0)):
        variances = head_variance, _LOOKUP_VARIANCE, head_variance
        self.all = [Shift(value, variance, forgets) for value, variance in zip(start, variances, strict=True)]
        self.head, self.lookup, self.instead = self.all


class _Row(_Shifts):
    """Shifts of one request, and the path that n-gram lookup found for its next step."""

    def __init__(self, shared: _Shifts):
        super().__init__(_HEAD_VARIANCE, _ROW_FORGETS, [shift.value for shift in shared.all])
        self.steps, self.length = 0, 0  # at the last choice
        self.path: list[int] = []
        self.logit = 0.0  # measured log-odds of a match as long as the path's

    def prepare(self, request: Request, path: list[int], logit: float) -> None:
        """Read the request and its lookup path before a step."""
        self.steps, self.length, self.path, self.logit = len(request.steps), len(request.sequence), path, logit
        self._right = _chance(logit + self.lookup.value)
        self._instead = _chance(logit + self.lookup.value + self.instead.value) / self._right
        powers = accumulate(repeat(self._right, len(path)), mul)
        self._runs = [*accumulate(powers, initial=0.0)]  # expected accepted tokens of the first n of the path

    def lookup_tokens(self, length: int) -> float:
        """Expected tokens of a step that drafts the first `length` tokens of the path."""
        return 1 + self._runs[min(length, len(self.path))]

    @property
    def most_added(self) -> float:
        """Upper bound of `added_tokens`."""
        return self._runs[-1] * max(1.0, self._instead)

    def added_tokens(self, ends: Sequence[float], length: int) -> float:
        """Expected tokens that `length` tokens of the path add to a head's draft.

        The path is followed in the head's draft as far as both agree. Where the head's token is rejected, or its draft
        ends, the path's next tokens are accepted with the chances of a run. `ends[i]` is the chance that exactly i of
        the head's tokens are accepted.

        With P(l) the chance that a looked-up token is right (`_right`), P(h) that the head's is right where it is
        reached, and P(l | not h) = P(l) `_instead`, a looked-up token at a place where the head is right is right with

            P(l | h) = (P(l) - P(not h) P(l | not h)) / P(h) = P(l) (1 - P(not h) `_instead`) / P(h)
        """
        tokens = 0.0
        followed = 1.0  # chance that the path is right as far as the head's accepted tokens
        reached = 1.0  # chance that the head's tokens so far are accepted
        for agreed, chance in enumerate(ends[: len(self.path)]):
            run = chance * followed * self._runs[min(length, len(self.path) - agreed)]
            if agreed + 1 == len(ends):
                return tokens + run
            tokens += run * self._instead
            head, reached = 1 - chance / reached, reached - chance  # P(h)
            followed *= min(1.0, max(0.0, self._right * (1 - (1 - head) * self._instead) / head))
        return tokens


class Controller:
    """Chooses before each step between no draft, a lookup path, a head's draft, and a hybrid of both.

    Args:
        choices: what the head can draft.
        lookup: acceptance rate of a looked-up token after a match of 1, 2, ... tokens, as measured.
        cost: cost of a step.
        paths: shapes of lookup paths, ascending; the first one is empty: no draft.
        hybrids: the hybrid drafts of each choice.
        ragged: a step computes the tokens that exist; otherwise each row costs as much as the longest.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        lookup: Sequence[float],
        cost: StepCost,
        paths: Sequence[Shape],
        hybrids: dict[Choice, list[Hybrid]],
        ragged: bool = True,
    ):
        self._ragged = ragged
        self._choices, self._cost, self._paths, self._hybrids = choices, cost, paths, hybrids
        self._lookup = [_logit(chance) for chance in lookup]
        self._shared = _Shifts(_SHARED_HEAD_VARIANCE, _SHARED_FORGETS)
        self._rows: dict[Request, _Row] = {}
        self._drafted: Choice | None = None  # the head's part of the last step
        self._idle_steps = 0  # since the head drafted

    def choose(self, requests: Sequence[Request], found: Sequence[tuple[int, list[int]]]) -> Shape:
        """Return the shape of the next step's draft.

        Args:
            requests: the decoding requests; their last steps tell what became of the last choice.
            found: matched tokens (0: none) and path of the n-gram lookup of each request.
        """
        self._learn()
        self._rows = {request: self._rows.get(request) or _Row(self._shared) for request in requests}
        for (request, row), (size, path) in zip(self._rows.items(), found, strict=True):
            row.prepare(request, path, self._lookup[min(size, len(self._lookup)) - 1] if size else 0.0)
        shape, self._drafted = self._best()
        self._idle_steps = 0 if self._drafted else self._idle_steps + 1
        return shape

    def _best(self) -> tuple[Shape, Choice | None]:
        rows, count = self._rows.values(), len(self._rows)
        kinds = [request.sampling.greedy for request in self._rows]
        places = list(zip(kinds, (row.head.optimistic_bucket for row in rows), strict=True))
        choices = [choice for choice in self._choices if all(kind in choice.expected for kind in kinds)]

        def cost(shape: Shape) -> float:
            return self._cost(shape, all(kinds), count)

        longest = max(len(row.path) for row in rows)
        options: list[tuple[float, Shape, Choice | None]] = []  # tokens per plain step
        for path in self._paths:
            price = cost(path)
            if self._ragged and path.depth:  # rows without a path, or with a shorter one, cost less
                found = sum(min(len(row.path), path.depth) for row in rows) / count / path.depth
                plain = cost(self._paths[0])
                # With paths of 4, 2 and 0 tokens and a limit of 4, half of the verified tokens exist: half of the extra
                # cost is paid.
                price = plain + (price - plain) * found
            options.append((sum(row.lookup_tokens(path.depth) for row in rows) / count / price, path, None))
            # Longer shapes would verify the same tokens.
            if path.depth >= longest:
                break
        expected = {choice: sum(choice.expected[kind][bucket] for kind, bucket in places) / count for choice in choices}
        options += [(expected[choice] / cost(choice.shape), choice.shape, choice) for choice in choices]
        best = max(options, key=lambda option: option[0])
        most_added = sum(row.most_added for row in rows) / count
        for choice in choices if longest else ():
            for hybrid in self._hybrids[choice]:
                price = cost(hybrid)
                # A bound first: the exact figure is a loop over depths for every row, and most hybrids lose by a wide
                # margin.
                if (expected[choice] + most_added) / price <= best[0]:
                    continue
                added = (
                    row.added_tokens(choice.ends[kind][bucket], hybrid.length)
                    for row, (kind, bucket) in zip(rows, places, strict=True)
                )
                best = max(best, ((expected[choice] + sum(added) / count) / price, hybrid, choice), key=lambda o: o[0])
        if not best[2] and choices and self._idle_steps >= _PROBE_STEPS[0]:
            # A head that never drafts is never observed. Trying it costs `loss` of a step, so it is tried every loss /
            # 1% steps: a head at 0.8 of the best rate after 20 steps, one at 0.3 after 70.
            probe = min(choices, key=lambda choice: cost(choice.shape))
            loss = 1 - expected[probe] / cost(probe.shape) / best[0]
            if self._idle_steps >= min(_PROBE_STEPS[1], loss / _PROBE_SHARE):
                return probe.shape, probe
        return best[1], best[2]

    def _learn(self) -> None:
        """Compare the last step's tokens with the head's draft, if it drafted, and with the lookup path in any case."""
        for request, row in self._rows.items():
            if len(request.steps) == row.steps:
                continue
            for shift, shared in zip(row.all, self._shared.all, strict=True):
                shift.value += (shared.value - shift.value) * _RETURN
                shift.advance()
                shared.advance()
            step, new_tokens = request.steps[-1], request.sequence[row.length :]
            pairs = list(zip(new_tokens, row.path, strict=False))
            right = next((i for i, (token, looked_up) in enumerate(pairs) if token != looked_up), len(pairs))
            if self._drafted and step.drafted:
                accepted, logits = step.accepted - step.copied, self._drafted.logits[request.sampling.greedy]
                for shifts in (row, self._shared):
                    for depth, logit in enumerate(logits[: accepted + 1]):
                        shifts.head.observe(logit, depth < accepted)
                    # Looked-up tokens at the place where the head's was rejected, provided that the path was right up
                    # to there.
                    if accepted < min(len(logits), len(pairs)) and accepted <= right:
                        shifts.instead.observe(row.logit + row.lookup.value, accepted < right)
            for shifts in (row, self._shared):
                # The tokens that agreed, and the first that did not: what comes after it was never tested.
                for place in range(min(right + 1, len(pairs))):
                    shifts.lookup.observe(row.logit, place < right)
