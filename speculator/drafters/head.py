"""Drafting with a trained head."""

from __future__ import annotations

from torch import Tensor

from speculator.decoding.cache import RowCache
from speculator.decoding.draft import Draft, put, take_at
from speculator.decoding.sampling import RowSampling
from speculator.drafters.base import Texts
from speculator.drafters.shapes import Chain, Shape
from speculator.errors import UserError
from speculator.heads import Speculator


class HeadDrafter:
    """A head drafts from the target's last hidden state.

    Args:
        head: the trained head.
        shape: what it drafts; a number is a chain of so many tokens, None a chain of n_predict, whatever was tuned
            (that is `tuned_drafter`).

    Raises:
        UserError: the shape is deeper than the head, or offers more children than it has tokens to draft from.
    """

    name = "head"

    def __init__(self, head: Speculator, shape: Shape | int | None = None):
        self.head = head.eval()
        if shape is None or isinstance(shape, int):
            shape = Chain(head.n_predict if shape is None else shape)
        self.shape, self.draft_length, self.nodes, self.rules = shape, shape.depth, shape.nodes, shape.rules
        self.capturable = shape.capturable
        if self.draft_length > head.n_predict:
            raise UserError(f"draft length {self.draft_length} is not in 1..{head.n_predict}, what the head can draft")
        # Children beyond them are all impossible alike, and a tree tells a parent from its child by their chances.
        branches = getattr(shape, "branches", (1,))
        if max(branches) > head.config.output_size:
            raise UserError(f"branches {branches}: the head drafts from {head.config.output_size} tokens only")
        self._hidden: Tensor | None = None

    @property
    def buffers(self) -> list[Tensor | None]:
        return [self._hidden]

    def start(self, texts: Texts, hidden: Tensor, counts: Tensor, cache: RowCache) -> None:
        self._hidden = put(take_at(hidden, counts - 1), self._hidden)

    def propose(self, pending: Tensor, sampling: RowSampling, u: Tensor, texts: Texts) -> Draft:
        return self.shape.draft(self, pending, sampling, u, texts)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        # A row that keeps nothing is finished: any state will do.
        assert self._hidden is not None
        self._hidden.copy_(take_at(hidden, counts.clamp_min(1) - 1))

    def first(self, pending: Tensor, texts: Texts) -> Tensor:
        assert self._hidden is not None
        state = self.head.start(self._hidden.to(self.head.dtype))[:, None]
        self._states, logits = self.head.step(0, state, pending[:, None])
        return logits

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        states = self._states.gather(1, parents[:, :, None].expand(-1, -1, self._states.shape[-1]))
        self._states, logits = self.head.step(level, states, tokens)
        return logits
