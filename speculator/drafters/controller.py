"""What to draft next: by expected tokens per second, from measured costs and from what was accepted so far.

Plain numbers on the host. A decision reads committed tokens, earlier steps and what a lookup would copy now; it is made
before anything of its step is drafted, so the accept rule of whatever is drafted keeps the target's distribution. It
reads no clock: the same requests in the same order, with the same costs, are decoded by the same drafts.

How often a draft is accepted depends on the text. Tuning measured it on one text. On another text we assume that the
log-odds of all depths are shifted by the same amount, and estimate this shift for every request and for all requests
together. The estimate is a Kalman filter on an Ornstein-Uhlenbeck process: a request's shift returns to the shared one,
the shared one to 0. Most requests shift little, some much and at once, so two filters with different variances run side
by side, each weighted by how well it predicted the outcomes so far. The shared shift changes slowly.

A mixed step accepts what the head's draft does, and then goes on along the copied path where that has agreed so far.
Both sources are right on easy tokens, so how often a copied token is right where the head's was refused is a shift of
its own. Any step in which the head drafts shows it, mixed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from math import exp, log
from operator import mul

from speculator.decoding.drafter import Shape
from speculator.decoding.request import Request
from speculator.drafters.hybrid import Hybrid

# With these the lengths that were accepted of two targets' drafts and copies are among the likeliest.
_VARIANCES, _VARIANCE_OF_ALL = (0.03, 2.0), (0.5,)  # variances of a shift of which nothing is known
_ROW, _ALL = (1 / 200, 1 / 10), (1 / 1000, 1 / 1000)
"""How much of the way home a shift goes in a step, and its variances to not being known."""
_TURN = 1 / 50  # how much of the way to not knowing which of the two is right
_PROBES = 0.01  # the share of the time that goes into trying a head that does not seem to pay
_RAREST, _OFTENEST = 512, 16  # steps between two of them
COPIED = 8  # tokens of a lookup at most, alone or beside a head's draft
_STEP, _MOST = 0.25, 8.0  # shifts are looked up in a table
_BUCKETS = round(2 * _MOST / _STEP) + 1

Greedy = bool
StepCost = Callable[[Shape | int, Greedy, int, int], float]
"""(what the head drafts or how many tokens are copied, at temperature 0, rows, longest text) -> in plain steps."""


class Shift:
    """How much more a source's drafts are accepted than was measured, in log-odds.

    Args:
        mean: what is expected before anything is seen.
        variances: the variance of that, a filter for each.
    """

    def __init__(self, mean: float, variances: Sequence[float]) -> None:
        self.mean, self._priors = mean, variances
        self._filters = [(mean, variance, 1 / len(variances)) for variance in variances]  # mean, variance, weight

    def observe(self, logit: float, accepted: bool) -> None:
        """A token of a draft, accepted or refused, whose measured log-odds are `logit`."""
        filters, total, self.mean = [], 0.0, 0.0
        for mean, variance, weight in self._filters:
            chance = _chance(logit + mean)
            variance /= 1 + variance * chance * (1 - chance)
            mean += variance * (accepted - chance)
            weight *= chance if accepted else 1 - chance
            filters.append((mean, variance, weight))
            total += weight
            self.mean += weight * mean
        self._filters = [(mean, variance, weight / total) for mean, variance, weight in filters]
        self.mean /= total

    def return_to(self, home: float, rates: tuple[float, float]) -> None:
        """A step has gone by."""
        self._filters = [
            (
                mean + (home - mean) * rates[0],
                variance + (prior - variance) * rates[1],
                weight + (1 / len(self._priors) - weight) * _TURN,
            )
            for (mean, variance, weight), prior in zip(self._filters, self._priors, strict=True)
        ]
        self.mean = sum(mean * weight for mean, _, weight in self._filters)

    @property
    def bucket(self) -> int:
        return min(_BUCKETS - 1, max(0, round((self.mean + _MOST) / _STEP)))


@dataclass(eq=False)
class Choice:
    """Something that a head can draft.

    Attributes:
        shape: the draft's.
        acceptance: of each depth how often a token there is accepted where its parent was, as measured, for greedy rows
            (True) and for sampled ones (False). Where one is missing, such rows are not drafted for so.
    """

    shape: Shape
    acceptance: dict[Greedy, Sequence[float]]
    logits: dict[Greedy, list[float]] = field(init=False)
    ends: dict[Greedy, list[list[float]]] = field(init=False)
    """By the shift's bucket: how often 0, 1, ... of its tokens are accepted."""
    expected: dict[Greedy, list[float]] = field(init=False)
    """Tokens of a step by the shift's bucket."""

    def __post_init__(self):
        self.logits = {kind: [_logit(chance) for chance in given] for kind, given in self.acceptance.items()}
        shifts = [bucket * _STEP - _MOST for bucket in range(_BUCKETS)]
        self.ends = {kind: [_ends(logits, shift) for shift in shifts] for kind, logits in self.logits.items()}
        self.expected = {
            kind: [sum(map(mul, range(1, len(ends) + 1), ends)) for ends in table] for kind, table in self.ends.items()
        }

    def beside(self, length: int) -> Choice:
        """The same with up to `length` tokens of a lookup's path in one tree."""
        mixed = copy(self)
        mixed.shape = Hybrid(self.shape, length)
        return mixed


def _logit(chance: float) -> float:
    chance = min(0.99, max(0.01, chance))
    return log(chance / (1 - chance))


def _chance(logit: float) -> float:
    return 1 / (1 + exp(-logit))


def _ends(logits: Sequence[float], shift: float) -> list[float]:
    ends, reached = [], 1.0
    for logit in logits:
        chance = _chance(logit + shift)
        ends.append(reached * (1 - chance))
        reached *= chance
    return [*ends, reached]


def fastest_shape(choices: Sequence[Choice], cost: StepCost, greedy: Greedy, rows: int) -> Shape | None:
    """What is the fastest as measured, without looking at any text; None where nothing was measured for such rows."""
    rates = {
        choice.shape: choice.expected[greedy][_BUCKETS // 2] / cost(choice.shape, greedy, rows, 0)
        for choice in choices
        if greedy in choice.expected
    }
    return max(rates, key=rates.__getitem__, default=None)


class _Shifts:
    """Three shifts: `head` of drafted tokens, `lookup` of copied tokens, and `beside` of copied tokens where the head's
    token was refused, relative to `lookup`."""

    def __init__(self, means: Sequence[float], variances: Sequence[float]) -> None:
        self.head, self.lookup, self.beside = self.all = [Shift(mean, variances) for mean in means]


class _Row(_Shifts):
    """What is known of a request."""

    def __init__(self, of_all: _Shifts):
        super().__init__([shift.mean for shift in of_all.all], _VARIANCES)
        self.steps, self.length = 0, 0  # at the last decision
        self.copied: list[int] = []
        self.logit = 0.0

    def look(self, request: Request, tokens: list[int], logit: float) -> None:
        """Before a step: what a lookup gives now, and the measured log-odds of such a match."""
        self.steps, self.length, self.copied, self.logit = len(request.steps), len(request.sequence), tokens, logit
        self._right = _chance(logit + self.lookup.mean)
        self._instead = _chance(logit + self.lookup.mean + self.beside.mean) / self._right
        powers = accumulate(repeat(self._right, len(tokens)), mul)
        self._runs = [*accumulate(powers, initial=0.0)]  # of so many copied tokens those accepted

    def copying(self, width: int) -> float:
        """Tokens of a step that copies."""
        return 1 + self._runs[min(width, len(self.copied))]

    @property
    def most_beside(self) -> float:
        """No path adds more to a head's tokens."""
        return self._runs[-1] * max(1.0, self._instead)

    def mixing(self, ends: Sequence[float], length: int) -> float:
        """Expected tokens that a copied path of `length` adds to a head's draft.

        `ends[i]` is the chance that exactly i of the drafted tokens are accepted.
        """
        tokens, followed, reached = 0.0, 1.0, 1.0
        for same, chance in enumerate(ends[: len(self.copied)]):
            run = chance * followed * self._runs[min(length, len(self.copied) - same)]
            if same + 1 == len(ends):
                return tokens + run
            tokens += run * self._instead
            # Where the head is right a copied token is so the more often: of all as often as ever.
            head, reached = 1 - chance / reached, reached - chance
            followed *= min(1.0, max(0.0, self._right * (1 - (1 - head) * self._instead) / head))
        return tokens


class Controller:
    """Chooses before each step between no draft, the text copied from a lookup, what a head can draft, and both.

    Args:
        choices: what the head can draft.
        lookup: how often a copied token is accepted after a match of so many tokens (1, 2, ...), as measured.
        cost: what steps cost; infinite: what was not measured is not done.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        lookup: Sequence[float],
        cost: StepCost,
    ):
        self.choices, self._cost = choices, cost
        self._lookup = [_logit(chance) for chance in lookup]
        lengths = [1 << i for i in range(COPIED.bit_length())]
        self._mixed = {choice: {length: choice.beside(length) for length in lengths} for choice in choices}
        self._all = _Shifts([0.0] * 3, _VARIANCE_OF_ALL)  # of all requests
        self._rows: dict[Request, _Row] = {}
        self._last: Choice | int = 0
        self._idle = 0  # steps since the head drafted

    def choose(self, requests: Sequence[Request], found: Sequence[tuple[int, list[int]]]) -> Choice | int:
        """What the head drafts in the next step, with a path beside it or without, or how many tokens are copied at
        most; 0: no draft.

        Args:
            requests: those that decode; what became of the last decision is read from them.
            found: of each what a lookup gives now: the tokens matched, 0 for none, and those that follow.
        """
        self._learn()
        self._rows = {request: self._rows.get(request) or _Row(self._all) for request in requests}
        for (request, row), (size, tokens) in zip(self._rows.items(), found, strict=True):
            row.look(request, tokens, self._lookup[min(size, len(self._lookup)) - 1] if size else 0.0)
        self._last = self._best()
        return self._last

    def lose_sight(self) -> None:
        """Forget the rows: the next step is not chosen here, so nothing can be learnt from it."""
        self._rows = {}

    def _best(self) -> Choice | int:
        count, longest = len(self._rows), max(row.length for row in self._rows.values())
        kinds = [request.sampling.greedy for request in self._rows]
        greedy = all(kinds)
        rates: dict[Choice | int, float] = {0: 1.0}
        most = max(len(row.copied) for row in self._rows.values())
        width = min(most, COPIED)
        while width > 0:
            tokens = sum(row.copying(width) for row in self._rows.values()) / count
            rates[width] = tokens / self._cost(width, greedy, count, longest)
            width //= 2
        places = list(zip(kinds, (row.head.bucket for row in self._rows.values()), strict=True))
        fitting = [choice for choice in self.choices if all(kind in choice.expected for kind in kinds)]
        heads: dict[Choice, float] = {}
        for choice in fitting:
            heads[choice] = sum(choice.expected[kind][bucket] for kind, bucket in places) / count
            rates[choice] = heads[choice] / self._cost(choice.shape, greedy, count, longest)
        best = max(rates, key=rates.__getitem__)
        more = sum(row.most_beside for row in self._rows.values()) / count
        for choice in fitting:
            for length, mixed in self._mixed[choice].items():
                cost = self._cost(mixed.shape, greedy, count, longest)
                if (heads[choice] + more) / cost > rates[best]:
                    rates[mixed] = (heads[choice] + self._mixing(choice, length, places)) / cost
                    best = max(best, mixed, key=rates.__getitem__)
                if length >= most:
                    break
        self._idle = 0 if isinstance(best, Choice) else self._idle + 1
        if self._idle >= _OFTENEST and fitting:
            probe = min(fitting, key=lambda choice: self._cost(choice.shape, greedy, count, longest))
            loss = 1 - rates[probe] / rates[best]
            if self._idle >= min(_RAREST, loss / _PROBES):
                self._idle, best = 0, probe
        return best

    def _mixing(self, choice: Choice, length: int, places: Sequence[tuple[Greedy, int]]) -> float:
        """What a path adds in the mean."""
        rows = self._rows.values()
        added = (row.mixing(choice.ends[kind][at], length) for row, (kind, at) in zip(rows, places, strict=True))
        return sum(added) / len(rows)

    def _learn(self) -> None:
        """What became of the step before: of the head's draft if there was one, of a lookup's in any case."""
        for request, row in self._rows.items():
            if len(request.steps) == row.steps:
                continue
            for shift, home in zip(row.all, self._all.all, strict=True):
                shift.return_to(home.mean, _ROW)
                home.return_to(0.0, _ALL)
            step, said = request.steps[-1], request.sequence[row.length :]
            pairs = list(zip(said, row.copied, strict=False))
            right = next((i for i, (token, copied) in enumerate(pairs) if token != copied), len(pairs))
            if isinstance(self._last, Choice) and step.drafted:
                own, logits = step.accepted - step.copied, self._last.logits[request.sampling.greedy]
                for of in (row, self._all):
                    for depth, logit in enumerate(logits[: own + 1]):
                        of.head.observe(logit, depth < own)
                    if own < len(logits) and own < len(pairs) and own <= right:
                        of.beside.observe(row.logit + row.lookup.mean, own < right)
            for of in (row, self._all):
                for place in range(min(right + 1, len(pairs))):
                    of.lookup.observe(row.logit, place < right)
