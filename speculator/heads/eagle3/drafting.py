"""The drafting form of EAGLE-3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculator.decoding.draft import gather_at
from speculator.heads.attention.base import attend
from speculator.heads.attention.levels import LevelCache

if TYPE_CHECKING:
    from speculator.heads.eagle3.model import Eagle3Speculator


class Eagle3Form:
    """Computes for one more token what `Eagle3Speculator.unrolled` computes for all positions."""

    def __init__(self, head: Eagle3Speculator):
        self.head = head

    def cache(self, rows: int, capacity: int) -> LevelCache:
        """Create an empty cache for `rows` sequences of at most `capacity` tokens, drafts included."""
        config = self.head.config
        size = config.num_key_value_heads, capacity, config.head_dim
        return LevelCache(len(self.head.layers), rows, *size, self.head.fc.weight)

    @torch.no_grad()
    def read(
        self,
        cache: LevelCache,
        aux_hidden: Tensor,  # [B, T, nD] at the positions after those in the cache
        tokens: Tensor,  # [B, T] token after each
        counts: Tensor,  # [B] number of valid positions of each row, from the left
    ) -> tuple[Tensor, Tensor]:  # [B, T, 2D], [B, T, D]
        """Append text to the cache without drafting from it; return the layer's input u and residual."""
        head, layer = self.head, self.head.layer
        positions = cache.lengths[:, None] + torch.arange(aux_hidden.shape[1], device=aux_hidden.device)
        u, residual = layer.enter(head.embed(tokens), head.fuse(aux_hidden))
        cache.write(0, *layer.self_attn.key_value(u, head.rope(positions, u.dtype)), positions)
        cache.lengths += counts
        cache.longest += aux_hidden.shape[1]
        return u, residual

    @torch.no_grad()
    def first(self, cache: LevelCache, aux_hidden: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:  # [B, 1, V]
        """Process accepted tokens; return the logits of a draft's first token. Arguments are those of `read`.

        The last valid token of each row is the pending one.
        """
        u, residual = self.read(cache, aux_hidden, tokens, counts)
        cache.level = 0
        cache.seen = cache.lengths.new_zeros(len(aux_hidden), 1, 0, dtype=torch.bool)
        last = (counts - 1).clamp_min(0)[:, None]  # an idle row has count 0; its logits are not used
        return self._level(cache, gather_at(u, last), gather_at(residual, last))

    @torch.no_grad()
    def next(
        self,
        cache: LevelCache,
        tokens: Tensor,  # [B, f] the newest level
        parents: Tensor,  # [B, f] index of each token's parent in the level before
    ) -> Tensor:  # [B, f, V]
        """Process a level of a draft: write its keys and values, and return the logits of its children."""
        head, layer = self.head, self.head.layer
        positions = cache.begin_level(parents)
        u, residual = layer.enter(head.embed(tokens), gather_at(cache.states, parents))
        cache.write(0, *layer.self_attn.key_value(u, head.rope(cache.rope_position, u.dtype)), positions)
        return self._level(cache, u, residual)

    def _level(self, cache: LevelCache, u: Tensor, residual: Tensor) -> Tensor:  # [B, f, 2D], [B, f, D] -> [B, f, V]
        head, layer = self.head, self.head.layer
        seen = cache.visible(head.config.sliding_window)
        # The head has one layer, 0. Positions beyond the mask's columns are free, or left from earlier drafts.
        keys, values = (x[0][:, :, : seen.shape[2]] for x in (cache.keys, cache.values))
        query = layer.self_attn.query(u, head.rope(cache.rope_position, u.dtype))
        attended = attend(query, keys, values, seen)
        feature, cache.states = head.finish(layer.leave(residual, attended))
        return head.to_full_vocabulary(head.lm_head(feature))
