"""Base classes of the heads' `LogitsSource`s: what a head keeps of every row while it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculator.decoding.draft import gather_at, take_at
from speculator.decoding.drafter import LogitsSource, Sequences
from speculator.target.cache.kv_cache import KVCache

if TYPE_CHECKING:
    from typing_extensions import Self


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


class WholeTextSource(LogitsSource):
    """Drafts with the training form of an `UnrolledHead`, over the whole text of each row at every level.

    It is slow, and a new head needs nothing else to draft with. Tests compare a head's own source with this one.

    Attributes:
        hidden: [slots, capacity, nD] the states that the head reads, of every token that the target has read.
        lengths: [slots] number of these tokens.
    """

    capturable = False
    hidden: Tensor
    lengths: Tensor

    def __init__(self, head: Any):
        self.head = head

    def open(self, cache: KVCache) -> Self:
        opened, slots = super().open(cache), len(cache.lengths)
        width = max(1, len(self.head.aux_layers)) * self.head.config.emb_dim
        opened.hidden = torch.zeros(slots, cache.capacity, width, dtype=self.head.dtype, device=self.head.device)
        opened.lengths = torch.zeros(slots, dtype=torch.long)
        return opened

    def grow(self, capacity: int) -> None:
        self.hidden = torch.nn.functional.pad(self.hidden, (0, 0, 0, max(0, capacity - self.hidden.shape[1])))

    @property
    def buffers(self) -> Sequence[Tensor]:
        return [self.hidden, self.lengths]

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        for row, (begin, states, count) in enumerate(zip(begins, hidden, counts, strict=True), start=start):
            self.lengths[row] = begin
            self._append(row, states[:count])

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        for row, (states, count) in enumerate(zip(hidden, counts.tolist(), strict=True)):
            self._append(row, states[:count])

    def _append(self, row: int, states: Tensor) -> None:  # [T, nD]
        begin = int(self.lengths[row])
        self.hidden[row, begin : begin + len(states)] = states
        self.lengths[row] += len(states)

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        self._sequences = sequences
        self._paths = pending.new_zeros(len(pending), 1, 0)  # [B, f, level] the draft up to each token of the level
        return self._logits()

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        self._paths = torch.cat([gather_at(self._paths, parents), tokens[:, :, None]], -1)
        return self._logits()

    def _logits(self) -> Tensor:  # [B, f, V]
        rows = enumerate(zip(self._sequences, self._paths, strict=True))
        return torch.stack([self._logits_of(row, text, paths) for row, (text, paths) in rows])

    def _logits_of(self, row: int, text: Sequence[int], paths: Tensor) -> Tensor:  # [f, level] -> [f, V]
        """Return the logits of the token after each of f paths of a row, whose text ends with the pending token."""
        count, level = paths.shape
        # Position t reads h_t and x[t+1], the pending token at last: with x0 to x5 those are h0 to h4, and x1 to x5.
        # Step `level` of the last position reads the path too; later tokens are padding.
        following = torch.tensor(text[1:], device=paths.device).expand(count, -1)
        tokens = torch.cat([following, paths, paths.new_zeros(count, self.head.n_predict - 1 - level)], 1)
        states = self.hidden[row, : len(text) - 1].expand(count, -1, -1)
        return self.head.logits(states, tokens)[level, :, -1]
