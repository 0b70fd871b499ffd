"""The losses of a token, in one table: a run's weights, its checks and its loop read it. It does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_LK_ETA = 3.0
"""How soon the LK hybrid turns from KL divergence to total variation: the paper's value."""


class TargetProbs(NamedTuple):
    """The target's distribution for each token of a chunk, restricted to the draft vocabulary."""

    p: Tensor  # [C, V_d] normalised over the whole vocabulary
    entropy: Tensor  # [C] the draft vocabulary's part of the entropy of p


class Tokens(NamedTuple):
    """What a loss reads of a chunk of tokens: the head's distribution q, the text's labels, and the target's p."""

    log_q: Tensor  # [C, V_d]
    labels: Tensor  # [C] in 0..V_d - 1; negative outside the draft vocabulary, IGNORE where there is no label
    target: TargetProbs | None = None  # None unless a loss needs it
    overlap: Tensor | None = None  # [C]; None unless a loss needs it


class Loss(NamedTuple):
    """A loss of the table.

    Attributes:
        per_token: returns the loss of each token [C].
        needs_target: it reads `Tokens.target`.
        needs_overlap: it reads `Tokens.overlap`, which the training log then shows.
    """

    per_token: Callable[[Tokens], Tensor]
    needs_target: bool = True
    needs_overlap: bool = False


def overlap(log_q: Tensor, p: Tensor) -> Tensor:  # [C, V_d] twice -> [C]
    """Return sum_v min(p_v, q_v), the probability that a sampled draft token is accepted (2211.17192, cor. 3.6)."""
    return p.minimum(log_q.exp()).sum(-1)


def cross_entropy(tokens: Tokens) -> Tensor:
    """Return the cross-entropy with the labels, the text's next tokens (2404.19124); 0 outside the draft vocabulary."""
    # Labels below 0 read column 0, and the factor makes that 0.
    return -tokens.log_q.gather(1, tokens.labels.clamp_min(0)[:, None])[:, 0] * (tokens.labels >= 0)


def kl(tokens: Tokens) -> Tensor:
    """Return KL(p || q) of each token (1503.02531, at temperature 1).

    With a draft vocabulary: sum of p (log p - log q) over it, without renormalising p. With M the mass of p in the
    draft vocabulary, the minimum M log M is reached where q is proportional to p.
    """
    assert tokens.target is not None
    return -(tokens.target.p * tokens.log_q).sum(-1) - tokens.target.entropy


def total_variation(tokens: Tokens) -> Tensor:
    """Return the chance that a sampled draft token is rejected."""
    assert tokens.overlap is not None
    return 1 - tokens.overlap


def lk(tokens: Tokens) -> Tensor:
    """Return the hybrid of 2602.23881: divergence while little is accepted, then acceptance."""
    assert tokens.overlap is not None
    # At an overlap of 0 the share of the divergence is 1, at 0.5 it is 0.22, at 1 it is 0.05.
    share = (-_LK_ETA * tokens.overlap.detach()).exp()
    return share * kl(tokens) + (1 - share) * (1 - tokens.overlap)


LOSSES = {
    "cross_entropy": Loss(cross_entropy, needs_target=False),
    "kl": Loss(kl),
    "total_variation": Loss(total_variation, needs_overlap=True),
    "lk": Loss(lk, needs_overlap=True),
}
"""Losses by the name of their weight in `LossConfig`; a run trains on their weighted sum."""
