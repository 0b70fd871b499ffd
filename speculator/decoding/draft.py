"""A draft: the chain or tree of tokens that a drafter proposes."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculator.target.attention.tree import TokenTree

if TYPE_CHECKING:
    from speculator.target.cache.kv_cache import KVCache


def take_at(values: Tensor, position: Tensor) -> Tensor:  # [B, T, X], [B] -> [B, X]
    return gather_at(values, position[:, None])[:, 0]


def gather_at(values: Tensor, positions: Tensor) -> Tensor:  # [B, T, X], [B, n] -> [B, n, X]
    """Return the values at n given positions of each row."""
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
        ragged: rows may differ in number of tokens, as with n-gram lookup.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    parents: Tensor | None = None
    depth: int = 0
    width: int = 1
    ragged: bool = False

    def __post_init__(self):
        if self.parents is None:
            self.depth = self.tokens.shape[1]

    @classmethod
    def none(cls, pending: Tensor) -> Draft:  # [B]
        """Return a draft without tokens for B rows, as plain decoding verifies it; `pending` gives B and the device."""
        return cls(pending.new_empty(len(pending), 0), torch.zeros_like(pending))

    def filled(self, tokens: Tensor, probs: Tensor | None) -> Draft:
        """Return a draft of the same lengths and parents with other tokens [B, n], drawn from `probs` (see `Draft`)."""
        # A shallow copy takes along what the cached properties hold, such as the ancestors: they depend on the form
        # only.
        draft = copy(self)
        draft.tokens, draft.probs = tokens, probs
        return draft

    @cached_property
    def drafted(self) -> Tensor:  # [B, n] bool, False for padding
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    @property
    def unpadded(self) -> tuple[Tensor, Tensor] | None:  # [T], [T]
        """Row and verify position of each token that is not padding, pending tokens included.

        None for a draft that is not `ragged`, has no padding, or has one row. The host waits for the device here.
        """
        if not self.ragged or len(self.tokens) == 1 or bool(self.drafted.all()):
            return None
        # The pending token is at verify position 0 of every row, so drafted token i is at i + 1: lengths [2, 0] give
        # (0, 0), (0, 1), (0, 2), (1, 0).
        rows, positions = torch.nn.functional.pad(self.drafted, (1, 0), value=True).nonzero().unbind(1)
        return rows, positions

    @cached_property
    def longest(self) -> Tensor:  # [B] length of each row's longest path, without padding
        return self.lengths if self.parents is None else (self.depths[:, 1:] * self.drafted).amax(-1)

    def path(self, last: Tensor) -> Tensor:  # [B] -> [B, depth + 1]
        """Return each row's verify positions from the pending token to position `last`, then 0 as padding."""
        return take_at(self.paths, last)

    @property
    def tree(self) -> Draft | None:
        """This draft if it is a tree, which needs an attention mask of its own; None for a chain."""
        return None if self.parents is None else self

    def accepted(self, last: Tensor) -> Path:  # [B]
        """Return the accepted path of each row, which ends at the row's verify position `last`."""
        return Path(last) if self.parents is None else TreePath(self, last)


class Path:
    """The accepted path of each row of a chain, whose tokens are at the first verify positions already.

    Attributes:
        accepted: [B] number of accepted draft tokens; in a chain it is also the position where the path ends.
    """

    def __init__(self, accepted: Tensor):
        self.accepted = accepted

    def of(self, x: Tensor) -> Tensor:  # [B, n+1] or [B, n+1, X] -> the same
        """Return x at the verify positions of each row's path; columns after the path's end are arbitrary."""
        return x

    def move(self, cache: KVCache) -> None:
        """Move the path's keys and values to the first of the draft's positions in the cache; no-op for a chain."""


class TreePath(Path):
    """The accepted path of each row of a tree, whose tokens may be at any verify positions."""

    def __init__(self, draft: Draft, last: Tensor):
        super().__init__(draft.depths.gather(1, last[:, None])[:, 0])
        self._positions = draft.path(last)  # [B, depth + 1]

    def of(self, x: Tensor) -> Tensor:  # [B, n+1] or [B, n+1, X] -> [B, depth+1] or [B, depth+1, X]
        return x.gather(1, self._positions) if x.dim() == 2 else gather_at(x, self._positions)

    def move(self, cache: KVCache) -> None:
        cache.gather(self._positions)


class Computed:
    """Which tokens a verification computes. This base class takes logits of all tokens [B, n+1], padding included.

    Attributes:
        widths: number of tokens of each row that the target's layers compute; None: n + 1.
        unpadded: row and verify position of each token that has logits, see `Draft.unpadded`; None: all tokens.
    """

    unpadded: tuple[Tensor, Tensor] | None = None

    def __init__(self, widths: list[int] | None = None):
        self.widths = widths

    def of(self, hidden: Tensor) -> Tensor:  # [B, n+1, D] -> [B, n+1, D], or [T, D]
        """Return the hidden states of the tokens whose logits are needed: all, or T without padding."""
        return hidden

    def index(self, last: Tensor) -> tuple[Tensor, ...]:  # [B] -> [B] each
        """Return indices for the logits' dimensions before V that select the verify position `last` of each row."""
        return torch.arange(len(last), device=last.device), last


class ComputedRagged(Computed):
    """Takes logits only of the T tokens that are not padding, row after row, in a draft whose rows differ in length."""

    def __init__(self, draft: Draft, unpadded: tuple[Tensor, Tensor], widths: list[int] | None):
        super().__init__(widths)
        self._lengths, self.unpadded = draft.lengths, unpadded

    def of(self, hidden: Tensor) -> Tensor:
        return hidden[self.unpadded]

    def index(self, last: Tensor) -> tuple[Tensor, ...]:
        # Each row has its pending token first: with lengths [2, 0, 1] the rows begin at 0, 3 and 4.
        counts = self._lengths + 1
        return (counts.cumsum(0) - counts + last,)
