"""Drafting by lookup: what followed the last time that the text ended like this."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculator.draft import Draft
from speculator.drafters.base import Drafter, Texts
from speculator.drafters.topology import check_length
from speculator.sampling import RowSampling


class _Index:
    """Where each n-gram of a growing text last ended."""

    def __init__(self, text: Sequence[int], max_ngram: int):
        self.text, self.max_ngram = text, max_ngram
        self.ends: dict[tuple[int, ...], int] = {}
        self.known = 0

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens from behind the most recent earlier match of the longest suffix."""
        text = self.text
        for end in range(self.known + 1, len(text)):  # the text's own end is no match
            for size in range(1, min(self.max_ngram, end) + 1):
                self.ends[tuple(text[end - size : end])] = end
        self.known = len(text) - 1
        for size in range(min(self.max_ngram, len(text) - 1), 0, -1):
            match = self.ends.get(tuple(text[-size:]))
            if match is not None:
                return list(text[match : match + count])
        return []


class NgramDrafter(Drafter):
    """Prompt lookup: a deterministic draft, copied from behind the most recent match of the longest suffix.

    Args:
        draft_length: the most tokens to copy.
        max_ngram: the longest suffix to look for; shorter ones are tried in turn, down to one token.
    """

    name = "ngram"
    rules: tuple[str, ...] = ("walk", "block", "token", "typical-lossy")

    def __init__(self, draft_length: int = 4, max_ngram: int = 3):
        check_length(draft_length)
        self.draft_length = self.nodes = draft_length
        self.max_ngram = max_ngram
        self._indices: dict[int, _Index] = {}

    def propose(self, pending: Tensor, sampling: RowSampling, u: Tensor, texts: Texts) -> Draft:
        # An index holds its text, so no other text has that id.
        self._indices = {id(text): self._indices.get(id(text)) or _Index(text, self.max_ngram) for text in texts}
        found = [index.continuation(self.draft_length) for index in self._indices.values()]
        width = max(map(len, found))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.long)
        lengths = torch.tensor([len(row) for row in found])
        return Draft(tokens.view(len(found), width).to(pending.device), lengths.to(pending.device))
