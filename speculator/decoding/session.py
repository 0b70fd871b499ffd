"""The cache of a batch of texts, kept between generations: a chat's next turn processes only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from speculator.decoding.cache import RowCache
from speculator.decoding.draft import take_at
from speculator.target import Target


class Session:
    """Give one to `generate` again and again, with the same number of rows: what a prompt has in common with the text
    before it, from its start, is not processed again.

    Args:
        target: the model whose cache it is.

    Attributes:
        processed: tokens that went through prefills so far.
    """

    cache: RowCache

    def __init__(self, target: Target):
        self.target = target
        self.texts: list[list[int]] = []
        self.processed = 0

    def prefill(self, texts: Sequence[Sequence[int]], room: int = 0) -> tuple[Tensor, Tensor]:  # [B, S, D], [B]
        """Process what is new in each text; gives its hidden states and how many of them, from the left, there are.

        Args:
            texts: token ids. Of each at least the last token is processed.
            room: slots to have behind the longest; a cache can also grow later.
        """
        device = self.target.device
        known = [0] * len(texts)
        if len(self.texts) == len(texts):
            pairs = zip(self.texts, texts, strict=True)
            known = [min(common_prefix(old, new), max(len(new) - 1, 0)) for old, new in pairs]
        new = [list(text[n:]) for text, n in zip(texts, known, strict=True)]
        width = max(map(len, new))
        capacity = max(max(map(len, texts)) + room, max(known) + width)
        if len(self.texts) == len(texts):
            self.cache.grow(capacity)
        else:
            self.cache = self.target.cache(len(texts), capacity)
        counts = torch.tensor([len(row) for row in new], device=device)
        self.cache.lengths = torch.tensor(known, device=device)
        self.cache.longest = max(known)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in new], dtype=torch.long, device=device)
        hidden = self.target.extend(self.cache, tokens) if width else tokens.new_empty(len(texts), 0, 0)
        self.cache.commit(counts, max(map(len, texts)))
        self.texts = [list(text) for text in texts]
        self.processed += sum(map(len, new))
        return hidden, counts

    def catch_up(self, texts: Sequence[Sequence[int]], again: int) -> Tensor:  # [B, D]
        """Process the last token of each text, and the `again` tokens before it once more, whatever is in their slots.

        Gives the last token's hidden state. The last token stays uncommitted: a draft's verify position 0.
        """
        device = self.target.device
        ends = [len(text) - 1 for text in texts]
        starts = [max(0, end - again) for end in ends]
        self.cache.grow(max(max(ends), max(starts) + again) + 1)
        window = [list(text[start : start + again + 1]) for text, start in zip(texts, starts, strict=True)]
        tokens = torch.tensor([row + [0] * (again + 1 - len(row)) for row in window], device=device)
        self.cache.lengths = torch.tensor(starts, device=device)
        self.cache.longest = max(starts)
        hidden = self.target.extend(self.cache, tokens)
        self.cache.lengths = torch.tensor(ends, device=device)
        self.cache.longest = max(ends)
        self.texts = [list(text[:-1]) for text in texts]
        return take_at(hidden, self.cache.lengths - torch.tensor(starts, device=device))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two texts share at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
