"""Base of the sources of heads that attend to a row's text."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from speculator.decoding.drafter import LogitsSource, Sequences
from speculator.heads.attention.cache import HeadCache
from speculator.kernels import cuda_graphs

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

    def erase(self, row: int) -> None:
        super().erase(row)
        self.cache.keys[:, row] = self.cache.values[:, row] = 0

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        super().move(source, destination, longest)
        self.cache.move(source, destination, longest)

    @property
    def buffers(self) -> Sequence[Tensor]:
        return [self.cache.lengths]
