"""A recurrent head drafts every branch of a tree from the branch's own state."""

import pytest
import torch
from conftest import VOCAB, tiny_head

from speculator import FixedTree, HeadDrafter, Tree, UserError
from speculator.target.cache.kv_cache import KVCache


def test_every_branch_of_a_tree_continues_its_own_state():
    head = tiny_head().double()
    drafter = HeadDrafter(head, Tree((2, 2, 1), nodes=8))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 32, generator=generator, dtype=torch.float64)
    pending = torch.tensor([3, 4])
    source = drafter.memory.open(KVCache([], 2, 10, torch.device("cpu")))
    source.prefill(0, [[0] * 5, [0] * 2], [0, 0], hidden, [5, 2])
    levels = [(torch.tensor([[1, 2], [5, 6]]), [0, 0]), (torch.tensor([[7, 8, 9], [10, 11, 12]]), [1, 0, 1])]
    distributions = [source.first(pending, [])]
    for level, (tokens, parents) in enumerate(levels, start=1):
        distributions.append(source.next(level, tokens, torch.tensor([parents, parents])))
    for row, last in enumerate((4, 1)):
        for leaf in range(3):
            parent = levels[1][1][leaf]
            text = [pending[row], levels[0][0][row, parent], levels[1][0][row, leaf]]
            whole = head.logits(hidden[row : row + 1, last : last + 1], torch.tensor([text]))[:, 0, 0]
            assert whole.shape == (3, VOCAB)
            for level, place in enumerate((0, parent, leaf)):
                torch.testing.assert_close(distributions[level][row, place], whole[level])


def test_more_branches_than_draft_tokens_raise():
    head = tiny_head(draft_tokens=[2, 5, 7])
    for shape in (Tree((3, 2), nodes=4), FixedTree([(0,), (1,), (2,)])):
        HeadDrafter(head, shape)
    for shape in (Tree((2, 4), nodes=4), FixedTree([(i,) for i in range(4)])):
        with pytest.raises(UserError, match="3 tokens"):
            HeadDrafter(head, shape)
