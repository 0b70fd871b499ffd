"""c and v are what the clock says of real steps, and predict what the loop does."""

import pytest
import torch
from conftest import Oracle, tiny_head, tiny_model

from eval.costs import Costs, measure, walk
from speculator import HeadDrafter, NgramDrafter, Sampling, Target, Tree, generate

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]


def test_figures_by_hand():
    """Drafts of 0.9, 0.5, 0.3, 0.1 plain steps: the middle half's mean is 0.4; 2 tokens each. Passes of 2, 1, 2, 2.

    The median draft over the median plain step would be 0.65 / 1.5, the sum of all over that of all 2.6 / 8.
    """
    figures = Costs(plain=[1, 2, 1, 4], draft=[0.9, 1, 0.3, 0.4], verify=[2, 2, 2, 8]).figures(draft_length=2)
    assert figures["draft_over_decode"] == pytest.approx(0.2)
    assert figures["verify_over_decode"] == pytest.approx(2)
    assert figures["decode_seconds"] == pytest.approx(1.5 / 4)  # a block is four steps


def test_a_machine_that_halves_its_speed_or_stalls_once_changes_nothing():
    fast = Costs(plain=[1.0] * 5, draft=[0.4] * 5, verify=[1.5] * 5)
    both = Costs(plain=[1.0] * 5 + [2.0] * 5, draft=[0.4] * 5 + [0.8] * 5, verify=[1.5] * 4 + [90.0] + [3.0] * 5)
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
    walked = [result for _, result in walk(target, make(), PROMPTS, sampling, 9, Costs())]
    for row in range(2):
        expected = [step.accepted for step in generation.steps[row]][:9]
        assert [int(result.accepted[row]) for result in walked] == expected
        tokens = [int(t) for r in walked for t in [*r.tokens[row, 1 : 1 + int(r.accepted[row])], r.following[row]]]
        assert tokens == generation.tokens[row][1 : 1 + len(tokens)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_steps_are_measured_even_at_the_contexts_end(family):
    costs = Costs()
    prompt = torch.arange(126).remainder(32).tolist()
    target = Target(tiny_model(family), tokenizer=None)
    measure(target, HeadDrafter(tiny_head()), [prompt], Sampling(), 2, costs)
    assert len(costs.plain) == len(costs.draft) == len(costs.verify) == 2
    assert min(costs.plain + costs.draft + costs.verify) > 0


def test_a_whole_draft_kept_is_walked_whole(target):
    texts = generate(target, None, [PROMPTS[0]], max_new_tokens=60, eos_token_ids=()).tokens
    walked = list(walk(target, Oracle(texts), [PROMPTS[0]], Sampling(), 5, Costs()))
    assert [int(result.accepted[0]) for _, result in walked] == [3] * 5
