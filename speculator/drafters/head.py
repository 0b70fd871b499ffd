"""Drafting with a trained head."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from speculator.decoding.draft import Draft, gather_at, take_at
from speculator.decoding.drafter import Drafter, LogitsSource, Sequences
from speculator.decoding.sampling import RowSampling
from speculator.drafters.shapes import Chain, Shape
from speculator.errors import UserError
from speculator.heads import Speculator
from speculator.heads.attention import AttentionHead
from speculator.heads.eagle3.drafting import AttentionSource
from speculator.heads.recurrent import RecurrentHead

Self = TypeVar("Self", bound="HeadDrafter")


class HeadDrafter(Drafter):
    """A head drafts from what it reads of the target: the last hidden state, or taps.

    Args:
        head: the trained head.
        shape: what it drafts; a number is a chain of so many tokens, None a chain of n_predict; what was tuned
            is ignored, see `tuned_drafter`. A head that attends may draft deeper than it was trained.

    Raises:
        UserError: the shape is deeper than the head, or offers more children than it has tokens to draft from.
    """

    name = "head"

    def __init__(self, head: Speculator, shape: Shape | int | None = None):
        self.head = head.eval()
        if shape is None or isinstance(shape, int):
            shape = Chain(head.n_predict if shape is None else shape)
        self.source: HeadSource
        if isinstance(head, AttentionHead):
            self.source = AttentionSource(head)
        else:
            self.source = StateSource(cast(RecurrentHead, head))
        self.aux_layers, self.overlap = head.aux_layers, self.source.overlap
        self.reshape(shape)

    def reshape(self, shape: Shape) -> None:
        recurrent, known = isinstance(self.head, RecurrentHead), self.head.n_predict
        if recurrent and shape.levels > known:
            raise UserError(f"draft length {shape.levels} is not in 1..{known}, what the head can draft")
        # Of more children some would be tokens that the head gives probability 0.
        if shape.width > self.head.config.output_size:
            raise UserError(
                f"{shape.width} children of a token: the head drafts from {self.head.config.output_size} tokens only"
            )
        super().reshape(shape)
        self.source.reshape(shape)

    def open(self: Self, slots: int, capacity: int) -> Self:
        opened = copy(self)
        opened.source = self.source.open(slots, capacity)
        return opened

    def grow(self, capacity: int) -> None:
        self.source.grow(capacity)

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        self.source.move(source, destination, longest)

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        self.source.prefill(start, sequences, begins, hidden, counts)

    def propose(self, pending: Tensor, sampling: RowSampling, u: Tensor, sequences: Sequences) -> Draft:
        return self.shape.draft(self.source, pending, sampling, u, sequences)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        self.source.commit(tokens, hidden, counts)

    @property
    def buffers(self) -> Sequence[Tensor]:
        return self.source.buffers

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.source.version


class HeadSource(LogitsSource, Protocol):
    """What a kind of head remembers of each row, and the logits that it makes of that.

    `open`, `grow`, `move`, `prefill`, `commit`, `reshape`, `buffers`, `overlap` and `version` are the drafter's own.
    """

    overlap: int
    version: int

    def open(self, slots: int, capacity: int) -> HeadSource: ...

    def grow(self, capacity: int) -> None: ...

    def reshape(self, shape: Shape) -> None: ...

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None: ...

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None: ...

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None: ...

    @property
    def buffers(self) -> Sequence[Tensor]: ...

    def skip(self, pending: Tensor, sequences: Sequences) -> None:
        """What `first` does to the memory, where this source drafts nothing."""
        ...


class StateSource:
    """What a recurrent head remembers of a text: the target's last hidden state."""

    overlap = version = 0
    _hidden: Tensor  # [slots, D]

    def __init__(self, head: RecurrentHead):
        self.head = head

    def open(self, slots: int, capacity: int) -> StateSource:
        opened = copy(self)
        opened._hidden = torch.zeros(slots, self.head.config.emb_dim, dtype=self.head.dtype, device=self.head.device)
        return opened

    def grow(self, capacity: int) -> None:
        pass

    def reshape(self, shape: Shape) -> None:
        pass

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        self._hidden[list(destination)] = self._hidden[list(source)]

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        last = torch.tensor(counts, device=hidden.device) - 1
        self._hidden[start : start + len(counts)] = take_at(hidden, last).to(self._hidden.dtype)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        # A row that is not decoding: any state will do.
        self._hidden[: len(counts)].copy_(take_at(hidden, counts.clamp_min(1) - 1))

    @property
    def buffers(self) -> Sequence[Tensor]:
        return [self._hidden]

    def skip(self, pending: Tensor, sequences: Sequences) -> None:
        pass

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        state = self.head.start(self._hidden[: len(pending)])[:, None]
        self._states, logits = self.head.step(0, state, pending[:, None])
        return logits

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        self._states, logits = self.head.step(level, gather_at(self._states, parents), tokens)
        return logits
