"""Where a chain ends, by hand."""

import pytest
import torch

from speculator import Chain, Sampling
from speculator.decoding.drafter import LogitsSource
from speculator.decoding.sampling import Noise, RowSampling

CPU = torch.device("cpu")


class Fixed(LogitsSource):
    """The same two distributions at every level: row 0 is sure of its next token, row 1 is not."""

    logits = torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.3, 0.3]]).log()[:, None]

    def first(self, pending, texts):
        return self.logits

    def next(self, level, tokens, parents):
        return self.logits


def drafted(chain, settings=Sampling(), coupled=True, source=None):  # noqa: B008 (frozen)
    sampling = RowSampling([settings, settings], CPU)
    pending = torch.zeros(2, dtype=torch.long)
    return chain.draft(source or Fixed(), pending, Noise(sampling, pending, 3, chain.depth, coupled), [[0], [0]])


@pytest.mark.parametrize(
    ("least", "lengths"),
    [(0.0, [4, 4]), (0.1, [4, 3]), (0.3, [4, 2]), (0.5, [4, 1]), (0.75, [3, 1]), (0.85, [2, 1]), (0.95, [1, 1])],
)
def test_a_chain_ends_behind_the_token_that_makes_it_unsure(least, lengths):
    """Joint probabilities: 0.9, 0.81, 0.73 in row 0; 0.4, 0.16, 0.06 in row 1. The fourth token's asks nobody."""
    draft = drafted(Chain(4, min_confidence=least))
    assert draft.lengths.tolist() == lengths
    assert draft.tokens.shape[1] == max(lengths)


@pytest.mark.parametrize("coupled", [True, False])
def test_the_confidence_is_that_of_the_distribution_that_is_sampled(coupled):
    """At temperature 0.5 the probability 0.9 becomes 0.988, and 0.4 becomes 0.47."""
    draft = drafted(Chain(4, min_confidence=0.85), Sampling(0.5), coupled)
    assert draft.tokens[0].tolist() == [0] * 4
    assert draft.lengths.tolist() == [4, 1]


class Confident(Fixed):
    """Predicts the acceptance of the token after each: 0.5 in row 0, 0.9 in row 1."""

    def confidence(self, level, tokens):
        return torch.tensor([0.5, 0.9])


@pytest.mark.parametrize(("least", "lengths"), [(0.0, [4, 4]), (0.3, [2, 4]), (0.6, [1, 4]), (0.85, [1, 2])])
def test_a_chain_ends_before_a_token_that_its_source_expects_to_be_rejected(least, lengths):
    """The first token is drafted anyway; the chances of the next ones are 0.5, 0.25, 0.125 and 0.9, 0.81, 0.73."""
    assert drafted(Chain(4, min_confidence=least), source=Confident()).lengths.tolist() == lengths


@pytest.mark.parametrize("independent", [True, False])
def test_tokens_that_do_not_depend_on_each_other_are_not_drawn(independent):
    source = Fixed()
    source.independent = independent
    assert (drafted(Chain(4), Sampling(1.0), False, source).probs is None) == independent
