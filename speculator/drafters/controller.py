"""What to draft next: by expected tokens per second, from measured costs and from what was accepted so far.

Plain numbers on the host. A decision reads committed tokens, earlier steps and what a lookup would copy now; it is made
before anything of its step is drafted, so the accept rule of whatever is drafted keeps the target's distribution. It
reads no clock: the same requests in the same order, with the same costs, are decoded by the same drafts.

How often a draft is accepted depends on the text. Tuning measured it on some text; on others the log-odds of all depths
are taken to be shifted by as much, which is estimated for each request and for all of them: a Kalman filter on a shift
that wanders and comes back (an Ornstein-Uhlenbeck process), a request's to that of all, that of all to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log

from speculator.drafters.topology import Shape
from speculator.request import Request

_SPREAD = 1.0  # variance of a shift between texts, of which nothing is known
_ROW, _ALL = 1 / 200, 1 / 1000  # how much of the way home a shift goes in a step
_DOUBT = 1 / 15  # how much of the way to not being known its variance goes
_PROBES = 0.01  # the share of the time that goes into trying a head that does not seem to pay
_RAREST, _OFTENEST = 512, 16  # steps between two of them
_STEP, _MOST = 0.25, 8.0  # shifts are looked up in a table
_BUCKETS = round(2 * _MOST / _STEP) + 1

Greedy = bool
Cost = Callable[[Shape | int, Greedy, int, int], float]
"""(what the head drafts or how many tokens are copied, at temperature 0, rows, longest text) -> in plain steps."""


class Shift:
    """How much more a source's drafts are accepted than was measured, in log-odds: mean and variance."""

    def __init__(self) -> None:
        self.mean, self.variance = 0.0, _SPREAD

    def observe(self, logit: float, accepted: bool) -> None:
        """A token of a draft, accepted or refused, whose measured log-odds are `logit`."""
        chance = 1 / (1 + exp(-logit - self.mean))
        self.variance = self.variance / (1 + self.variance * chance * (1 - chance))
        self.mean += self.variance * (accepted - chance)

    def return_to(self, home: float, rate: float) -> None:
        """A step has gone by."""
        self.mean += (home - self.mean) * rate
        self.variance += (_SPREAD - self.variance) * _DOUBT

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
    expected: dict[Greedy, list[float]] = field(init=False)
    """Tokens of a step by the shift's bucket."""

    def __post_init__(self):
        self.logits = {kind: [_logit(chance) for chance in given] for kind, given in self.acceptance.items()}
        self.expected = {kind: _table(logits) for kind, logits in self.logits.items()}


def _logit(chance: float) -> float:
    chance = min(0.99, max(0.01, chance))
    return log(chance / (1 - chance))


def _table(logits: Sequence[float]) -> list[float]:
    table = []
    for bucket in range(_BUCKETS):
        tokens = reached = 1.0
        for logit in logits:
            reached /= 1 + exp(-logit - (bucket * _STEP - _MOST))
            tokens += reached
        table.append(tokens)
    return table


def best(choices: Sequence[Choice], cost: Cost, greedy: Greedy, rows: int) -> Shape | None:
    """What is the fastest as measured, without looking at any text; None where nothing was measured for such rows."""
    rates = {
        choice.shape: choice.expected[greedy][_BUCKETS // 2] / cost(choice.shape, greedy, rows, 0)
        for choice in choices
        if greedy in choice.expected
    }
    return max(rates, key=rates.__getitem__, default=None)


class _Row:
    """What is known of a request."""

    def __init__(self, heads: Shift, lookups: Shift):
        self.head, self.lookup = Shift(), Shift()
        self.head.mean, self.lookup.mean = heads.mean, lookups.mean
        self.steps, self.length = 0, 0  # at the last decision
        self.copied: list[int] = []
        self.logit = 0.0


class Controller:
    """Chooses before each step between no draft, the text copied from a lookup, and what a head can draft.

    Args:
        choices: what the head can draft.
        lookup: how often a copied token is accepted after a match of so many tokens (1, 2, ...), as measured.
        cost: what steps cost.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        lookup: Sequence[float],
        cost: Cost,
    ):
        self.choices, self._cost = choices, cost
        self._lookup = [_logit(chance) for chance in lookup]
        self._copies: dict[tuple[float, int], list[float]] = {}
        self._heads, self._lookups = Shift(), Shift()  # of all requests
        self._rows: dict[Request, _Row] = {}
        self._last: Choice | int = 0
        self._idle = 0  # steps since the head drafted

    def choose(self, requests: Sequence[Request], found: Sequence[tuple[int, list[int]]]) -> Choice | int:
        """What the head drafts in the next step, or how many tokens are copied at most; 0: no draft.

        Args:
            requests: those that decode; what became of the last decision is read from them.
            found: of each what a lookup gives now: the tokens matched, 0 for none, and those that follow.
        """
        self._learn()
        self._rows = {request: self._rows.get(request) or _Row(self._heads, self._lookups) for request in requests}
        for (request, row), (size, tokens) in zip(self._rows.items(), found, strict=True):
            row.steps, row.length = len(request.steps), len(request.text)
            row.copied, row.logit = tokens, self._lookup[min(size, len(self._lookup)) - 1] if size else 0.0
        self._last = self._best()
        return self._last

    def lose_sight(self) -> None:
        """The next step is decided by others."""
        self._rows = {}

    def _best(self) -> Choice | int:
        count, longest = len(self._rows), max(row.length for row in self._rows.values())
        kinds = [request.sampling.greedy for request in self._rows]
        greedy = all(kinds)
        rates: dict[Choice | int, float] = {0: 1.0}
        width = max(len(row.copied) for row in self._rows.values())
        while width > 0:
            tokens = sum(self._copying(row, width) for row in self._rows.values()) / count
            rates[width] = tokens / self._cost(width, greedy, count, longest)
            width //= 2
        places = list(zip(kinds, (row.head.bucket for row in self._rows.values()), strict=True))
        fitting = [choice for choice in self.choices if all(kind in choice.expected for kind in kinds)]
        for choice in fitting:
            tokens = sum(choice.expected[kind][bucket] for kind, bucket in places) / count
            rates[choice] = tokens / self._cost(choice.shape, greedy, count, longest)
        best = max(rates, key=rates.__getitem__)
        self._idle = 0 if isinstance(best, Choice) else self._idle + 1
        if self._idle >= _OFTENEST and fitting:
            probe = min(fitting, key=lambda choice: self._cost(choice.shape, greedy, count, longest))
            loss = 1 - rates[probe] / rates[best]
            if self._idle >= min(_RAREST, loss / _PROBES):
                self._idle, best = 0, probe
        return best

    def _copying(self, row: _Row, width: int) -> float:
        """Tokens of a step that copies."""
        count = min(width, len(row.copied))
        if not count:
            return 1.0
        key = (row.logit, count)
        if key not in self._copies:
            self._copies[key] = _table([row.logit] * count)
        return self._copies[key][row.lookup.bucket]

    def _learn(self) -> None:
        """What became of the step before: of the head's draft if there was one, of a lookup's in any case."""
        for request, row in self._rows.items():
            if len(request.steps) == row.steps:
                continue
            row.head.return_to(self._heads.mean, _ROW)
            row.lookup.return_to(self._lookups.mean, _ROW)
            self._heads.return_to(0.0, _ALL)
            self._lookups.return_to(0.0, _ALL)
            step, said = request.steps[-1], request.text[row.length :]
            if isinstance(self._last, Choice) and step.drafted:
                for depth, logit in enumerate(self._last.logits[request.sampling.greedy][: step.accepted + 1]):
                    row.head.observe(logit, depth < step.accepted)
                    self._heads.observe(logit, depth < step.accepted)
            for token, copied in zip(said, row.copied, strict=False):
                row.lookup.observe(row.logit, token == copied)
                self._lookups.observe(row.logit, token == copied)
                if token != copied:
                    break
