"""c and v are what the clock says of real steps, and predict what the loop does."""

from math import inf

import pytest
import torch
from conftest import Oracle, tiny_head, tiny_model

from speculator import Chain, FixedTree, HeadDrafter, NgramDrafter, Sampling, Target, Tree, generate
from speculator.drafters.costs import CostEntry, CostTable, StepSeconds, measure, measure_table, timed_steps
from speculator.drafters.hybrid import Hybrid

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]


def test_figures_by_hand():
    """Drafts of 0.9, 0.5, 0.3, 0.1 plain steps: the middle half's mean is 0.4; 2 tokens each. Passes of 2, 1, 2, 2.

    The median draft over the median plain step would be 0.65 / 1.5, the sum of all over that of all 2.6 / 8.
    """
    figures = StepSeconds(plain=[1, 2, 1, 4], draft=[0.9, 1, 0.3, 0.4], verify=[2, 2, 2, 8]).figures(
        num_speculative_tokens=2
    )
    assert figures["draft_over_decode"] == pytest.approx(0.2)
    assert figures["verify_over_decode"] == pytest.approx(2)
    assert figures["decode_seconds"] == pytest.approx(1.5 / 4)  # a block is four steps


def test_a_machine_that_halves_its_speed_or_stalls_once_changes_nothing():
    fast = StepSeconds(plain=[1.0] * 5, draft=[0.4] * 5, verify=[1.5] * 5)
    both = StepSeconds(plain=[1.0] * 5 + [2.0] * 5, draft=[0.4] * 5 + [0.8] * 5, verify=[1.5] * 4 + [90.0] + [3.0] * 5)
    for name in ("draft_over_decode", "verify_over_decode"):
        assert both.figures(4)[name] == pytest.approx(fast.figures(4)[name])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["chain", "tree", "ngram"])
def test_the_steps_walked_are_the_loops(target, kind, temperature):
    """Same drafts kept, same tokens, batch and seeds: what is measured is what runs."""
    make = {
        "chain": lambda: HeadDrafter(tiny_head()),
        "tree": lambda: HeadDrafter(tiny_head(), Tree((2, 2, 1), 5)),
        "ngram": lambda: NgramDrafter(3),
    }[kind]
    sampling = Sampling(temperature, seed=3)
    generation = generate(target, make(), PROMPTS, sampling, max_new_tokens=60, eos_token_ids=())
    walked = [result for _, result in timed_steps(target, make(), PROMPTS, sampling, 9, StepSeconds())]
    for row in range(2):
        expected = [step.accepted for step in generation.steps[row]][:9]
        assert [int(result.accepted[row]) for result in walked] == expected
        tokens = [int(t) for r in walked for t in [*r.tokens[row, 1 : 1 + int(r.accepted[row])], r.next_token[row]]]
        assert tokens == generation.tokens[row][1 : 1 + len(tokens)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_steps_are_measured_even_at_the_contexts_end(family):
    costs = StepSeconds()
    prompt = torch.arange(126).remainder(32).tolist()
    target = Target(tiny_model(family), tokenizer=None)
    measure(target, HeadDrafter(tiny_head()), [prompt], Sampling(), 2, costs)
    assert len(costs.plain) == len(costs.draft) == len(costs.verify) == 2
    assert min(costs.plain + costs.draft + costs.verify) > 0


def test_a_whole_draft_kept_is_walked_whole(target, monkeypatch):
    monkeypatch.setattr("speculator.decoding.engine.RESERVED_NEW_TOKENS", 4)
    texts = generate(target, None, [PROMPTS[0]], max_new_tokens=60, eos_token_ids=()).tokens
    walked = list(timed_steps(target, Oracle(texts), [PROMPTS[0]], Sampling(), 10, StepSeconds()))
    assert [int(result.accepted[0]) for _, result in walked] == [3] * 10


def test_a_cost_is_that_of_the_nearest_that_was_measured():
    """Chains of 1 and 3 cost 0.2 and 0.4 to draft: one of 2 costs 0.3. A tree's pass is its own."""
    tree, other = FixedTree([(0,), (1,)]), FixedTree([(0,), (0, 0)])
    shapes = [(Chain(1), 0.2, 1.1), (Chain(3), 0.4, 1.5), (tree, 0.25, 1.25)]
    entry = CostEntry(1, 64, True, 0.01, shapes)
    assert entry.of(Chain(1)) == pytest.approx(1.3)
    assert entry.of(Chain(2)) == pytest.approx(0.3 + 1.3)
    assert entry.of(3) == pytest.approx(0.1 + 1.5), "copied tokens: the line of drafting meets 0 tokens at 0.1"
    assert entry.of(FixedTree([(0,), (1,)])) == pytest.approx(1.5)
    assert entry.of(other) == pytest.approx(0.3 + 1.3)
    assert entry.of(Hybrid(Chain(1), 2)) == inf, "none was measured"
    chain, tree_and_path = Hybrid(Chain(3), 2), Hybrid(tree, 1)
    mixing = CostEntry(1, 64, True, 0.01, [*shapes, (chain, 0.45, 2.1)])  # 5 tokens: 0.05 more to draft, 0.2 to verify
    assert mixing.of(chain) == pytest.approx(2.55)
    assert mixing.of(Hybrid(Chain(1), 2)) == pytest.approx(0.2 + 1.5 + 0.25)
    assert mixing.of(tree_and_path) == pytest.approx(0.25 + 1.5 + 0.25)
    assert mixing.of(Chain(2)) == pytest.approx(0.3 + 1.3)
    table = CostTable([entry, *(CostEntry(rows, 64, True, 0.01, [(Chain(1), 0.0, rows)]) for rows in (4, 8))])
    costs = [table.cost(tree, True, rows, 100) for rows in (1, 3, 8, 20)]
    assert costs == pytest.approx([1.5, 7, 15, 15])


def test_a_noisy_pass_makes_no_draft_cheaper_by_more_tokens():
    def tree(count: int) -> FixedTree:
        return FixedTree([(rank,) for rank in range(count)])

    shapes = [(Chain(1), 0.1, 1.2), (Chain(4), 0.3, 1.3), (tree(8), 0.3, 2.5), (tree(12), 0.2, 1.5)]
    entry = CostEntry(1, 64, False, 0.01, [*shapes, (Hybrid(Chain(4), 4), 0.3, 1.5)])
    passes = [entry.of(count) for count in range(24)]
    assert passes == sorted(passes)
    assert passes[12] - passes[0] == passes[8] - passes[0] == pytest.approx(2.0 - 1.0), "the mean of 2.5 and 1.5"
    assert entry.of(tree(12)) == pytest.approx(0.2 + 2.0)
    assert entry.of(Chain(4)) == pytest.approx(0.3 + 1.3)
    mixed = [entry.of(Hybrid(tree(12), length)) for length in (1, 4, 8)]
    assert mixed == sorted(mixed)


def test_longer_measurements_are_believed_and_what_joining_costs_stays():
    mixed = Hybrid(Chain(3), 2)
    short = CostEntry(1, 64, True, 0.01, [(Chain(1), 0.2, 1.3), (Chain(3), 0.5, 1.4), (mixed, 0.5, 1.8)])
    joining = 0.5 + 1.8 - (0.5 + 1.5)  # a pass over 5 tokens is on the line through those over 1 and 3
    entry = short.known_better([(Chain(1), 0.1, 1.1), (Chain(2), 0.2, 1.2), (Chain(3), 0.3, 1.3)])
    assert entry.of(Chain(3)) == pytest.approx(1.6)
    assert entry.of(mixed) == pytest.approx(0.3 + 1.5 + joining)
    again = CostEntry(1, 64, True, 0.01, entry.shapes)
    assert again.of(mixed) == pytest.approx(entry.of(mixed)), "as it is written"


def test_passes_over_as_many_tokens_cost_as_much():
    """Of trees their own: a mask of paths may cost more than a chain's."""
    other = FixedTree([(0,), (1,), (0, 0)])
    trees = [(FixedTree([(0,), (1,), (2,)]), 0.2, 1.4), (other, 0.3, 1.6)]
    entry = CostEntry(1, 64, True, 0.01, [(Chain(1), 0.1, 1.1), (Chain(3), 0.3, 1.2), *trees])
    assert entry.of(other) == pytest.approx(0.3 + 1.5)
    assert entry.of(Chain(3)) == pytest.approx(0.3 + 1.2)


def test_a_table_is_measured_until_its_time_is_over(target):
    sizes = [(2, 8, True), (1, 8, False)]
    shapes = [Chain(1), Chain(3), FixedTree([(0,), (1,)]), Hybrid(Chain(2), 2)]
    entries = measure_table(target, tiny_head(), shapes, sizes, seconds=60)
    assert [(entry.rows, entry.greedy) for entry in entries] == [(2, True), (1, False)]
    assert all(draft > 0 and verify > 0 for entry in entries for _, draft, verify in entry.shapes)
    assert len(measure_table(target, tiny_head(), shapes, sizes, seconds=0)) == 1
