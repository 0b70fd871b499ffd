"""Drafting with a trained head."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TypeVar

from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Drafter, Sequences, Shape
from speculator.decoding.sampling import Noise
from speculator.drafters.shapes import Chain
from speculator.errors import UserError
from speculator.heads import Speculator

Self = TypeVar("Self", bound="HeadDrafter")


class HeadDrafter(Drafter):
    """Drafts with a head, in any shape.

    Args:
        head: the trained head.
        shape: shape of the draft; a number is the length of a chain, None a chain of n_predict. Tuned settings are
            ignored: see `adaptive_drafter`.
    """

    name = "head"

    def __init__(self, head: Speculator, shape: Shape | int | None = None):
        self.head, self.trained_length = head.eval(), head.config.trained_length
        if shape is None or isinstance(shape, int):
            shape = Chain(head.n_predict if shape is None else shape)
        self.source = head.drafting_source()
        self.aux_layers, self.overlap = head.aux_layers, self.source.overlap
        self.reshape(shape)

    def reshape(self, shape: Shape) -> None:
        config = self.head.config
        deepest = config.max_speculative_tokens
        if deepest is not None and shape.levels > deepest:
            raise UserError(f"num_speculative_tokens {shape.levels} is not in 1..{deepest}, what the head can draft")
        # With more children, some would be tokens outside the draft vocabulary.
        if shape.width > config.output_size:
            raise UserError(f"{shape.width} children of a token: the head drafts from {config.output_size} tokens only")
        super().reshape(shape)
        self.source.reserve(shape.depth, shape.offered)

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

    def propose(self, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        return self.shape.draft(self.source, pending, noise, sequences)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        self.source.commit(tokens, hidden, counts)

    @property
    def buffers(self) -> Sequence[Tensor]:
        return self.source.buffers

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.source.version
