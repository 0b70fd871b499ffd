"""Choices over simulated text come near the best fixed choice in hindsight, plain steps among them."""

import random
from collections.abc import Sequence
from math import exp

import pytest

from speculator import Chain, FixedTree, Sampling
from speculator.decoding.request import Request, Step
from speculator.drafters.price import LONGEST_PATH, Choice, Chooser, PricedDraft, Shift, fastest_shape

TREE = FixedTree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
CHOICES = [Choice(Chain(depth), {True: [0.7, 0.6, 0.5, 0.5][:depth]}) for depth in (1, 2, 3, 4)]
CHOICES.append(Choice(TREE, {True: [0.8, 0.7, 0.5]}))
LOOKUP = dict.fromkeys((True, False), (0.2, 0.3, 0.5))
# Kind of text: shift of the log-odds of the head's tokens, and the chance that a looked-up token is right.
KINDS = {"as tuned": (0.0, 0.1), "code": (1.0, 0.2), "copied": (-1.0, 0.95), "odd": (-6.0, 0.02), "both": (-1.0, 0.4)}
KINDS |= {"easy": (2.0, 0.9)}


def cost(shape, tokens, path, greedy, rows) -> float:
    """Verification costs more the more rows there are, as on a CPU."""
    return 1 + 0.08 * (shape.levels if shape else 0) + 0.02 * tokens


class Stream:
    """Requests whose drafts are accepted as a kind of text has it; in half of them lookup finds nothing.

    `own` shifts the log-odds of each row's head tokens, in addition to the text's shift.
    """

    def __init__(self, rows: int, seed: int = 0, own: Sequence[float] = ()):
        self.random, self.cost, self.own = random.Random(seed), 0.0, own or [0.0] * rows
        self.requests = [Request([0], Sampling(), max_new_tokens=10**9) for _ in range(rows)]

    def step(self, chooser: Chooser | PricedDraft, kind: str) -> PricedDraft:
        shift, chance = KINDS[kind]
        rows = len(self.requests)
        right = [self.leading([chance] * LONGEST_PATH) for _ in range(rows)]
        # A looked-up token is right if it is the next number: the text counts.
        ends = [len(request.sequence) for request in self.requests]
        found = [(3, [*range(end, end + n), *[-1] * (LONGEST_PATH - n)]) for end, n in zip(ends, right, strict=True)]
        found[1::2] = [(0, [])] * len(found[1::2])
        plan = chooser.choose(self.requests, found) if isinstance(chooser, Chooser) else chooser
        for request, n, length, own in zip(self.requests, right, plan.lengths, self.own, strict=True):
            logits = plan.choice.logits[True] if plan.choice else ()
            kept = min(n, length) if length else self.leading([1 / (1 + exp(-logit - shift - own)) for logit in logits])
            request.sequence += range(len(request.sequence), len(request.sequence) + kept + 1)
            request.steps.append(Step(length or len(logits), kept, kept + 1))
        self.cost += cost(plan.choice.shape if plan.choice else None, plan.tokens, any(plan.lengths), True, rows)
        return plan

    def leading(self, chances) -> int:
        return next((i for i, chance in enumerate(chances) if self.random.random() >= chance), len(chances))

    @property
    def tokens(self) -> int:
        return sum(len(request.sequence) - 1 for request in self.requests)


def rate(chooser: Chooser | PricedDraft, kind: str, rows: int) -> float:
    """Tokens per plain step and row."""
    stream = Stream(rows)
    while stream.tokens < 6000:
        stream.step(chooser, kind)
    return stream.tokens / rows / stream.cost


def fixed(rows: int) -> list[PricedDraft]:
    """Nothing, every draft of the head, and paths of several lengths where there are any."""
    plans = [PricedDraft(rate=0.0, choice=None, lengths=[0] * rows, tokens=0)]
    plans += [
        PricedDraft(rate=0.0, choice=choice, lengths=[0] * rows, tokens=rows * choice.shape.nodes) for choice in CHOICES
    ]
    lengths = [[n if row % 2 == 0 else 0 for row in range(rows)] for n in (1, 4, 8)]
    return plans + [PricedDraft(rate=0.0, choice=None, lengths=own, tokens=sum(own)) for own in lengths]


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.soak), 16])
@pytest.mark.parametrize("kind", KINDS)
def test_adaptive_drafting_is_nearly_as_fast_as_the_best_fixed_choice_and_never_slower_than_plain_steps(kind, rows):
    best = max(rate(plan, kind, rows) for plan in fixed(rows))
    assert best >= 1, "plain steps are among them"
    assert rate(Chooser(CHOICES, LOOKUP, cost), kind, rows) > 0.97 * best


def test_each_row_has_its_own_source():
    """Where one row copies, the other drafts with the head; that is faster than one source for both."""
    chooser, stream = Chooser(CHOICES, LOOKUP, cost), Stream(2)
    plans = [stream.step(chooser, "easy") for _ in range(200)]
    both = [plan for plan in plans[50:] if plan.choice and any(plan.lengths)]
    assert len(both) > 100
    assert all(not plan.lengths[1] for plan in both), "nothing was found for it"


def test_a_request_that_the_head_does_not_know_gets_short_drafts_and_a_new_one_gets_long_ones():
    """The head is right for seven rows and never for the eighth, which then decodes alone, and then another one."""
    chooser, stream = Chooser(CHOICES, LOOKUP, cost), Stream(8, own=[0.0, -6.0, *[0.0] * 6])
    for _ in range(40):
        stream.step(chooser, "as tuned")
    assert chooser.choose(stream.requests[1:2], [(0, [])]).tokens <= 1
    assert chooser.choose([Request([0], Sampling(), max_new_tokens=99)], [(0, [])]).tokens >= 3


def test_the_price_of_a_token_equals_one_by_hand():
    """8 rows, plain steps but for one row that finds a path: Θ is 8 tokens per plain step, and a token costs 0.02.

    The price is 0.16. A token of the path is right with 0.5, so the third one still pays (0.125 does not): 2 tokens.
    """
    chooser = Chooser([], {True: [0.5]}, cost)
    requests = [Request([0], Sampling(), max_new_tokens=99) for _ in range(8)]
    plan = chooser.choose(requests, [(1, [5] * 8), *[(0, [])] * 7])
    assert plan.lengths == [2, *[0] * 7]
    assert plan.rate == pytest.approx((8 + 0.5 + 0.25) / (1 + 0.04))
    dear = Chooser([], {True: [0.5]}, lambda shape, tokens, path, greedy, rows: 1 + 0.07 * tokens)
    assert dear.choose(requests, [(1, [5] * 8), *[(0, [])] * 7]).tokens == 0, "8 x 0.07 > 0.5"


def test_a_padded_step_pays_for_all_rows():
    """On a GPU a path in one row makes all rows as long."""
    requests, found = [Request([0], Sampling(), max_new_tokens=99) for _ in range(8)], [(1, [5] * 8), *[(0, [])] * 7]
    plan = Chooser(
        [], {True: [0.9]}, lambda shape, tokens, path, greedy, rows: 1 + 0.001 * tokens, packed=False
    ).choose(requests, found)
    assert (plan.lengths[0], plan.tokens) == (8, 64)


def test_beside_a_tree_a_path_is_no_cheaper_than_the_tree():
    """Rows of trees are padded to the longest: a path of one token saves nothing, and one of 8 would cost all rows."""
    chooser = Chooser([Choice(TREE, {True: [0.6, 0.5, 0.3]})], {True: [0.9]}, lambda *given: 1.0)
    requests = [Request([0], Sampling(), max_new_tokens=99) for _ in range(8)]
    assert not any(chooser.choose(requests, [(1, [5]), *[(0, [])] * 7]).lengths), "0.9 tokens instead of 0.99"
    plan = chooser.choose(requests, [(1, [5] * 8), *[(0, [])] * 7])
    assert (plan.lengths[0], plan.tokens) == (5, 40)
    padded = Chooser([Choice(TREE, {True: [0.6, 0.5, 0.3]})], {True: [0.9]}, lambda *given: 1.0, packed=False)
    plan = padded.choose(requests, [(1, [5] * 8), *[(0, [])] * 7])
    assert (plan.lengths[0], plan.tokens) == (8, 64), "on a GPU any path makes all rows as long"


def test_a_head_that_was_unlucky_at_first_is_used_again():
    """Only a head that drafts is observed, so an estimate that is too low by chance must not last."""
    stream, chooser = Stream(1), Chooser(CHOICES, LOOKUP, cost)
    for _ in range(6):
        stream.step(chooser, "odd")
    drafts = [stream.step(chooser, "as tuned").choice for _ in range(60)]
    assert sum(choice is not None for choice in drafts) > 45


def test_the_fastest_shape_weighs_acceptance_against_cost():
    """One row: 1 + .7 + .42 + .21 tokens for 1.3 plain steps. Many rows: verification has to be short."""
    assert fastest_shape(CHOICES, cost, True, 1) is TREE
    assert fastest_shape(CHOICES[:4], cost, True, 1).nodes == 2, "three tokens are not 3% faster"
    assert fastest_shape(CHOICES[:4], cost, True, 16).nodes == 1


def test_a_shift_follows_the_outcomes():
    shift = Shift(2.0)
    for _ in range(40):
        shift.observe(0.0, True)
    assert shift.value > 2
    for _ in range(80):
        shift.observe(0.0, False)
    assert shift.value < 0


def test_a_choice_depends_on_the_past_alone():
    """The same past gives the same choices, whatever the last step's outcome will be."""

    def choices(last: int) -> list:
        stream, chooser = Stream(2, seed=5), Chooser(CHOICES, LOOKUP, cost)
        taken = [stream.step(chooser, "as tuned") for _ in range(30)]
        stream.random.seed(last)
        taken.append(stream.step(chooser, "as tuned"))
        return [(plan.choice, plan.lengths) for plan in taken]

    assert choices(1) == choices(2)
