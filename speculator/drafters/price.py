"""Choose the next step's draft by the price of a verified token: one rule for one row and for many.

The head drafts one shape for all rows, or nothing. A row may draft the path that n-gram lookup found for it in place of
the head's draft. A step that verifies B drafted tokens, those of all rows together, costs C(shape, B) plain steps. If
its tokens per cost are Θ, one more token is worth its cost if its chance of being accepted is at least the price
Θ dC/dB: 0.06 at 1.5 tokens per plain step and 0.04 plain steps per verified token. A row takes as much of its path as
is worth it, if that gains more than the head's draft. The step with the most expected tokens per cost is taken,
if that is 3% more than a plain step's.

Tuning measures how often drafts are accepted on one text. On another text we assume that the log-odds of all depths are
shifted by the same amount. For the head this is a running estimate of each request, which starts at that of all
requests and drifts back to it; for lookup one estimate for all requests predicts as well. Lookup is compared
with the text in every step, the head only where it drafts. A head whose estimate is too low by chance would therefore
stay unused, so its choice adds a quarter of a standard error to the estimate.

All estimates are kept for greedy and sampled requests separately. A head that has not drafted for long is tried for a
step, and after 128 steps with drafts one is plain. The choice is made before anything of the step is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate
from math import exp, log, sqrt
from operator import mul

from speculator.decoding.drafter import Shape
from speculator.decoding.request import Request

LONGEST_PATH = 8
"""The most tokens of a lookup path that a step verifies."""
# Variance of a shift before its first outcome. Lookup's is larger, because looked-up tokens are right or wrong in runs.
_LOOKUP_VARIANCE, _HEAD_VARIANCE = 0.5, 0.1
_REQUEST_VARIANCE = 0.3  # of a request's shift around that of all: requests accept 1.2 to 3.0 tokens per step
_FORGETS, _REQUEST_FORGETS = 0.002, 0.005  # share of the way back to the first variance per step
_OPTIMISM = 0.25  # standard errors
_NEAR = 0.97  # predictions are off by about 3%: of drafts this near the fastest, take that with the fewest tokens
_MARGIN = 1.03  # what a draft must promise over a plain step: costs and chances are not known better
_PROBE_SHARE = 0.01  # of the time may be lost by trying a head that does not seem to pay
_PROBE_STEPS = 16  # the least number of steps between two such tries
_PLAIN_STEPS = 128  # steps after which one is plain, to compare the others' time with
_GRID = 1 / 8  # shifts are rounded to it, so that expected tokens can be looked up

Greedy = bool
StepCost = Callable[[Shape | None, int, bool, Greedy, int], float]
"""(shape of the head's draft or None, drafted tokens that all rows verify, whether a row has a path, at temperature 0,
rows) -> plain steps."""


class Shift:
    """Running estimate of how much more often drafts are accepted than was measured, in log-odds.

    Its variance falls with every outcome and rises with every step, so an old average follows new outcomes quickly.

    Args:
        forgets: share of the way back to `variance` and `mean` per step.
        mean: where it starts, and what it drifts back to; None: it starts at 0 and stays where the outcomes left it.
    """

    def __init__(self, variance: float, forgets: float = _FORGETS, mean: Shift | None = None):
        self.value: float = mean.value if mean else 0.0
        self._variance = variance
        self._first_variance, self._forgets, self._mean = variance, forgets, mean

    def observe(self, logit: float, accepted: bool) -> None:
        """Update with one token whose measured log-odds of acceptance are `logit`."""
        # Gradient ascent on the log-likelihood, by as much as the value is uncertain: 1 - chance after a hit,
        # -chance after a miss.
        self.value += self._variance * (accepted - _chance(logit + self.value))
        self._variance /= 1 + self._variance / 4  # an outcome of chance 1/2 has the information 1/4

    def advance(self) -> None:
        """Forget a little, once per step."""
        self._variance += (self._first_variance - self._variance) * self._forgets
        if self._mean:
            self.value += (self._mean.value - self.value) * self._forgets

    @property
    def optimistic(self) -> float:
        """The estimate plus a quarter of a standard error, by which drafts of the head are chosen."""
        return self.value + _OPTIMISM * sqrt(self._variance)


@dataclass(eq=False)
class Choice:
    """A shape that the head can draft.

    Attributes:
        acceptance: measured acceptance rates by depth, each conditional on the parent, for greedy (True) and sampled
            (False) rows. Rows of a missing kind never get this draft.
        logits: `acceptance` as log-odds, of rates between 0.01 and 0.99.
    """

    shape: Shape
    acceptance: dict[Greedy, Sequence[float]]
    logits: dict[Greedy, tuple[float, ...]] = field(init=False)

    def __post_init__(self):
        self.logits = {kind: tuple(map(_logit, rates)) for kind, rates in self.acceptance.items()}

    def accepted(self, greedy: Greedy, shift: float = 0.0) -> float:
        """Return the expected accepted tokens of a row's draft, with all log-odds moved by `shift`."""
        return _accepted(self.logits[greedy], round(shift / _GRID))


@lru_cache(4096)
def _accepted(logits: tuple[float, ...], shift: int) -> float:
    """Return the expected accepted tokens by log-odds of acceptance, all moved by `shift` steps of `_GRID`."""
    return sum(accumulate((_chance(logit + shift * _GRID) for logit in logits), mul))


def _logit(chance: float) -> float:
    # A measured rate of 0 or 1 comes from few samples, and its log-odds would be infinite.
    chance = min(0.99, max(0.01, chance))
    return log(chance / (1 - chance))


def _chance(logit: float) -> float:
    return 1 / (1 + exp(-logit))


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Return the expected tokens of a step, the bonus token included, from acceptance rates by depth."""
    return 1 + sum(accumulate(acceptance, mul))


def fastest_shape(choices: Sequence[Choice], cost: StepCost, greedy: Greedy, rows: int) -> Shape:
    """Return the smallest of the shapes with about the most tokens per second at the measured acceptance rates."""
    rates = {
        choice.shape: (1 + choice.accepted(greedy)) / cost(choice.shape, rows * choice.shape.nodes, False, greedy, rows)
        for choice in choices
        if greedy in choice.acceptance
    }
    near = [shape for shape, rate in rates.items() if rate > _NEAR * max(rates.values())]
    return min(near, key=lambda shape: shape.nodes)


@dataclass
class PricedDraft:
    """What a step could draft.

    Attributes:
        rate: expected tokens of all rows over the cost in plain steps.
        choice: what the head drafts; None: nothing.
        lengths: tokens of each row's lookup path that are drafted in place of the head's draft.
        tokens: drafted tokens that all rows verify.
    """

    rate: float
    choice: Choice | None
    lengths: list[int]
    tokens: int


@dataclass
class _Row:
    """A row as it was when the last step's draft was chosen.

    Attributes:
        steps, length: number of its verification steps, and of its tokens (prompt included).
        path: token ids that n-gram lookup found, verified or not.
        logit: log-odds that a path token is accepted, as tuning measured them for the length of the match; equal for
            all tokens of the path.
        choice: shape that the head drafted for the row; None: the row drafted its path, or nothing.
        shift: how much more often the head is right on this text than on the one that was measured.
    """

    steps: int
    length: int
    path: Sequence[int]
    logit: float
    choice: Choice | None
    shift: Shift


class Chooser:
    """Chooses before each step what the head drafts, and which rows draft a looked-up path.

    Args:
        choices: what the head can draft.
        lookup: measured acceptance rates of a looked-up token after a match of 1, 2, ... tokens, for greedy (True) and
            sampled (False) rows.
        cost: cost of a step in plain steps, see `StepCost`.
        packed: a step without a tree computes only the tokens that exist; False: each row costs as much as the longest.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        lookup: dict[Greedy, Sequence[float]],
        cost: StepCost,
        packed: bool = True,
    ):
        self._choices, self._cost, self._packed = choices, cost, packed
        self._logits = {kind: [*map(_logit, chances)] for kind, chances in lookup.items()}
        self._head = {kind: Shift(_HEAD_VARIANCE) for kind in (True, False)}
        self._lookup = {kind: Shift(_LOOKUP_VARIANCE) for kind in (True, False)}
        self._rows: dict[Request, _Row] = {}
        self._without_head, self._with_draft = 0, 0  # steps in a row

    def choose(self, requests: Sequence[Request], found: Sequence[tuple[int, list[int]]]) -> PricedDraft:
        """Return the plan of the next step.

        Args:
            requests: the decoding requests; their last steps show how much of the last choice was accepted.
            found: number of matched tokens (0: none) and path of the n-gram lookup of each request, see
                `NgramDrafter.look`.
        """
        self._learn()
        by_size = [self._logits[request.sampling.greedy] for request in requests]
        logits = [own[min(size, len(own)) - 1] if size else 0.0 for own, (size, _) in zip(by_size, found, strict=True)]
        shifts = [self._shift(request) for request in requests]
        step = self._best(requests, found, logits, shifts)
        self._without_head = 0 if step.choice else self._without_head + 1
        self._with_draft = self._with_draft + 1 if step.tokens else 0
        rows = {}
        for request, (_, path), logit, length, shift in zip(requests, found, logits, step.lengths, shifts, strict=True):
            choice = None if length else step.choice
            rows[request] = _Row(
                steps=len(request.steps),
                length=len(request.sequence),
                path=path,
                logit=logit,
                choice=choice,
                shift=shift,
            )
        self._rows = rows
        return step

    def _shift(self, request: Request) -> Shift:
        row = self._rows.get(request)
        return row.shift if row else Shift(_REQUEST_VARIANCE, _REQUEST_FORGETS, self._head[request.sampling.greedy])

    def _best(
        self,
        requests: Sequence[Request],
        found: Sequence[tuple[int, list[int]]],
        logits: Sequence[float],
        shifts: Sequence[Shift],
    ) -> PricedDraft:
        """Return the plan of the next step, see `choose`; `shifts` are the requests' estimates for the head.

        `logits` are the measured log-odds that a token of each request's path is accepted.
        """
        kinds, rows = [request.sampling.greedy for request in requests], len(requests)
        greedy, none = all(kinds), [0] * rows
        choices = [choice for choice in self._choices if all(kind in choice.logits for kind in kinds)]
        values = [shift.optimistic for shift in shifts]
        gains: dict[Choice | None, list[float]] = {None: [0.0] * rows}
        gains |= {choice: list(map(choice.accepted, kinds, values)) for choice in choices}

        @cache  # here and below: of many rows, many are alike
        def chances(kind: Greedy, logit: float, length: int) -> tuple[float, ...]:
            return tuple(accumulate([_chance(logit + self._lookup[kind].value)] * length, mul))

        lengths = (min(len(path), LONGEST_PATH) for _, path in found)
        runs = list(map(chances, kinds, logits, lengths))

        def cost(choice: Choice | None, tokens: int, path: bool) -> float:
            return self._cost(choice.shape if choice else None, tokens, path, greedy, rows)

        def priced(choice: Choice | None, price: float) -> PricedDraft:
            """Return the plan of a choice in which rows take their paths at this price."""
            nodes = choice.shape.nodes if choice else 0
            tree = self._packed and choice is not None and choice.shape.depth < nodes
            if tree:  # its rows are as long as the longest: a short path saves nothing, a longer one costs in all rows
                price = 0.0

            @cache
            def row(gain: float, run: tuple[float, ...]) -> tuple[int, float]:  # tokens of its path, accepted tokens
                # Chances fall along a path, so it is cut at the first token below the price: 0.8 0.64 0.51 at a price
                # of 0.6 keeps two tokens.
                most = min(len(run), nodes) if tree else len(run)
                length = next((n for n, chance in enumerate(run[:most]) if chance < price), most)
                own = sum(run[:length])
                return (length, own) if own - price * length > gain - price * nodes else (0, gain)

            taken = list(map(row, gains[choice], runs))
            lengths, expected = [length for length, _ in taken], rows + sum(gain for _, gain in taken)
            tokens = sum(length or nodes for length in lengths)
            if tree:
                tokens = rows * nodes
            elif not self._packed:
                tokens = rows * max(nodes, LONGEST_PATH * any(lengths))
            taken_cost = cost(None if all(lengths) else choice, tokens, any(lengths))
            return PricedDraft(rate=expected / taken_cost, choice=choice, lengths=lengths, tokens=tokens)

        def by_head(choice: Choice | None) -> PricedDraft:
            tokens = rows * choice.shape.nodes if choice else 0
            return PricedDraft(
                rate=(rows + sum(gains[choice])) / cost(choice, tokens, False),
                choice=choice,
                lengths=none,
                tokens=tokens,
            )

        plain, *heads = map(by_head, gains)
        heads.sort(key=lambda step: -step.rate)
        best = max([plain, *heads[:1]], key=lambda step: step.rate)
        if any(runs):
            most = rows * LONGEST_PATH
            slope = (cost(None, most, True) - cost(None, 1, True)) / (most - 1) if self._packed else 0.0
            # Beside paths only the head's two fastest drafts are priced, to save the host's time.
            near = [step.choice for step in (plain, *heads[:2])]
            # The price follows from the rate, and the rate from the price: the second round has settled.
            for _ in range(2):
                steps = [priced(choice, best.rate * slope) for choice in near]
                best = max([best, *steps], key=lambda step: step.rate)
        if all(best.lengths):
            best.choice = None
        if best.rate < _MARGIN * plain.rate:
            best = plain
        if not best.choice and choices and self._without_head >= _PROBE_STEPS:
            # A head that never drafts is never observed. Trying it costs `loss` of a step, so it is tried every loss /
            # 1% steps: a head at 0.8 of the best rate after 20 steps, one at 0.3 after 70.
            probe = by_head(min(choices, key=lambda choice: choice.shape.nodes))
            loss = 1 - probe.rate / best.rate
            if self._without_head >= loss / _PROBE_SHARE:
                return probe
        return plain if self._with_draft >= _PLAIN_STEPS else best

    def _learn(self) -> None:
        """Compare the last step's tokens with the head's draft, if it drafted, and with the lookup path in any case."""
        for shift in (*self._head.values(), *self._lookup.values(), *(row.shift for row in self._rows.values())):
            shift.advance()
        for request, row in self._rows.items():
            if len(request.steps) == row.steps:
                continue
            step, head, lookup = request.steps[-1], *(by[request.sampling.greedy] for by in (self._head, self._lookup))
            if row.choice and step.drafted:
                for depth, logit in enumerate(row.choice.logits[request.sampling.greedy][: step.accepted + 1]):
                    for shift in (head, row.shift):
                        shift.observe(logit, depth < step.accepted)
            # The tokens that agreed, and the first that did not: what comes after it was never tested.
            for token, looked_up in zip(request.sequence[row.length :], row.path, strict=False):
                lookup.observe(row.logit, token == looked_up)
                if token != looked_up:
                    break
