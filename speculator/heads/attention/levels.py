"""Drafting level by level with the keys and values of each row's text, which EAGLE-3 and MTP share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speculator.decoding.draft import gather_at, take_at
from speculator.decoding.drafter import Sequences, Shape
from speculator.heads.attention.cache import HeadCache
from speculator.heads.attention.cached_source import CachedSource
from speculator.kernels import cuda_graphs
from speculator.target.cache.kv_cache import KVCache, aligned, bucketed

MAX_UNREAD = 8
"""Accepted positions of a row that may stay unread while another source drafts, so that one call reads them together.
It is 0 where steps are captured, whose shapes are fixed. Reading in every step takes 4% longer or more (four rows)."""


class LevelCache(HeadCache):
    """Keys and values of texts and of the drafts after them, and the newest level of each draft.

    Attributes:
        states: [B, f, D] states of the newest level's tokens, which their children read in place of the target's.
        seen: [B, f, n] bool: which of the draft's n tokens each token of the newest level attends to.
        level: depth of the newest level; 0 after `first`.
    """

    states: Tensor
    seen: Tensor
    level: int = 0

    @property
    def rope_position(self) -> Tensor:  # [B, 1]
        """Rope position of the newest level; the last text position is level 0. Cousins share it."""
        return (self.lengths - 1 + self.level)[:, None]

    def begin_level(self, parents: Tensor) -> Tensor:  # [B, f] -> [B, f]
        """Start the next level, given each token's parent in the level before; return the tokens' cache positions."""
        count, drafted = parents.shape[1], self.seen.shape[2]
        own = torch.eye(count, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
        # A token sees what its parent sees among the drafted ones, and itself: [B, f, drafted so far + f]. With the
        # parents [0, 0, 1] of a level of 3 after one of 2, which saw [1 0] and [0 1]: 10 100, 10 010 and 01 001.
        self.seen = torch.cat([gather_at(self.seen, parents), own], -1)
        self.level += 1
        return self.lengths[:, None] + drafted + torch.arange(count, device=parents.device)

    def columns(self, more: int) -> Tensor:  # [M]
        """Return the cache positions 0, 1, ... that a pass reads, if it writes `more` tokens after the text."""
        extent = min(aligned(self.longest + more, self.lengths.device), self.keys.shape[3])
        return torch.arange(extent, device=self.lengths.device)

    def visible(self, window: int | None) -> Tensor:  # [B, f, M]
        """Return a mask of positions that each newest token attends to: of the text the last `window` (None: all)."""
        drafted = self.seen.shape[2]
        columns = self.columns(drafted)
        # The text is at 0 .. length - 1, and the draft's tokens follow it in the order in which they were drafted.
        text = columns < self.lengths[:, None]
        if window is not None:
            text &= columns > self.rope_position - window
            text |= ~text.any(-1, keepdim=True)  # an idle row of a captured step: kernels may return NaN for no key
        mask = text[:, None].repeat(1, self.seen.shape[1], 1)
        # An idle row of a captured step may be longer than `longest`.
        positions = (self.lengths[:, None] + torch.arange(drafted, device=columns.device)).clamp_max(len(columns) - 1)
        return mask.scatter(2, positions[:, None].expand_as(self.seen), self.seen)


class LevelSource(CachedSource):
    """Drafts level by level. Keeps each row's keys and values, and the accepted positions that it has not read yet.

    Cache position t reads the target's states at t and the token x[t+1]. The last position that a step accepts needs
    the token which that step samples, so the accepted positions are read when the next draft begins. If a request
    reuses a prefix, the prefix's last position is read again, with the new request's next token.

    Args:
        head: the head.
        form: computes the head token by token: `Eagle3Form` or `MTPForm`.
    """

    overlap = 1
    cache: LevelCache
    # Accepted positions that are not read yet.
    _aux_hidden: Tensor  # [slots, W, nD]
    _next: Tensor  # [slots, W] token after each position; the last one is filled in from the pending tokens
    _counts: Tensor  # [slots]

    def __init__(self, head: Any, form: Any):
        self.head, self.form = head, form
        self._width = self._spare = 0
        self._max_unread = 0
        self._unread = 0  # upper bound of `_counts`, known to the host

    def reserve(self, shape: Shape) -> None:
        # A row holds its text, the draft, and the positions that are read for an idle row: `_read` writes all of its
        # columns in every row, valid or not.
        spare = max(self._spare, shape.offered + shape.depth + 2 + MAX_UNREAD)
        more = max(0, shape.depth + 1 - self._width)
        if spare == self._spare and not more:
            return
        self._spare, self._width = spare, self._width + more
        if hasattr(self, "cache"):
            self.grow(self._capacity)
            self._aux_hidden = nn.functional.pad(self._aux_hidden, (0, 0, 0, more))
            self._next = nn.functional.pad(self._next, (0, more))

    def open(self, cache: KVCache) -> LevelSource:
        opened, slots, capacity = super().open(cache), len(cache.lengths), cache.capacity
        device, size = self.head.device, max(1, len(self.head.aux_layers)) * self.head.config.emb_dim
        opened._max_unread = 0 if device.type in cuda_graphs.DEVICES else MAX_UNREAD
        width = self._width + opened._max_unread
        opened.cache, opened._capacity = self.form.cache(slots, capacity + self._spare), capacity
        opened._aux_hidden = torch.zeros(slots, width, size, dtype=self.head.dtype, device=device)
        opened._next = torch.zeros(slots, width, dtype=torch.long, device=device)
        opened._counts = torch.zeros(slots, dtype=torch.long, device=device)
        return opened

    def read_prompts(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        rows, device = slice(start, start + len(sequences)), hidden.device
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        part = self.cache.select(rows.start, rows.stop, max(ends) + self._aux_hidden.shape[1] - 1)
        if any(begins):  # the last step of a reused prefix may not have been read
            first = [text[begin] for text, begin in zip(sequences, begins, strict=True)]
            self._fill_in(torch.tensor(first, device=device), start)
            self.form.read(part, self._aux_hidden[rows], self._next[rows], self._counts[rows])
        part.lengths.copy_(torch.tensor(begins))
        # Position t reads x[t+1]. Of a prompt that ends in this chunk the last position has no next token yet: it waits
        # in `_aux_hidden` until the target has sampled it.
        following = [list(text[begin + 1 : end + 1]) for text, begin, end in zip(sequences, begins, ends, strict=True)]
        padded = torch.tensor([tokens + [0] * (hidden.shape[1] - len(tokens)) for tokens in following], device=device)
        aux_hidden = hidden.to(self._aux_hidden.dtype)
        read = torch.tensor([len(tokens) for tokens in following], device=device)
        self.form.read(part, aux_hidden, padded, read)
        # The token after the prompt's last one is not known yet.
        ended = torch.tensor(counts, device=device)
        self._aux_hidden[rows, 0] = take_at(aux_hidden, ended - 1)
        self._counts[rows] = ended - read
        self._unread = max(self._unread, 1)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        rows, width = slice(0, len(counts)), tokens.shape[1]
        hidden = hidden.to(self._aux_hidden.dtype)
        if self._max_unread and self._unread:  # append
            # After what earlier steps have left unread: with counts [2, 0] row 0 gets this step's at 2, 3, ..
            columns = self._counts[rows, None] + torch.arange(width, device=tokens.device)
            row = torch.arange(len(counts), device=tokens.device)[:, None]
            self._aux_hidden[row, columns] = hidden  # `scatter_` takes 30 times as long
            self._next[row, columns[:, : width - 1]] = tokens[:, 1:]
        else:
            # Position t reads x[t+1]: h5 h6 h7 read x6, x7 and what this step sampled, which `_fill_in` will write.
            self._aux_hidden[rows, :width] = hidden
            self._next[rows, : width - 1] = tokens[:, 1:]
        self._counts[rows] += counts
        self._unread += width

    @property
    def buffers(self) -> Sequence[Tensor]:
        return [*super().buffers, self._aux_hidden, self._next, self._counts]

    def skip(self, pending: Tensor, sequences: Sequences) -> None:
        if self._max_unread and self._unread + self._width <= self._aux_hidden.shape[1]:
            self._fill_in(pending)
        else:
            self._read(self.form.read, pending, sequences)

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        return self._read(self.form.first, pending, sequences)

    def _read(self, read: Callable[..., Any], pending: Tensor, sequences: Sequences) -> Any:
        """Process all unread positions by `read`, the form's `read` or `first`, and return its result."""
        rows, width = slice(0, len(pending)), self._unread if self._max_unread else self._width
        counts = self._counts[rows]
        longest = bucketed(max(map(len, sequences)) - 1, pending.device) + 1  # as the target's cache has it
        self._part: LevelCache = self.cache.select(0, len(pending), longest)
        self._fill_in(pending)
        result = read(self._part, self._aux_hidden[rows, :width], self._next[rows, :width], counts)
        # A view of `_counts`, set to 0 in place: nothing is unread now.
        counts.zero_()
        self._unread = 0
        return result

    def _fill_in(self, following: Tensor, start: int = 0) -> None:
        """Set the token after the last unread position of each row from `start` on, [R]."""
        # With 3 unread positions the last is column 2. A row without any gets it in column 0, which its count excludes.
        rows = slice(start, start + len(following))
        self._next[rows].scatter_(1, (self._counts[rows] - 1).clamp_min(0)[:, None], following[:, None])

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.form.next(self._part, tokens, parents)
