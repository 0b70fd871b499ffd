"""The controller's choices over simulated text come near the best fixed choice in hindsight, also after a change."""

import random
from itertools import product
from math import exp, inf

import pytest

from speculator import Chain, FixedTree, Sampling
from speculator.decoding.request import Request, Step
from speculator.drafters.adaptive import PATH_LENGTHS, LookupPath
from speculator.drafters.controller import Choice, Controller, Shift, fastest_shape
from speculator.drafters.costs import shape_to_json
from speculator.drafters.hybrid import Hybrid

TREE = FixedTree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
CHOICES = [Choice(Chain(depth), {True: [0.7, 0.6, 0.5, 0.5][:depth]}) for depth in (1, 2, 3, 4)]
CHOICES.append(Choice(TREE, {True: [0.8, 0.7, 0.5]}))
PATHS = [LookupPath(length) for length in PATH_LENGTHS]
LOOKUP = [0.2, 0.3, 0.5]
# Kind of text: shift of the log-odds of the head's tokens, and the chance that a looked-up token is right.
KINDS = {"as tuned": (0.0, 0.1), "code": (1.0, 0.2), "copied": (-1.0, 0.95), "odd": (-6.0, 0.02)}
KINDS |= {"both": (-1.0, 0.4), "easy": (1.5, 0.05)}


def cost(shape, greedy, rows) -> float:
    """Verification costs more the more rows there are, as on a CPU."""
    return 1 + 0.08 * shape.levels + 0.02 * shape.nodes * rows + 0.03 * isinstance(shape, Hybrid)


def controller_of(choices, cost=cost) -> Controller:
    hybrids = {choice: [Hybrid(choice.shape, length) for length in (1, 2, 4, 8)] for choice in choices}
    return Controller(choices, LOOKUP, cost, PATHS, hybrids)


class Stream:
    """Requests whose drafts are accepted as a kind of text has it.

    Args:
        together: a looked-up token is never right where the head's token is rejected.
    """

    def __init__(self, rows: int, seed: int = 0, together: bool = False, cost=cost):
        self.random, self.seconds, self.together, self.cost = random.Random(seed), 0.0, together, cost
        self.requests = [Request([0], Sampling(), 10**9) for _ in range(rows)]

    def step(self, controller, kind: str):
        """Advance by one step with a controller's choice, or with a fixed shape; return the shape."""
        shift, chance = KINDS[kind]
        rows = range(len(self.requests))
        right = [self.leading([chance] * 8) for _ in rows]
        verdicts = [[self.random.random() for _ in range(4)] for _ in rows]
        if self.together:
            right = [min(n, accepted(CHOICES[3], shift, own)) for n, own in zip(right, verdicts, strict=True)]
        # A looked-up token is right if it is the next number: the text counts.
        ends = [len(request.sequence) for request in self.requests]
        found = [(3, [*range(end, end + n), *[-1] * (8 - n)]) for end, n in zip(ends, right, strict=True)]
        shape = controller.choose(self.requests, found) if isinstance(controller, Controller) else controller
        head = shape.inner if isinstance(shape, Hybrid) else shape
        choice = next((choice for choice in CHOICES if choice.shape is head), None)
        for request, n, own in zip(self.requests, right, verdicts, strict=True):
            by_path = 0
            if choice:
                drafted, kept = len(choice.logits[True]), accepted(choice, shift, own)
                if isinstance(shape, Hybrid):  # the head's right tokens are the path's
                    by_path = max(0, min(n, min(n, kept) + shape.length) - kept)
            else:
                drafted, kept = shape.nodes, min(shape.nodes, n)
            kept += by_path
            request.sequence += range(len(request.sequence), len(request.sequence) + kept + 1)
            request.steps.append(Step(drafted + by_path, kept, kept + 1, by_path))
        self.seconds += self.cost(shape, True, len(self.requests)) if shape.nodes else 1.0
        return shape

    def leading(self, chances) -> int:
        return next((i for i, chance in enumerate(chances) if self.random.random() >= chance), len(chances))

    @property
    def tokens(self) -> int:
        return sum(len(request.sequence) - 1 for request in self.requests)


def accepted(choice: Choice, shift: float, verdicts) -> int:
    """Number of accepted tokens of a head's draft."""
    tried = zip(choice.logits[True], verdicts, strict=False)
    return next(
        (i for i, (logit, verdict) in enumerate(tried) if verdict >= 1 / (1 + exp(-logit - shift))),
        len(choice.logits[True]),
    )


def rate(controller, kind: str, rows: int, together: bool = False, cost=cost) -> float:
    stream = Stream(rows, together=together, cost=cost)
    while stream.tokens < 6000:
        stream.step(controller, kind)
    return stream.tokens / rows / stream.seconds


@pytest.mark.parametrize(
    ("kind", "rows", "together"),
    [*product(KINDS, [1, 4, 16], [False]), ("both", 1, True), ("copied", 4, True)],
)
def test_it_is_nearly_as_fast_as_the_best_fixed_choice(kind, rows, together):
    shapes = [choice.shape for choice in CHOICES]
    fixed = [*shapes, *(Hybrid(shape, 4) for shape in shapes[:1] + shapes[2:]), *(LookupPath(n) for n in (0, 1, 4, 8))]
    best = max(rate(shape, kind, rows, together) for shape in fixed)
    assert rate(controller_of(CHOICES), kind, rows, together) > 0.97 * best


def cheap(shape, greedy, rows) -> float:
    return cost(shape, greedy, rows) - 0.05 * shape.levels


def without_hybrids(shape, greedy, rows) -> float:
    return inf if isinstance(shape, Hybrid) else cheap(shape, greedy, rows)


def test_hybrid_drafts_pay_where_the_sources_are_right_at_different_tokens():
    gains = []
    for together in (False, True):
        speeds = [rate(controller_of(CHOICES, own), "both", 1, together, cheap) for own in (cheap, without_hybrids)]
        gains.append(speeds[0] / speeds[1])
    assert gains[0] > 1.06
    assert gains[1] > 0.98


def rate_of_changing_text(controller) -> float:
    """Tokens per plain step where the kind of text changes every 200 tokens."""
    stream = Stream(1)
    for kind in ["as tuned", "copied", "odd"] * 10:
        begin = stream.tokens
        while stream.tokens < begin + 200:
            stream.step(controller, kind)
    return stream.tokens / stream.seconds


def test_it_follows_a_text_whose_kind_changes():
    fixed = [*(choice.shape for choice in CHOICES), *(Hybrid(CHOICES[0].shape, n) for n in (4, 8)), LookupPath(8)]
    assert rate_of_changing_text(controller_of(CHOICES)) > 1.1 * max(map(rate_of_changing_text, fixed))


def test_a_head_that_was_unlucky_at_first_is_used_again():
    """Only a head that drafts is observed, so an estimate that is too low by chance must not last."""
    stream, controller = Stream(1), controller_of(CHOICES)
    for _ in range(6):
        stream.step(controller, "odd")
    drafts = [not isinstance(stream.step(controller, "as tuned"), LookupPath) for _ in range(60)]
    assert sum(drafts) > 45


def test_the_fastest_shape_weighs_acceptance_against_cost():
    """One row: 1 + .7 + .42 + .21 tokens for 1.3 plain steps. Many rows: verification has to be short."""
    assert fastest_shape(CHOICES, cost, True, 1) is TREE
    assert fastest_shape(CHOICES[:4], cost, True, 1).nodes == 3
    assert fastest_shape(CHOICES[:4], cost, True, 16).nodes == 1


def test_a_shift_follows_the_outcomes():
    shift = Shift(0.0, 2.0, forgets=0.02)
    for _ in range(40):
        shift.observe(0.0, True)
    assert shift.value > 2
    for _ in range(80):
        shift.observe(0.0, False)
    assert shift.value < 0


def test_a_choice_depends_on_the_past_alone():
    """The same past gives the same choices, whatever the last step's outcome will be."""

    def choices(last: int) -> list:
        stream, controller = Stream(2, seed=5), controller_of(CHOICES)
        taken = [stream.step(controller, "as tuned") for _ in range(30)]
        stream.random.seed(last)
        taken.append(stream.step(controller, "as tuned"))
        return [shape_to_json(shape) for shape in taken]

    assert choices(1) == choices(2)
