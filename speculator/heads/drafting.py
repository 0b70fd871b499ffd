"""Interface between heads and drafters: next-token logits level by level, and the head's state of every row."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculator.decoding.draft import take_at
from speculator.decoding.drafter import LogitsSource, Sequences
from speculator.heads.cache import HeadCache

if TYPE_CHECKING:
    from typing_extensions import Self


class DraftingSource(LogitsSource):
    """Next-token logits of a head, and the head's memory of every row.

    `open`, `grow`, `move`, `prefill`, `commit`, `buffers`, `overlap` and `version` are those of `Drafter`. A head
    without memory that grows implements `first` and `next` of a `LastHiddenSource`.
    """

    overlap: int = 0
    version: int = 0

    def reserve(self, depth: int, offered: int) -> None:
        """Make room for drafts of up to this depth, chosen from up to `offered` drafted tokens."""

    def open(self, slots: int, capacity: int) -> Self:
        """Return a copy with empty memory for `slots` rows of `capacity` tokens."""
        raise NotImplementedError

    def grow(self, capacity: int) -> None:
        """Make room for rows of `capacity` tokens."""

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        """Copy row source[i], of at most `longest` tokens, to row destination[i]."""
        raise NotImplementedError

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        """Process a chunk of prompts, in neighbouring rows from `start` on."""
        raise NotImplementedError

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        """Update the rows with their accepted tokens."""
        raise NotImplementedError

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Tensors that persist between steps and are updated in place, without keys and values."""
        return ()

    def skip(self, pending: Tensor, sequences: Sequences) -> None:
        """Update the memory in a step in which this head drafts nothing."""

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:  # [B] -> [B, 1, V]
        raise NotImplementedError

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:  # [B, f] -> [B, f, V]
        raise NotImplementedError


class CachedSource(DraftingSource):
    """Base of sources with keys and values of every row's text.

    Attributes:
        cache: [slots] rows of `_capacity` tokens and `_spare` further positions, which a step may write.
    """

    cache: HeadCache
    _capacity: int
    _spare: int

    def grow(self, capacity: int) -> None:
        self.cache.grow(capacity + self._spare)
        self._capacity = capacity
        self.version += 1

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        self.cache.move(source, destination, longest)


class LastHiddenSource(DraftingSource):
    """Base of sources that keep the target's last hidden state of every row, and nothing else.

    Attributes:
        hidden: [slots, D] hidden state from which the target sampled each row's pending token.
    """

    hidden: Tensor

    def __init__(self, head: Any):
        self.head = head

    def open(self, slots: int, capacity: int) -> Self:
        opened = copy(self)
        opened.hidden = torch.zeros(slots, self.head.config.emb_dim, dtype=self.head.dtype, device=self.head.device)
        return opened

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        self.hidden[list(destination)] = self.hidden[list(source)]

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        # A chunk has padding after each row's `counts` tokens: with counts [3, 1] the states at 2 and 0.
        last = torch.tensor(counts, device=hidden.device) - 1
        self.hidden[start : start + len(counts)] = take_at(hidden, last).to(self.hidden.dtype)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        # An idle row has count 0; its state is never read.
        self.hidden[: len(counts)].copy_(take_at(hidden, counts.clamp_min(1) - 1))

    @property
    def buffers(self) -> Sequence[Tensor]:
        return [self.hidden]
