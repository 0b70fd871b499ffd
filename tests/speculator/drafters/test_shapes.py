"""Where a chain ends, by hand."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speculator import Chain, Sampling
from speculator.decoding.sampling import RowSampling

CPU = torch.device("cpu")


class Fixed:
    """The same two distributions at every level: row 0 is sure of its next token, row 1 is not."""

    logits = torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.3, 0.3]]).log()[:, None]

    def first(self, pending, texts):
        return self.logits

    def next(self, level, tokens, parents):
        return self.logits


class Operations(TorchDispatchMode):
    """The names of what tensors are asked to do."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().split("::")[-1].split(".")[0])
        return func(*args, **(kwargs or {}))


def drafted(chain):
    greedy = RowSampling([Sampling(), Sampling()], CPU)
    return chain.draft(Fixed(), torch.zeros(2, dtype=torch.long), greedy, torch.zeros(2, 4), [[0], [0]])


@pytest.mark.parametrize(
    ("least", "lengths"),
    [(0.0, [4, 4]), (0.1, [4, 3]), (0.3, [4, 2]), (0.5, [4, 1]), (0.75, [3, 1]), (0.85, [2, 1]), (0.95, [1, 1])],
)
def test_a_chain_ends_behind_the_token_that_makes_it_unsure(least, lengths):
    """Joint probabilities: 0.9, 0.81, 0.73 in row 0; 0.4, 0.16, 0.06 in row 1. The fourth token's asks nobody."""
    draft = drafted(Chain(4, min_confidence=least))
    assert draft.lengths.tolist() == lengths
    assert draft.tokens.shape[1] == max(lengths)


def test_a_chain_without_a_threshold_reckons_no_confidence():
    arithmetic = {"_softmax", "gather", "mul", "ge"}
    with Operations() as unasked:
        drafted(Chain(4))
    with Operations() as asked:
        drafted(Chain(4, min_confidence=0.5))
    assert not unasked.names & arithmetic
    assert arithmetic <= asked.names
