"""What a drafter proposes: a chain of tokens, or a tree of them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from speculator.target.tree import TokenTree


def take_at(values: Tensor, place: Tensor) -> Tensor:  # [B, T, X], [B] -> [B, X]
    """Each row's values at a place of its own."""
    return gather_at(values, place[:, None])[:, 0]


def gather_at(values: Tensor, places: Tensor) -> Tensor:  # [B, T, X], [B, n] -> [B, n, X]
    """Each row's values at places of its own."""
    return values.gather(1, places[:, :, None].expand(-1, -1, values.shape[-1]))


@dataclass
class Draft(TokenTree):
    """Proposed tokens. In a verify pass position 0 is the pending token and draft token i stands at i + 1.

    Attributes:
        tokens: [B, n].
        lengths: [B] how many of them each row really drafted; the rest is padding.
        probs: [B, n, V] what each token was drawn from, or None for a deterministic draft (one-hot). Siblings share the
            distribution of their parent's continuation.
        parents: [B, n] index of each token's parent in the draft, -1 under the pending token; parents come before
            their children. None for a chain.
        depth: the longest path. A chain's is its n.
        width: the most siblings.
        base: the draft to which lookup paths were added; its tokens come first, and `probs` are its.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    parents: Tensor | None = None
    depth: int = 0
    width: int = 1
    base: Draft | None = None

    def __post_init__(self):
        if self.parents is None:
            self.depth = self.tokens.shape[1]

    @classmethod
    def none(cls, pending: Tensor) -> Draft:  # [B]
        """Nothing drafted: a plain step."""
        return cls(pending.new_empty(len(pending), 0), torch.zeros_like(pending))

    def filled(self, tokens: Tensor, probs: Tensor | None) -> Draft:
        """The same form with other tokens. What has been worked out of the form is shared: nobody writes to it."""
        draft = copy(self)
        draft.tokens, draft.probs = tokens, probs
        return draft

    @cached_property
    def drafted(self) -> Tensor:  # [B, n] bool
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    @cached_property
    def longest(self) -> Tensor:  # [B] of the paths that each row really drafted
        return self.lengths if self.parents is None else (self.depths[:, 1:] * self.drafted).amax(-1)

    @cached_property
    def paths(self) -> Tensor:  # [B, n + 1, depth + 1] verify positions from the pending token to each; then 0
        # Positions on a path come in order, since parents stand before their children.
        count = self.tokens.shape[1] + 1
        index = torch.arange(count, device=self.tokens.device)
        order = torch.where(self.ancestors, index, count).sort(-1).values[:, :, : self.depth + 1]
        return torch.where(order < count, order, 0)

    def path(self, last: Tensor) -> Tensor:  # [B] -> [B, depth + 1]
        """Verify positions from the pending token to `last`; what is beyond `last` repeats position 0."""
        return take_at(self.paths, last)
