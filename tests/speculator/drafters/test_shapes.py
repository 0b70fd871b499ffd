"""How a chain picks its tokens."""

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


def drafted(chain, settings, coupled, source):
    sampling = RowSampling([settings, settings], CPU)
    pending = torch.zeros(2, dtype=torch.long)
    return chain.draft(source, pending, Noise(sampling, pending, 3, chain.depth, coupled), [[0], [0]])


@pytest.mark.parametrize("independent", [True, False])
def test_tokens_that_do_not_depend_on_each_other_are_not_drawn(independent):
    source = Fixed()
    source.independent = independent
    assert (drafted(Chain(4), Sampling(1.0), False, source).probs is None) == independent
