"""Drafting by lookup: what followed the last time that the text ended like this."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculator.decoding.cache import RowCache
from speculator.decoding.draft import Draft
from speculator.decoding.sampling import RowSampling
from speculator.drafters.base import Texts
from speculator.drafters.shapes import check_length


class _Index:
    """Where each n-gram of a growing text last ended."""

    def __init__(self, max_ngram: int):
        self.max_ngram = max_ngram
        self.ends: dict[tuple[int, ...], int] = {}
        self.known = 0

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens from behind the most recent earlier match of the longest suffix."""
        for end in range(self.known + 1, len(text)):  # the text's own end is no match
            for size in range(1, min(self.max_ngram, end) + 1):
                self.ends[tuple(text[end - size : end])] = end
        self.known = len(text) - 1
        for size in range(min(self.max_ngram, len(text) - 1), 0, -1):
            match = self.ends.get(tuple(text[-size:]))
            if match is not None:
                return list(text[match : match + count])
        return []


class NgramDrafter:
    """Prompt lookup: a deterministic draft, copied from behind the most recent match of the longest suffix.

    Args:
        draft_length: the most tokens to copy.
        max_ngram: the longest suffix to look for; shorter ones are tried in turn, down to one token.
    """

    name = "ngram"
    capturable = False
    buffers: Sequence[Tensor] = ()
    rules: tuple[str, ...] = ("walk", "token", "block", "typical-lossy")

    def __init__(self, draft_length: int = 4, max_ngram: int = 3):
        check_length(draft_length)
        self.draft_length = self.nodes = draft_length
        self.max_ngram = max_ngram

    def start(self, texts: Texts, hidden: Tensor, counts: Tensor, cache: RowCache) -> None:
        self._indices = [_Index(self.max_ngram) for _ in texts]

    def propose(self, pending: Tensor, sampling: RowSampling, u: Tensor, texts: Texts) -> Draft:
        found = [index.continuation(text, self.draft_length) for index, text in zip(self._indices, texts, strict=True)]
        width = max(map(len, found))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.long)
        lengths = torch.tensor([len(row) for row in found])
        return Draft(tokens.view(len(found), width).to(pending.device), lengths.to(pending.device))

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        """Nothing to learn: the text is read at the next draft."""
