"""The parts that DFlash 2 adds to DFlash: convolutions inside a block, and a selector among candidates of each slot.

With y the normed input of a sublayer (attention or MLP) at slot j of a block, and g(c) the group of channel c:

    K      = kernel_projection(y)                        [2, 2, D / conv_group_size]: side, tap, group
    w[s,t] = base_kernel[s, t, c] + K[s, t, g(c)]
    in:      y[j, c] w[0, 0] + y[j-1, c] w[0, 1]         what the sublayer reads
    out:     o[j, c] w[1, 0] + o[j-1, c] w[1, 1]         what is added to h, for the sublayer's output o

There is nothing before slot 0. The text is not convolved, only the block.

With U the logits of a slot (`speculator.heads.dspark.model`), h its final state and a the token before:

    candidates = the selector_top_k likeliest tokens of U
    score(b)   = U(b) + sum_r predecessor_codebook[a]_r  hidden_projection(h)_r  successor_codebook[b]_r

The draft's distribution is the softmax of the candidates' scores; it is 0 for all other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speculator.device import exact
from speculator.heads.dspark.config import DSparkSpeculatorConfig

_LOGITS = 2**25
"""Logits that `CandidateSelector.measure` has in memory at a time."""


class Convolution(nn.Module):
    """A convolution over two slots before and after a sublayer, whose kernel depends on the slot's state."""

    def __init__(self, config: DSparkSpeculatorConfig):
        super().__init__()
        self.groups = config.emb_dim // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, 2, config.emb_dim))
        self.kernel_projection = nn.Linear(config.emb_dim, 4 * self.groups, bias=False)

    def forward(self, y: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:  # [..., block_size, D]
        """Return the convolved output [..., block_size, D] of a sublayer that reads the convolved y."""
        kernels = self.kernel_projection(y).unflatten(-1, (2, 2, self.groups, 1))
        return self._mixed(sublayer(self._mixed(y, kernels, 0)), kernels, 1)

    def _mixed(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:  # [..., D], [..., 2, 2, groups, 1] -> [..., D]
        """Convolve over slots with the kernels of a side: 0 for the sublayer's input, 1 for its output."""
        x = x.unflatten(-1, (self.groups, -1))  # [..., block_size, groups, D / groups]
        base = self.base_kernel[side].unflatten(-1, (self.groups, -1)).to(x.dtype)
        # The slots 0 1 2 have - 0 1 before them.
        before = nn.functional.pad(x[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
        now, then = (base[tap] + kernels[..., side, tap, :, :] for tap in (0, 1))
        return (x * now + before * then).flatten(-2)


class LikeliestTokens(NamedTuple):
    """The likeliest tokens of slots, by their own logits."""

    tokens: Tensor  # [..., selector_top_k]
    logits: Tensor  # [..., selector_top_k]


class Selected(NamedTuple):
    """The selector's results on K labels."""

    loss: Tensor  # [K] cross-entropy among the candidates; 0 where the label is none of them
    hits: Tensor  # [K] 1 where the best candidate is the label
    recalled: Tensor  # [K] 1 where the label is a candidate


class CandidateSelector(nn.Module):
    """Scores the likeliest tokens of a slot given the token before."""

    def __init__(self, config: DSparkSpeculatorConfig):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.emb_dim, config.selector_rank, bias=False)

    def candidates(self, logits: Tensor) -> LikeliestTokens:  # [..., V]
        top = logits.topk(self.top_k)
        return LikeliestTokens(top.indices, top.values)

    def scores(self, features: Tensor, candidates: LikeliestTokens, before: Tensor) -> Tensor:
        """Return the candidates' scores [..., selector_top_k], given features [..., D] and the tokens before [...]."""
        rows = nn.functional.embedding(before, self.predecessor_codebook) * self.hidden_projection(features)
        successors = nn.functional.embedding(candidates.tokens, self.successor_codebook)
        return candidates.logits + (successors @ rows[..., None])[..., 0]

    def forward(self, features: Tensor, logits: Tensor, before: Tensor) -> Tensor:  # [..., D], [..., V], [...]
        """Return the logits [..., V] of the tokens after `before`: the candidates' scores, and -inf for all others."""
        found = self.candidates(logits)
        scores = self.scores(features, found, before)
        whole = scores.new_full((*scores.shape[:-1], logits.shape[-1]), -torch.inf)
        return whole.scatter(-1, found.tokens.expand(scores.shape), scores)

    def measure(
        self,
        features: Tensor,  # [K, D]
        output: Callable[[Tensor], Tensor],  # features to logits, [C, D] -> [C, V]
        before: Tensor,  # [K] the token of the text before each label
        labels: Tensor,  # [K]
    ) -> Selected:
        """Compare the selector's choice with the labels, for its own loss: no gradient flows into the slots' logits.

        `features` are of the slots that predict the labels. Logits exist for C of the K labels at a time.
        """
        with torch.no_grad():
            parts = [
                self.candidates(output(x)) for x in features.split(max(1, _LOGITS // len(self.successor_codebook)))
            ]
        found = LikeliestTokens(*map(torch.cat, zip(*parts, strict=True)))
        log_q = exact(self.scores(features, found, before)).log_softmax(-1)  # [K, selector_top_k]
        is_label = found.tokens == labels[:, None]
        hits = is_label.gather(1, log_q.argmax(-1, keepdim=True))[:, 0]
        return Selected(-(log_q * is_label).sum(-1), hits.long(), is_label.any(-1).long())
