"""The drafting form of MTP layers: level by level, with the keys and values of each row's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import Self

from speculator.decoding.draft import gather_at
from speculator.decoding.drafter import Shape
from speculator.heads.attention.base import attend
from speculator.heads.attention.levels import LevelCache, LevelSource, with_own

if TYPE_CHECKING:
    from speculator.heads.mtp.model import MTPSpeculator


class MTPCache(LevelCache):
    """Keys and values of texts in every layer; see `LevelCache` for the draft after them.

    In a chain of layers (`is_chain`), layer i reads tokens up to i positions ahead, so its newest keys change when the
    text goes on. The cache therefore keeps what layer 0 reads, and all layers run again at the last positions.

    Attributes:
        text: [B, capacity, D] and [B, capacity]: the target's state at each position, and the token after it; None
            without a chain of layers, which has no `before` and `path` either.
        before: [B, 1, D] for each level l >= 1: the state that layer l reads at its first drafted position.
        path: at level l, for the paths to the f newest tokens: the states [B, f, l, D] of layer l at the last l text
            positions, and the tokens [B, f, l].
    """

    text: tuple[Tensor, Tensor] | None = None
    before: list[Tensor]
    path: tuple[Tensor, Tensor]

    def select(self, start: int, stop: int, longest: int) -> Self:
        part = super().select(start, stop, longest)
        part.text = self.text and tuple(x[start:stop] for x in self.text)  # type: ignore[assignment]
        return part

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        super().move(source, destination, longest)
        for x in self.text or ():
            x[list(destination), :longest] = x[list(source), :longest]

    def grow(self, capacity: int) -> None:
        if self.text:
            states, tokens = self.text
            more = max(0, capacity - tokens.shape[1])
            self.text = nn.functional.pad(states, (0, 0, 0, more)), nn.functional.pad(tokens, (0, more))
        super().grow(capacity)


class PassAttention:
    """Attention of one pass, an `Attend`: it writes its keys and values, and attends to those that a token sees.

    Args:
        cache: the rows' keys and values.
        layer: number of the layer.
        written: [B, T] positions of the cache that the pass writes.
        seen: returns a mask [B, T, M] of the cache's positions that each token sees, given the sliding window or None.
    """

    def __init__(self, cache: MTPCache, layer: int, written: Tensor, seen: Callable[[int | None], Tensor]):
        self.cache, self.layer, self.written, self.seen = cache, layer, written, seen

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        self.cache.write(self.layer, key, value, self.written)
        seen = self.seen(window)
        keys, values = (x[self.layer][:, :, : seen.shape[2]] for x in (self.cache.keys, self.cache.values))
        return attend(query, keys, values, seen, scaling)


class MTPForm:
    """Computes for one more token what `MTPSpeculator.unrolled` computes for all positions."""

    def __init__(self, head: MTPSpeculator):
        self.head = head

    def cache(self, rows: int, capacity: int) -> MTPCache:
        """Create an empty cache for `rows` sequences of at most `capacity` tokens, drafts included."""
        head, like = self.head, self.head.layers[0].eh_proj.weight
        key, value = head.shapes()
        cache = MTPCache(len(head.layers), rows, key[2], capacity, key[3], like, value[3])
        if head.is_chain:
            tokens = torch.zeros(rows, capacity, dtype=torch.long, device=like.device)
            cache.text = like.new_zeros(rows, capacity, head.config.emb_dim), tokens
        return cache

    @torch.no_grad()
    def read(
        self,
        cache: MTPCache,
        states: Tensor,  # [B, T, D] at the positions after those in the cache
        tokens: Tensor,  # [B, T] token after each
        counts: Tensor,  # [B] number of valid positions of each row, from the left
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Process text without drafting from it: write every layer's keys and values into the cache.

        Returns each layer's features and next states, [B, T', D] both (see `MTPSpeculator.run`), and [B] how many of
        the T' positions are valid. T' is T; a chain also rereads the last positions, one per layer but the first.
        """
        head, width = self.head, states.shape[1]
        begins = cache.lengths.clone()
        if head.is_chain:
            assert cache.text is not None
            # Read the last positions again: a layer there has read tokens that were not accepted, or none yet. Of three
            # layers that is 2: layer 2 at the last position reads two tokens beyond the pending one.
            again = len(head.layers) - 1
            row = torch.arange(len(tokens), device=tokens.device)[:, None]
            new = begins[:, None] + torch.arange(width, device=tokens.device)
            cache.text[0][row, new], cache.text[1][row, new] = states, tokens
            begins = (begins - again).clamp_min(0)
            width, counts = width + again, counts + cache.lengths - begins
        positions = begins[:, None] + torch.arange(width, device=tokens.device)
        columns = cache.columns(width)

        def seen(window: int | None) -> Tensor:
            near = columns <= positions[..., None]
            return near if window is None else near & (columns > positions[..., None] - window)

        made: list[tuple[Tensor, Tensor]] = []
        for i in range(len(head.layers)):
            if head.is_chain:
                # Layer i reads the state of the layer before at the same position, and the token i + 1 after it.
                states = cache.text[0][row, positions] if i == 0 else made[-1][1]  # type: ignore[index]
                tokens = cache.text[1][row, (positions + i).clamp_max(cache.text[1].shape[1] - 1)]  # type: ignore[index]
            embedded = head.embed(tokens)
            if head.config.zero_first and i == 0:
                embedded = embedded * (positions != 0)[..., None]
            made.append(head.run(i, embedded, states, positions, PassAttention(cache, i, positions, seen)))
        cache.lengths.copy_(begins + counts)
        cache.longest += width
        return made, counts

    @torch.no_grad()
    def first(self, cache: MTPCache, states: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:  # [B, 1, V]
        """Process accepted tokens; return the logits of a draft's first token. Arguments are those of `read`.

        The last valid token of each row is the pending one.
        """
        made, valid = self.read(cache, states, tokens, counts)
        cache.level = 0
        cache.seen = cache.lengths.new_zeros(len(states), 1, 0, dtype=torch.bool)
        # An idle row has count 0; its logits are not used.
        feature, cache.states = (gather_at(x, (valid - 1).clamp_min(0)[:, None]) for x in made[0])
        if self.head.is_chain:
            # With T positions of text, layer l is drafted at T - l first, and reads the state of layer l - 1 there.
            cache.before = [
                gather_at(state, (valid - level).clamp_min(0)[:, None]) for level, (_, state) in enumerate(made, 1)
            ]
            cache.path = cache.states[:, :, :0, None], tokens[:, :1, None][..., :0]
        return self.head.draft_logits(feature)

    @torch.no_grad()
    def next(
        self,
        cache: MTPCache,
        tokens: Tensor,  # [B, f] the newest level
        parents: Tensor,  # [B, f] index of each token's parent in the level before
    ) -> Tensor:  # [B, f, V]
        """Process a level of a draft: write its keys and values, and return the logits of its children."""
        if self.head.is_chain:
            return self._next_of_chain(cache, tokens, parents)
        attend = PassAttention(cache, 0, cache.begin_level(parents), cache.visible)
        state, position = gather_at(cache.states, parents), cache.rope_position.expand_as(tokens)
        feature, cache.states = self.head.run(0, self.head.embed(tokens), state, position, attend)
        return self.head.draft_logits(feature)

    def _next_of_chain(self, cache: MTPCache, tokens: Tensor, parents: Tensor) -> Tensor:  # [B, f] twice -> [B, f, V]
        """Do what `next` does, for a chain of layers: raise `cache.level` to l, and run layer l (counted from 0).

        For each of the f newest tokens, layer l runs at the last l text positions, on the path to that token.
        """
        cache.level += 1
        head, level, count = self.head, cache.level, tokens.shape[1]
        # Layer l reads the state of layer l - 1 at the same position. After a text of T positions and the path d1 d2,
        # layer 2 runs at T - 2, where it reads d1, and at T - 1, where it reads d2.
        states, before = (gather_at(x.flatten(2), parents) for x in cache.path)
        first = cache.before[level - 1].expand(-1, count, -1)
        states = torch.cat([first, states], -1).unflatten(2, (level, -1))  # [B, f, l, D]
        path = torch.cat([before, tokens[..., None]], -1)  # [B, f, l]
        own = torch.arange(count * level, device=tokens.device)
        positions = (cache.lengths[:, None] - level) + own % level  # the l last ones, once per token
        written = cache.lengths[:, None] + own  # each path has its own, so that siblings share none
        columns = cache.columns(count * level)
        # A path sees its own positions up to each; those before the text's beginning do not exist.
        same = (own[:, None] // level == own // level) & (own <= own[:, None])
        same = (same & (positions[:, None] >= 0)) | (own == own[:, None])

        def seen(window: int | None) -> Tensor:
            text = (columns < cache.lengths[:, None, None] - level).repeat(1, len(own), 1)
            if window is not None:
                text &= columns > positions[..., None] - window
            return with_own(text, written, same)

        attend = PassAttention(cache, level, written, seen)
        feature, states = head.run(level, head.embed(path.flatten(1)), states.flatten(1, 2), positions, attend)
        # [B, f * l, D] -> [B, f, l, D]: the states of each path, of which the last position gives the logits.
        cache.path = states.unflatten(1, (count, level)), path
        return head.draft_logits(feature.unflatten(1, (count, level))[:, :, -1])


class MTPSource(LevelSource):
    """Gives the draft logits of MTP layers; keeps each row's keys and values as `LevelSource` does.

    Position t of the cache reads x[t+1] here too.
    """

    cache: MTPCache

    def __init__(self, head: MTPSpeculator):
        super().__init__(head, MTPForm(head))

    def reserve(self, shape: Shape) -> None:
        self._reserve(shape.depth, shape.offered * (shape.depth if self.head.is_chain else 1))
