"""A tree of any shape, which is refused where it does not hang together."""

import pytest
import torch
from conftest import tiny_head

from speculator import (
    Candidates,
    DraftModelDrafter,
    FixedTree,
    HeadDrafter,
    Sampling,
    UserError,
    generate,
)

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]


def test_candidates_are_a_uniform_tree():
    """Level by level, the children of a token side by side."""
    assert Candidates((2, 1)).paths == ((0,), (1,), (0, 0), (1, 0))
    with pytest.raises(UserError, match="at most 1,024"):
        Candidates((11, 11, 11))


@pytest.mark.parametrize("paths", [[], [(1,)], [(0,), (1, 0)]])
def test_a_tree_with_a_missing_parent_is_refused(paths):
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
