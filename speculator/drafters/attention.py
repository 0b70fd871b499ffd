"""Drafting with an attention head, which keeps the keys and values of each text beside the target's."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from speculator.draft import Draft
from speculator.drafters.base import Drafter, Texts
from speculator.drafters.topology import Chain, Shape
from speculator.errors import UserError
from speculator.heads.eagle3 import Eagle3Speculator, Memory
from speculator.sampling import RowSampling


class AttentionDrafter(Drafter):
    """A head that attends drafts from the target's taps: it may draft deeper than it was trained.

    Row t of its memory reads x[t+1]. So what a step accepted is read when the next draft begins, with the token that
    the step sampled; and a text that goes on from a prefix has its last row made anew, with the token that is new.

    Args:
        head: the trained head.
        shape: what it drafts; a number is a chain of so many tokens, None a chain of n_predict.

    Raises:
        UserError: the shape offers more children than the head has tokens to draft from.
    """

    name = "head"
    overlap = 1
    memory: Memory
    # What was accepted and is not read yet: taps, the tokens after them but the last, and how many.
    _taps: Tensor  # [slots, G + 1, nD]
    _next: Tensor  # [slots, G + 1]
    _counts: Tensor  # [slots]

    def __init__(self, head: Eagle3Speculator, shape: Shape | int | None = None):
        self.head = head.eval()
        if shape is None or isinstance(shape, int):
            shape = Chain(head.n_predict if shape is None else shape)
        self.shape, self.draft_length, self.nodes, self.rules = shape, shape.depth, shape.nodes, shape.rules
        self.taps = tuple(head.config.taps)
        branches = getattr(shape, "branches", (1,))
        if max(branches) > head.config.output_size:
            raise UserError(f"branches {branches}: the head drafts from {head.config.output_size} tokens only")

    def _room(self, capacity: int) -> int:
        """Slots behind a text for a draft, and for what is read of a row that is not decoding."""
        return capacity + self.shape.offered + self.draft_length + 2

    def open(self, slots: int, capacity: int) -> AttentionDrafter:
        opened = copy(self)
        weight, width = self.head.fc.weight, self.draft_length + 1
        opened.memory = self.head.memory(slots, self._room(capacity))
        opened._taps = weight.new_zeros(slots, width, weight.shape[1])
        opened._next = torch.zeros(slots, width, dtype=torch.long, device=weight.device)
        opened._counts = torch.zeros(slots, dtype=torch.long, device=weight.device)
        return opened

    def grow(self, capacity: int) -> None:
        self.memory.grow(self._room(capacity))

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        self.memory.move(source, destination)
        for x in (self._taps, self._next, self._counts):
            x[list(destination)] = x[list(source)]

    def prefill(self, start: int, texts: Texts, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]) -> None:
        rows, device = slice(start, start + len(texts)), hidden.device
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        part = self.memory.select(rows.start, rows.stop, max(ends) + self.draft_length)
        # The text before may have ended with some that were not read.
        self.head.first(part, self._taps[rows], self._next[rows], (self._counts[rows] - 1).clamp_min(0))
        part.lengths.copy_(torch.tensor(begins))
        known = [list(text[begin + 1 : end + 1]) for text, begin, end in zip(texts, begins, ends, strict=True)]
        padded = [tokens + [0] * (hidden.shape[1] - len(tokens)) for tokens in known]
        taps, read = hidden.to(self._taps.dtype), torch.tensor([len(tokens) for tokens in known], device=device)
        self.head.first(part, taps, torch.tensor(padded, device=device), read)
        # Of a prompt's last token the next is not known yet.
        last = (torch.tensor(counts, device=device) - 1)[:, None, None].expand(-1, 1, taps.shape[2])
        self._taps[rows, :1] = taps.gather(1, last)
        self._counts[rows] = torch.tensor(counts, device=device) - read

    def propose(self, pending: Tensor, sampling: RowSampling, u: Tensor, texts: Texts) -> Draft:
        return self.shape.draft(self, pending, sampling, u, texts)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        rows, width = slice(0, len(counts)), tokens.shape[1]
        self._taps[rows, :width] = hidden.to(self._taps.dtype)
        self._next[rows, : width - 1] = tokens[:, 1:]
        self._counts[rows] = counts

    def first(self, pending: Tensor, texts: Texts) -> Tensor:
        rows = slice(0, len(pending))
        counts = self._counts[rows]
        self._part: Memory = self.memory.select(0, len(pending), max(map(len, texts)))
        tokens = self._next[rows].scatter(1, (counts - 1).clamp_min(0)[:, None], pending[:, None])
        logits = self.head.first(self._part, self._taps[rows], tokens, counts)
        counts.zero_()
        return logits

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.head.next(self._part, tokens, parents)
