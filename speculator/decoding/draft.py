"""A draft: the chain or tree of tokens that a drafter proposes."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from speculator.target.tree import TokenTree


def take_at(values: Tensor, position: Tensor) -> Tensor:  # [B, T, X], [B] -> [B, X]
    """Return the values at one position of each row."""
    return gather_at(values, position[:, None])[:, 0]


def gather_at(values: Tensor, positions: Tensor) -> Tensor:  # [B, T, X], [B, n] -> [B, n, X]
    """Return the values at n positions of each row."""
    # gather needs an index for every element: [B, n] becomes [B, n, X], the same position along X.
    return values.gather(1, positions[:, :, None].expand(-1, -1, values.shape[-1]))


@dataclass
class Draft(TokenTree):
    """Proposed tokens. In a verification step the pending token has position 0 and draft token i has position i + 1.

    Attributes:
        tokens: [B, n] drafted tokens, with padding on the right.
        lengths: [B] number of drafted tokens of each row.
        probs: [B, n, V] distribution from which each token was drawn, or None for a deterministic draft
            (one-hot). Siblings share the distribution of their parent's continuation.
        parents: [B, n] index of each token's parent in the draft, -1 under the pending token; parents come before
            their children. None for a chain.
        depth: length of the longest path; n for a chain.
        width: largest number of siblings.
        base: the draft to which lookup paths were added. Its tokens come first.
        ragged: rows may have fewer tokens than others, as with n-gram lookup.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    parents: Tensor | None = None
    depth: int = 0
    width: int = 1
    base: Draft | None = None
    ragged: bool = False

    def __post_init__(self):
        if self.parents is None:
            self.depth = self.tokens.shape[1]

    @classmethod
    def none(cls, pending: Tensor) -> Draft:  # [B]
        """Return an empty draft, for a plain step."""
        return cls(pending.new_empty(len(pending), 0), torch.zeros_like(pending))

    def filled(self, tokens: Tensor, probs: Tensor | None) -> Draft:
        """Return a draft of the same form with other tokens [B, n] and the `probs` that they were drawn from."""
        # A shallow copy takes along what the cached properties hold, such as the ancestors: they depend on the form
        # only.
        draft = copy(self)
        draft.tokens, draft.probs = tokens, probs
        return draft

    @cached_property
    def drafted(self) -> Tensor:  # [B, n] bool, False for padding
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    @property
    def present(self) -> tuple[Tensor, Tensor] | None:  # [T], [T]
        """Rows and verify positions of all tokens but padding, pending ones included; None if no row can have padding.

        The host waits for the device here.
        """
        if not self.ragged or len(self.tokens) == 1 or bool(self.drafted.all()):
            return None
        # The pending token is at verify position 0 of every row, so drafted token i is at i + 1: lengths [2, 0] give
        # (0, 0), (0, 1), (0, 2), (1, 0).
        rows, positions = torch.nn.functional.pad(self.drafted, (1, 0), value=True).nonzero().unbind(1)
        return rows, positions

    def index_at(self, last: Tensor, present: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:  # [B] -> [B] each
        """Return the index of each row's verify position `last` in the leading dimensions of logits.

        The index is (rows, positions) for logits [B, n+1, V], and (tokens,) for logits [T, V] of the `present` tokens.
        """
        if present is None:
            return torch.arange(len(last), device=last.device), last
        # Rows follow each other, each with its pending token first: with lengths [2, 0, 1] they begin at 0, 3 and 4.
        counts = self.lengths + 1
        return (counts.cumsum(0) - counts + last,)

    @cached_property
    def longest(self) -> Tensor:  # [B] length of each row's longest path, without padding
        return self.lengths if self.parents is None else (self.depths[:, 1:] * self.drafted).amax(-1)

    def path(self, last: Tensor) -> Tensor:  # [B] -> [B, depth + 1]
        """Return the verify positions from the pending token to `last`, padded with position 0."""
        return take_at(self.paths, last)
