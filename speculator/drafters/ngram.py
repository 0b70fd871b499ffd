"""Drafting by lookup: what followed the last time that the text ended like this."""

from __future__ import annotations

import torch
from torch import Tensor

from speculator.decoding.rules import Draft
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError


class NgramDrafter:
    """Prompt lookup: a deterministic draft, copied from behind the most recent match of the longest suffix.

    The text is kept on the host, so a step costs one more device-to-host copy than a head's.

    Args:
        draft_length: the most tokens to copy.
        max_ngram: the longest suffix to look for; shorter ones are tried in turn, down to one token.
    """

    name = "ngram"

    def __init__(self, draft_length: int = 4, max_ngram: int = 3):
        if draft_length < 1:
            raise UserError(f"draft length {draft_length} is not at least 1")
        self.draft_length = draft_length
        self.max_ngram = max_ngram

    def start(self, tokens: Tensor, hidden: Tensor, lengths: Tensor) -> None:
        self._texts = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]

    def propose(self, pending: Tensor, sampling: Sampling, u: Tensor) -> Draft:
        texts = zip(self._texts, pending.tolist(), strict=True)
        found = [self._continuation([*text, token]) for text, token in texts]
        width = max(map(len, found))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.long)
        lengths = torch.tensor([len(row) for row in found])
        return Draft(tokens.view(len(found), width).to(pending.device), lengths.to(pending.device))

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        for text, row, n in zip(self._texts, tokens.tolist(), counts.tolist(), strict=True):
            text += row[:n]

    def _continuation(self, text: list[int]) -> list[int]:
        for size in range(min(self.max_ngram, len(text) - 1), 0, -1):
            suffix = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == suffix:
                    return text[start + size : start + size + self.draft_length]
        return []
