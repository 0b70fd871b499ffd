"""The drafting form of block drafters: one pass over a block, then what the token before changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculator.decoding.drafter import Shape
from speculator.decoding.memory import Sequences
from speculator.heads.attention.base import attend
from speculator.heads.attention.cache import HeadCache
from speculator.heads.attention.cached_source import CachedSource
from speculator.target.cache.kv_cache import KVCache, aligned, bucketed

if TYPE_CHECKING:
    from speculator.heads.dspark.model import DSparkSpeculator


class DSparkSource(CachedSource):
    """Drafts with a block drafter; keeps each layer's keys and values of every row's text.

    Those of a block come after the text's, and the next write replaces them.
    """

    def __init__(self, head: DSparkSpeculator):
        self.head = head
        self.independent = head.markov_head is None and head.candidate_selector is None
        self._levels = 0  # deepest draft so far
        self._spare = head.config.block_size  # positions that a step may write after a row's text

    def reserve(self, shape: Shape) -> None:
        self._levels = max(self._levels, min(shape.depth, self.head.n_predict))
        # A step writes the pending token and its accepted path, which n-gram lookup may make longer than a block.
        if shape.depth + 1 > self._spare:
            self._spare = shape.depth + 1
            if hasattr(self, "cache"):
                self.grow(self._capacity)

    def open(self, cache: KVCache) -> DSparkSource:
        opened, config = super().open(cache), self.head.config
        size = config.num_key_value_heads, cache.capacity + self._spare, config.head_dim
        opened.cache = HeadCache(config.num_hidden_layers, len(cache.lengths), *size, self.head.fc.weight)
        opened._capacity = cache.capacity
        return opened

    @torch.no_grad()
    def _read(self, cache: HeadCache, hidden: Tensor, counts: Tensor) -> None:  # [B, T, nD], [B]
        """Append text with these auxiliary hidden states to the cache: the first `counts` positions of each row."""
        positions = cache.lengths[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
        context = self.head.context(hidden.to(self.head.dtype))
        for index, (keys, values) in enumerate(self.head.key_values(context, positions)):
            cache.write(index, keys, values, positions)
        cache.lengths += counts

    def read_prompts(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        part = self.cache.select(start, start + len(counts), 0)
        part.lengths.copy_(torch.tensor(begins))
        self._read(part, hidden, torch.tensor(counts, device=hidden.device))

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        self._read(self.cache.select(0, len(counts), 0), hidden, counts)

    @property
    def buffers(self) -> Sequence[Tensor]:
        return [self.cache.lengths]

    @torch.no_grad()
    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        head, size = self.head, self.head.config.block_size
        longest = bucketed(max(map(len, sequences)) - 1, pending.device) + 1  # as the target's cache has it
        cache = self.cache.select(0, len(pending), longest)
        extent = min(aligned(longest + size, pending.device), cache.keys.shape[3])
        slots = torch.arange(size, device=pending.device)
        # Slot j of the block is at position length + j: after 7 tokens of text, the pending token is at 7.
        positions = cache.lengths[:, None] + slots  # [B, size]
        last = slots if head.config.is_causal else slots.new_full((size,), size - 1)
        # All slots see the text and the whole block, or with causal blocks the slots up to their own. What lies beyond
        # is left from an earlier block.
        seen = torch.arange(extent, device=pending.device) <= (cache.lengths[:, None] + last)[..., None]
        if head.config.sliding_window is not None:
            seen &= torch.arange(extent, device=pending.device) > positions[..., None] - head.config.sliding_window
        rope = head.rope(positions, head.dtype)
        h = head.block(pending)
        for index, layer in enumerate(head.layers):

            def attended(query: Tensor, keys: Tensor, values: Tensor, index: int = index) -> Tensor:
                cache.write(index, keys, values, positions)
                return attend(query, cache.keys[index][:, :, :extent], cache.values[index][:, :, :extent], seen)

            h = layer(h, rope, attended)
        # All levels at once; `next` only adds what the token before changes.
        self._slots = head.drafting_slots(h)[:, : self._levels]  # [B, levels, D]
        self._logits = head.output_logits(self._slots)  # [B, levels, V_d]
        return self._after(0, pending[:, None])

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._after(level, tokens)

    @torch.no_grad()
    def _after(self, level: int, tokens: Tensor) -> Tensor:  # [B, f] -> [B, f, V]
        """Return the logits of the token after each of `tokens`, at depth `level` + 1 of the draft."""
        # Slots don't depend on drafted tokens, so all tokens of a level share one slot: [B, 1, D] and [B, 1, V_d].
        slot = slice(level, level + 1)
        logits = self.head.conditioned(self._slots[:, slot], self._logits[:, slot], tokens)
        return logits.expand(-1, tokens.shape[1], -1)
