"""Structure of a token tree: parents, depths and ancestors of drafted tokens."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn


class TokenTree:
    """Tokens drafted after a pending token; a chain is the tree without branches.

    In verification the pending token is at position 0 and draft token i at position i + 1.

    Attributes:
        tokens: [B, n] drafted tokens.
        parents: [B, n] index of each token's parent, -1 for the pending token; parents precede their children. None
            for a chain.
        depth: length of the longest path.
    """

    tokens: Tensor
    parents: Tensor | None
    depth: int

    @cached_property
    def before(self) -> Tensor:  # [B, n]
        """Verify position of each token's parent: the target's distribution there accepts or rejects the token."""
        if self.parents is None:
            return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        return self.parents + 1

    @cached_property
    def ancestors(self) -> Tensor:  # [B, n + 1, n + 1] bool
        """[b, i, j]: whether verify position j is on the path from the root to position i, i included."""
        rows, count = self.tokens.shape
        if self.parents is None:
            full = torch.ones(count + 1, count + 1, dtype=torch.bool, device=self.tokens.device)
            return full.tril().expand(rows, -1, -1)
        known = torch.eye(count + 1, dtype=torch.bool, device=self.tokens.device).repeat(rows, 1, 1)
        # Doubling: after k rounds `known` has the ancestors of up to 2^k - 1 levels, so a depth of 5 takes 3 rounds.
        # The root is its own parent, so walking up from it stays there.
        above = nn.functional.pad(self.before, (1, 0))  # the ancestor 1 level up, then 2, 4, ...
        for _ in range(self.depth.bit_length()):
            known = known | known.gather(1, above[:, :, None].expand(-1, -1, count + 1))
            above = above.gather(1, above)
        return known

    @cached_property
    def depths(self) -> Tensor:  # [B, n + 1]
        """Depth of each verify position; the pending token's is 0."""
        if self.parents is None:
            return torch.arange(self.tokens.shape[1] + 1, device=self.tokens.device).expand(len(self.tokens), -1)
        return self.ancestors.sum(-1) - 1

    @cached_property
    def paths(self) -> Tensor:  # [B, n + 1, depth + 1] verify positions from the pending token to each; then 0
        # Positions on a path increase, since parents come before their children.
        count = self.tokens.shape[1] + 1
        index = torch.arange(count, device=self.tokens.device)
        # Positions off the path get `count` and are sorted to the end: for position 4 with the ancestors 0, 2, 4 of 5
        # that is 0 2 4 5 5, cut to the deepest path, and 5 becomes 0.
        order = torch.where(self.ancestors, index, count).sort(-1).values[:, :, : self.depth + 1]
        return torch.where(order < count, order, 0)
