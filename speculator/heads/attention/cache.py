"""Keys and values that an attention head keeps for every row: storage only."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import Self


class HeadCache:
    """The keys and values of B rows in each of a head's layers, for K key heads of size d.

    Positions from a row's length on belong to a draft or are free: the next write overwrites them. To remove tokens,
    lower `lengths`.

    Args:
        like: a tensor of the dtype and on the device that the cache is to have.
        value_dim: size of a value; None: d.

    Attributes:
        keys, values: [layers, B, K, capacity, d]; values may have a size of their own, `value_dim`.
        lengths: [B] number of text positions in each row, updated in place.
        longest: upper bound of `lengths`, known to the host; it bounds how many positions are read.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        like: Tensor,
        value_dim: int | None = None,
    ):
        shape = (layers, rows, kv_heads, capacity)
        self.keys, self.values = (like.new_zeros(*shape, size) for size in (head_dim, value_dim or head_dim))
        self.lengths = torch.zeros(rows, dtype=torch.long, device=like.device)
        self.longest = 0

    def write(
        self,
        layer: int,
        keys: Tensor,  # [B, T, K, d]
        values: Tensor,  # [B, T, K, value_dim]
        positions: Tensor,  # [B, T]
    ) -> None:
        """Write a layer's keys and values at these positions of each row; `lengths` do not change."""
        # An index on either side of the slice: the result is [B, T, K, d], as keys and values come. Rows write at
        # positions of their own: lengths [5, 2] and T = 2 give 5, 6 and 2, 3.
        row = torch.arange(len(positions), device=positions.device)[:, None]
        self.keys[layer][row, :, positions] = keys.to(self.keys.dtype)
        self.values[layer][row, :, positions] = values.to(self.values.dtype)

    def select(self, start: int, stop: int, longest: int) -> Self:
        """Return a view of rows start..stop - 1, which have at most `longest` tokens; its writes change this cache."""
        part = copy(self)
        part.keys, part.values = self.keys[:, start:stop], self.values[:, start:stop]
        part.lengths, part.longest = self.lengths[start:stop], longest
        return part

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        """Copy keys and values of row source[i], of at most `longest` tokens, to row destination[i]."""
        # An index by lists copies all source rows before the first is written, so rows may change places.
        for x in (self.keys, self.values):
            x[:, list(destination), :, :longest] = x[:, list(source), :, :longest]

    def grow(self, capacity: int) -> None:
        # Pads from the last dimension on: d stays, and positions are added at the end. Rows that were selected before
        # are views of the old tensors.
        more = (0, 0, 0, max(0, capacity - self.keys.shape[3]))
        self.keys, self.values = (nn.functional.pad(x, more) for x in (self.keys, self.values))
