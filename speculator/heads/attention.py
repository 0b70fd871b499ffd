"""A head that attends over the text: what it remembers of each row, and the calls by which it drafts level by level."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor, nn

from speculator.heads.base import Speculator


class HeadCache:
    """The keys and values of B sequences, and of the drafts behind them.

    What lies at or above a row's length is a draft's or dead: the next `read` or `first` writes over it. To take tokens
    back, lower `lengths`: position t holds good while x[0..t+1] stays.

    Attributes:
        keys, values: [B, K, capacity, d]
        lengths: [B] positions of text that were read, updated in place.
        longest: at least the most of `lengths`, known to the host. It decides how many slots are read.
        states: [B, f, D] what the tokens of the newest level hand to their children.
        seen: [B, f, n] which of the draft's n slots each of them sees.
        level: the depth of the newest level; 0 after `first`.
    """

    states: Tensor
    seen: Tensor

    def __init__(self, rows: int, heads: int, capacity: int, size: int, like: Tensor):
        shape = (rows, heads, capacity, size)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=like.device)
        self.longest = self.level = 0

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:  # [B, T, K, d] twice, [B, T]
        row = torch.arange(len(slots), device=slots.device)[:, None]
        self.keys[row, :, slots] = keys.to(self.keys.dtype)
        self.values[row, :, slots] = values.to(self.values.dtype)

    def select(self, start: int, stop: int, longest: int) -> HeadCache:
        """Of neighbouring rows of at most `longest` tokens: it writes into this one."""
        part = copy(self)
        part.keys, part.values, part.lengths = (x[start:stop] for x in (self.keys, self.values, self.lengths))
        part.longest = longest
        return part

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        """Rows of at most `longest` tokens change places: row source[i] becomes row destination[i]."""
        for x in (self.keys[:, :, :longest], self.values[:, :, :longest], self.lengths):
            x[list(destination)] = x[list(source)]

    def grow(self, capacity: int) -> None:
        """Have at least `capacity` slots a row, and no spare ones: who calls it grows by enough to do so rarely."""
        more = (0, 0, 0, max(0, capacity - self.keys.shape[2]))
        self.keys, self.values = (nn.functional.pad(x, more) for x in (self.keys, self.values))


class AttentionHead(Speculator):
    """A head that reads the target's taps, and attends over the keys and values of all that it has read of a text."""

    @abstractmethod
    def memory(self, rows: int, capacity: int) -> HeadCache:
        """An empty one, for `rows` sequences of at most `capacity` tokens, drafts included."""

    @abstractmethod
    def read(
        self,
        memory: HeadCache,
        taps: Tensor,  # [B, T, nD] of the positions that follow what the memory has
        tokens: Tensor,  # [B, T] the token after each
        counts: Tensor,  # [B] how many of them, from the left, are the row's own
    ) -> None:
        """Take in a piece of the sequences, of which nothing is drafted."""

    @abstractmethod
    def first(
        self,
        memory: HeadCache,
        taps: Tensor,  # [B, T, nD] of what was accepted since the last time
        tokens: Tensor,  # [B, T] the token after each; the last of a row has not been read by the target
        counts: Tensor,  # [B] how many of them, from the left, are the row's own: at least 1
    ) -> Tensor:  # [B, 1, V]
        """Read what was accepted; gives the logits of the first token of a draft."""

    @abstractmethod
    def next(
        self,
        memory: HeadCache,
        tokens: Tensor,  # [B, f] the newest level
        parents: Tensor,  # [B, f] the place of each one's parent in the level before
    ) -> Tensor:  # [B, f, V]
        """Read a level of a draft; gives the logits of its children."""
