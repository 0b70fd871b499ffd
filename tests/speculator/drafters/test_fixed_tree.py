"""A tree of any shape: equal to the uniform one where it is uniform, refused where it does not hang together."""

import itertools

import pytest
import torch
from conftest import tiny_head, tiny_model

from speculator import (
    Candidates,
    DraftModelDrafter,
    FixedTree,
    HeadDrafter,
    Sampling,
    Target,
    UserError,
    generate,
)

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("source", ["head", "model"])
def test_a_uniform_tree_is_that_of_the_candidates(target, source, temperature):
    paths = [path for depth in (1, 2, 3) for path in itertools.product(*map(range, (3, 2, 2)[:depth]))]
    made = []
    for shape in (Candidates((3, 2, 2)), FixedTree(paths)):
        # The model reads the tree that it is fed, the head its own states alone.
        model = Target(tiny_model("qwen3"), tokenizer=None)
        drafter = HeadDrafter(tiny_head(), shape) if source == "head" else DraftModelDrafter(model, target, shape)
        made.append(generate(target, drafter, PROMPTS, Sampling(temperature), max_new_tokens=40))
    assert made[0].tokens == made[1].tokens
    assert made[0].steps == made[1].steps


@pytest.mark.parametrize("paths", [[], [(1,)], [(0,), (1, 0)]])
def test_what_does_not_hang_together_is_refused(paths):
    with pytest.raises(UserError, match="tree: "):
        FixedTree(paths)


def test_siblings_are_drawn_without_replacement(target):
    torch.manual_seed(0)
    shape = FixedTree([(i,) for i in range(5)])
    drawn = []

    class Noting(HeadDrafter):
        def propose(self, *args):
            drawn.append(super().propose(*args).tokens)
            return super().propose(*args)

    generate(target, Noting(tiny_head(), shape), PROMPTS, Sampling(1.0), max_new_tokens=30)
    assert all(len(set(row)) == 5 for tokens in drawn for row in tokens.tolist())


def test_a_level_of_one_token_sees_its_ancestors_alone(target):
    """The same alone as in a batch, where no level is alone."""
    drafter = DraftModelDrafter(target, target, FixedTree([(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1)]))
    prompts, settings = [[1, 2, 3], [4, 5]], [Sampling(1.0, seed=3), Sampling(1.0, seed=4)]
    together = generate(target, drafter, prompts, settings, max_new_tokens=60, eos_token_ids=())
    alone = generate(target, drafter, prompts[:1], settings[:1], max_new_tokens=60, eos_token_ids=())
    assert alone.tokens == together.tokens[:1]
    assert alone.steps == together.steps[:1]
