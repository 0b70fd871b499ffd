"""The choices of a controller over simulated text: near the best fixed one in hindsight, and soon after a change."""

import random

import pytest

from speculator import Chain, FixedTree, Sampling
from speculator.drafters.controller import Choice, Controller, Shift, best
from speculator.request import Request, Step

SHAPES = [Chain(1), Chain(2), Chain(3), Chain(4), FixedTree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])]
MEASURED = [0.7, 0.6, 0.5, 0.5]
CHOICES = [Choice(shape, {True: [*MEASURED[: shape.depth]]}) for shape in SHAPES]
CHOICES[-1].acceptance[True] = [0.8, 0.7, 0.5]
CHOICES = [Choice(choice.shape, choice.acceptance) for choice in CHOICES]
LOOKUP = [0.2, 0.3, 0.5]
COPIED = 8
# What a kind of text does to the log-odds of the head's tokens, and how often a copied token is right.
KINDS = {"as tuned": (0.0, 0.1), "code": (1.0, 0.2), "copied": (-1.0, 0.95), "odd": (-6.0, 0.02)}


def cost(what, greedy, rows, longest) -> float:
    """A verify pass costs more the more rows there are, as on a processor."""
    nodes = what if isinstance(what, int) else what.nodes
    draft = 0.0 if isinstance(what, int) else 0.08 * what.depth
    return 1 + draft + 0.02 * nodes * rows


class Stream:
    """Requests whose drafts are accepted as a kind of text has it."""

    def __init__(self, rows: int, seed: int = 0):
        self.random, self.seconds = random.Random(seed), 0.0
        self.requests = [Request([0], Sampling(), 10**9) for _ in range(rows)]

    def step(self, controller, kind: str):
        """One step by a controller, or always with the same choice; gives what was chosen."""
        shift, copied = KINDS[kind]
        rows = len(self.requests)
        right = [self.leading([copied] * COPIED) for _ in range(rows)]
        # A copied token is right where it is the next number, and the text goes on counting.
        ends = [len(request.text) for request in self.requests]
        found = [(3, [*range(end, end + n), *[-1] * (COPIED - n)]) for end, n in zip(ends, right, strict=True)]
        chosen = controller.choose(self.requests, found) if isinstance(controller, Controller) else controller
        for request, n in zip(self.requests, right, strict=True):
            if isinstance(chosen, Choice):
                table = [1 / (1 + 2.718281828 ** -(logit + shift)) for logit in chosen.logits[True]]
                drafted, accepted = len(table), self.leading(table)
            else:
                drafted, accepted = chosen, min(chosen, n)
            request.text += range(len(request.text), len(request.text) + accepted + 1)
            request.steps.append(Step(drafted, accepted, accepted + 1))
        what = chosen.shape if isinstance(chosen, Choice) else chosen
        self.seconds += cost(what, True, rows, 0) if what else 1.0
        return chosen

    def leading(self, chances) -> int:
        return next((i for i, chance in enumerate(chances) if self.random.random() >= chance), len(chances))

    @property
    def tokens(self) -> int:
        return sum(len(request.text) - 1 for request in self.requests)


def rate(controller, kind: str, rows: int) -> float:
    stream = Stream(rows)
    while stream.tokens < 6000:
        stream.step(controller, kind)
    return stream.tokens / rows / stream.seconds


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_as_fast_as_the_best_choice_in_hindsight(kind, rows):
    fixed = {0: 1.0, **{each: rate(each, kind, rows) for each in (*CHOICES, 1, 2, 4, 8)}}
    chosen = rate(Controller(CHOICES, LOOKUP, cost), kind, rows)
    assert chosen > 0.97 * max(fixed.values()), fixed
    assert chosen > 0.97


def test_it_follows_a_stream_whose_kind_changes():
    """Every 200 tokens; from 30 tokens on the source is the one that is best there, in nine steps of ten."""
    best_source = {"as tuned": Choice, "copied": int, "odd": int}
    stream, controller = Stream(1), Controller(CHOICES, LOOKUP, cost)
    late = right = 0
    for turn in range(30):
        kind = list(best_source)[turn % 3]
        begin = stream.tokens
        while stream.tokens < begin + 200:
            before = stream.tokens
            chosen = stream.step(controller, kind)
            if before >= begin + 30:
                late += 1
                right += isinstance(chosen, best_source[kind])
    assert right > 0.9 * late


def test_without_a_text_it_is_what_was_measured():
    """At one row a chain of three: 1 + .7 + .42 + .21 tokens for 1.3 steps; at many rows a pass has to be short."""
    assert best(CHOICES, cost, True, 1).nodes == 5
    assert best(CHOICES[:4], cost, True, 1) is SHAPES[2]
    assert best(CHOICES[:4], cost, True, 16) is SHAPES[0]
    assert best(CHOICES, cost, False, 1) is None


def test_a_shift_is_learnt_and_forgotten():
    shift = Shift()
    for _ in range(40):
        shift.observe(0.0, True)
    assert shift.mean > 2
    for _ in range(200):
        shift.return_to(0.0, 1 / 30)
    assert abs(shift.mean) < 0.05
    assert shift.variance == pytest.approx(1.0, abs=0.05)


def test_what_is_chosen_depends_on_the_past_alone():
    """The same past twice gives the same choices, whatever comes of the last one."""

    def choices(last: int) -> list:
        stream, controller = Stream(2, seed=5), Controller(CHOICES, LOOKUP, cost)
        taken = [stream.step(controller, "as tuned") for _ in range(30)]
        stream.random.seed(last)
        return [*taken, stream.step(controller, "as tuned")]

    assert choices(1) == choices(2)
