"""Base classes of the heads' `LogitsSource`s: what a head keeps of every row while it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculator.decoding import cuda_graphs
from speculator.decoding.draft import take_at
from speculator.decoding.drafter import LogitsSource
from speculator.decoding.memory import Sequences
from speculator.heads.cache import HeadCache
from speculator.target.kv_cache import KVCache

if TYPE_CHECKING:
    from typing_extensions import Self


_SHORT = 64
"""Tokens of a row below which a CPU reads weights for longer than it computes."""


class CachedSource(LogitsSource):
    """Base of sources that keep the keys and values of every row's text.

    Attributes:
        cache: one row per slot, of `_capacity` tokens and `_spare` further positions that a step may write.
    """

    cache: HeadCache
    _capacity: int
    _spare: int

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        """See `Memory`. On a CPU long rows are read one by one, without padding; short ones share the weights."""
        if max(counts) < _SHORT or hidden.device.type in cuda_graphs.DEVICES:
            self.read_prompts(start, sequences, begins, hidden, counts)
            return
        for i, count in enumerate(counts):
            self.read_prompts(start + i, sequences[i : i + 1], begins[i : i + 1], hidden[i : i + 1, :count], [count])

    def read_prompts(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        """Process a chunk of prompts in one pass, padded to the longest. Arguments as those of `Memory.prefill`."""
        raise NotImplementedError

    def grow(self, capacity: int) -> None:
        self.cache.grow(capacity + self._spare)
        self._capacity = capacity
        # The buffers are new tensors, and a CUDA graph still reads the old ones.
        self.version += 1

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        self.cache.move(source, destination, longest)


class LastHiddenSource(LogitsSource):
    """Base of sources that keep the target's last hidden state of every row, and nothing else.

    Attributes:
        hidden: [slots, D] hidden state from which the target sampled each row's pending token.
    """

    hidden: Tensor

    def __init__(self, head: Any):
        self.head = head

    def open(self, cache: KVCache) -> Self:
        opened, size = super().open(cache), (len(cache.lengths), self.head.config.emb_dim)
        opened.hidden = torch.zeros(size, dtype=self.head.dtype, device=self.head.device)
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
