"""Drafting with an attention head, which keeps the keys and values of each text beside the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from speculator.decoding import cuda_graphs
from speculator.decoding.draft import take_at
from speculator.decoding.drafter import Sequences
from speculator.drafters.shapes import Shape
from speculator.heads.attention import AttentionHead, HeadCache
from speculator.target.kv_cache import bucketed

LATE = 8
"""Where steps are not captured: how many accepted positions of a row may stay unread while another source drafts, so
that one call reads them together."""


class AttentionSource:
    """What an attention head remembers of a text: its keys and values, made from the target's aux_hidden.

    Position t of its memory reads x[t+1]. So what a step accepted is read when the next draft begins, with the token
    that the step sampled; and a text that goes on from a prefix has its last position made anew, with the new token.
    """

    overlap, version = 1, 0
    memory: HeadCache
    _capacity: int
    # What was accepted and is not read yet: aux_hidden, the tokens after them but the last, and how many.
    _aux_hidden: Tensor  # [slots, W, nD]
    _next: Tensor  # [slots, W]
    _counts: Tensor  # [slots]

    def __init__(self, head: AttentionHead):
        self.head, self._widest, self._behind = head, 0, 0
        self._unread = 0
        """The most positions that a decoding row has not read, as far as the host knows."""
        self._late = 0
        """How many may stay so: `LATE` or none."""

    def reshape(self, shape: Shape) -> None:
        """Have room for drafts of this shape, beside those before."""
        # Behind a text: the draft, and what is read of a row that is not decoding.
        behind = max(self._behind, shape.offered + shape.depth + 2 + LATE)
        more = max(0, shape.depth + 1 - self._widest)
        if behind == self._behind and not more:
            return
        self._behind, self._widest = behind, self._widest + more
        if hasattr(self, "memory"):
            self.grow(self._capacity)
            self._aux_hidden = nn.functional.pad(self._aux_hidden, (0, 0, 0, more))
            self._next = nn.functional.pad(self._next, (0, more))

    def open(self, slots: int, capacity: int) -> AttentionSource:
        opened = copy(self)
        device, size = self.head.device, len(self.head.aux_layers) * self.head.config.emb_dim
        opened._late = 0 if device.type in cuda_graphs.DEVICES else LATE  # captured steps are of one width
        width = self._widest + opened._late
        opened.memory, opened._capacity = self.head.memory(slots, capacity + self._behind), capacity
        opened._aux_hidden = torch.zeros(slots, width, size, dtype=self.head.dtype, device=device)
        opened._next = torch.zeros(slots, width, dtype=torch.long, device=device)
        opened._counts = torch.zeros(slots, dtype=torch.long, device=device)
        return opened

    def grow(self, capacity: int) -> None:
        self._capacity = capacity
        self.memory.grow(capacity + self._behind)
        self.version += 1

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        self.memory.move(source, destination, longest)
        for x in (self._aux_hidden, self._next, self._counts):
            x[list(destination)] = x[list(source)]

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        rows, device = slice(start, start + len(sequences)), hidden.device
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        part = self.memory.select(rows.start, rows.stop, max(ends) + self._aux_hidden.shape[1] - 1)
        if any(begins):  # a prefix of the text before stays, whose last step may not have been read
            self.head.read(part, self._aux_hidden[rows], self._next[rows], (self._counts[rows] - 1).clamp_min(0))
        part.lengths.copy_(torch.tensor(begins))
        known = [list(text[begin + 1 : end + 1]) for text, begin, end in zip(sequences, begins, ends, strict=True)]
        padded = [tokens + [0] * (hidden.shape[1] - len(tokens)) for tokens in known]
        aux_hidden, read = (
            hidden.to(self._aux_hidden.dtype),
            torch.tensor([len(tokens) for tokens in known], device=device),
        )
        self.head.read(part, aux_hidden, torch.tensor(padded, device=device), read)
        # Of a prompt's last token the next is not known yet.
        ended = torch.tensor(counts, device=device)
        self._aux_hidden[rows, 0] = take_at(aux_hidden, ended - 1)
        self._counts[rows] = ended - read
        self._unread = max(self._unread, 1)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        rows, width = slice(0, len(counts)), tokens.shape[1]
        if self._late and self._unread:
            places = self._counts[rows, None] + torch.arange(width, device=tokens.device)
            self._aux_hidden[rows].scatter_(1, places[:, :, None].expand_as(hidden), hidden.to(self._aux_hidden.dtype))
            self._next[rows].scatter_(1, places[:, : width - 1], tokens[:, 1:])
        else:
            self._aux_hidden[rows, :width] = hidden.to(self._aux_hidden.dtype)
            self._next[rows, : width - 1] = tokens[:, 1:]
        self._counts[rows] += counts
        self._unread += width

    @property
    def buffers(self) -> Sequence[Tensor]:
        return [self._aux_hidden, self._next, self._counts, self.memory.lengths]

    def skip(self, pending: Tensor, sequences: Sequences) -> None:
        """What `first` does to the memory, where this source drafts nothing; later, if there is room until then."""
        if self._late and self._unread + self._widest <= self._aux_hidden.shape[1]:
            self._complete(pending)
        else:
            self._read(self.head.read, pending, sequences)

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        return self._read(self.head.first, pending, sequences)

    def _read(self, read: Callable[..., Any], pending: Tensor, sequences: Sequences) -> Any:
        rows, width = slice(0, len(pending)), self._unread if self._late else self._widest
        counts = self._counts[rows]
        longest = bucketed(max(map(len, sequences)) - 1, pending.device) + 1  # as of the target's cache
        self._part: HeadCache = self.memory.select(0, len(pending), longest)
        self._complete(pending)
        given = read(self._part, self._aux_hidden[rows, :width], self._next[rows, :width], counts)
        counts.zero_()
        self._unread = 0
        return given

    def _complete(self, pending: Tensor) -> None:
        """Of each row's last position the token after it is known now."""
        rows = slice(0, len(pending))
        self._next[rows].scatter_(1, (self._counts[rows] - 1).clamp_min(0)[:, None], pending[:, None])

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.head.next(self._part, tokens, parents)
