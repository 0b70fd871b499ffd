"""Drafting with a trained head."""

from __future__ import annotations

import torch
from torch import Tensor

from speculator.decoding.rules import Draft
from speculator.decoding.sampling import Sampling, draw
from speculator.errors import UserError
from speculator.heads import MLPSpeculator


def _last(hidden: Tensor, counts: Tensor) -> Tensor:  # [B, T, D], [B] -> [B, D]
    """The hidden state of the last of the first `counts` positions."""
    index = (counts - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, index)[:, 0]


class HeadDrafter:
    """A chain drafted by a head from the target's last hidden state.

    Args:
        head: the trained head.
        draft_length: G, at most the head's n_predict, which is the default.

    Raises:
        UserError: `draft_length` out of range.
    """

    name = "head"

    def __init__(self, head: MLPSpeculator, draft_length: int | None = None):
        self.head = head.eval()
        self.draft_length = head.n_predict if draft_length is None else draft_length
        if not 1 <= self.draft_length <= head.n_predict:
            raise UserError(f"draft length {self.draft_length} is not in 1..{head.n_predict}, what the head can draft")

    def start(self, tokens: Tensor, hidden: Tensor, lengths: Tensor) -> None:
        self._hidden = _last(hidden, lengths)

    @torch.no_grad()
    def propose(self, pending: Tensor, sampling: Sampling, u: Tensor) -> Draft:
        state, token = self.head.start(self._hidden.to(self.head.dtype)), pending
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for i in range(self.draft_length):
            state, logits = self.head.step(i, state, token)
            if sampling.greedy:
                token = logits.argmax(-1)
            else:
                laws.append(sampling.law(logits))
                token = draw(laws[-1], u[:, i])
            tokens.append(token)
        lengths = torch.full_like(pending, self.draft_length)
        return Draft(torch.stack(tokens, 1), lengths, torch.stack(laws, 1) if laws else None)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        # A row that keeps nothing is finished: any state will do.
        self._hidden = _last(hidden, counts.clamp_min(1))
