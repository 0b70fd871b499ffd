"""The cache of a batch of texts, kept between generations: a chat's next turn processes only what is new."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculator.decoding import graphs
from speculator.decoding.cache import RowCache
from speculator.target import Target

if TYPE_CHECKING:
    from speculator.decoding.step import DeviceStep


class Session:
    """Give one to `generate` again and again, with the same number of rows: what a prompt has in common with the text
    before it, from its start, is not processed again.

    Args:
        target: the model whose cache it is.

    Attributes:
        processed: tokens that went through prefills so far.
        steps: captured steps over this cache, see `speculator.decoding.step.prepare`.
        pool: their memory.
    """

    cache: RowCache

    def __init__(self, target: Target):
        self.target = target
        self.texts: list[list[int]] = []
        self.processed = 0
        self.steps: dict[Hashable, DeviceStep] = {}
        self.pool = graphs.new_pool(target.device)

    def forget(self) -> None:
        """Begin the next texts anew, in the cache and with the captured steps that are there."""
        self.texts = [[] for _ in self.texts]

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
            if self.cache.grow(capacity):
                self.steps.clear()
        else:
            self.cache = self.target.cache(len(texts), capacity)
            self.steps.clear()
        counts = torch.tensor([len(row) for row in new], device=device)
        self.texts = [list(text[:n]) for text, n in zip(texts, known, strict=True)]  # if what follows is interrupted
        self.cache.lengths.copy_(torch.tensor(known))
        self.cache.reach(max(known))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in new], dtype=torch.long, device=device)
        hidden = self.target.extend(self.cache, tokens) if width else tokens.new_empty(len(texts), 0, 0)
        self.cache.commit(counts)
        self.cache.reach(max(map(len, texts)))
        self.texts = [list(text) for text in texts]
        self.processed += sum(map(len, new))
        return hidden, counts


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two texts share at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
