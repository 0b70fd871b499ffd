"""A preallocated key/value cache whose rows have lengths of their own, and the attention that reads it.

A row's slots below its length are committed; what lies above is dead and will be overwritten. So a verify pass
writes its tokens behind each row's length, and keeping n of them, or none, is one addition to `lengths`. The tokens of
a tree see their ancestors alone; the path that is kept moves to the front of them.

transformers' models are used unmodified: their layers write through `RowCache` and attend through `attention`,
registered under `ATTENTION`. The function finds the cache that is being written in a context variable, because
keyword arguments given to a model do not reach its attention in every family (GPT-2, OPT and StableLM drop them).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from speculator.decoding.draft import Draft

ATTENTION = "speculator"
Form = tuple[int, int, torch.dtype, torch.device]
"""Of one layer's keys, or of its values: heads, their size, and what they are kept as."""
BUCKETS = {"cuda": 256}
"""By kind of device: `RowCache.bucket`. Elsewhere 1, since dead slots cost time where nothing is captured."""
_writing: ContextVar[RowCache | None] = ContextVar("_writing", default=None)
_documents: ContextVar[Tensor | None] = ContextVar("_documents", default=None)
WINDOWS: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
"""Sliding windows of attention layers by their models' own masks, which not all families pass on to `attention`."""


@contextmanager
def packed(
    documents: Tensor | None,  # [B, S] the same number throughout a document, which is one piece; None: one document
) -> Iterator[Tensor | None]:  # [B, S]
    """Rows read without a cache are of several documents, and none sees another; gives positions, from 0 in each."""
    if documents is None:
        yield None
        return
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    token = _documents.set(documents)
    try:
        yield index - index.where(begins, 0).cummax(1).values
    finally:
        _documents.reset(token)


def forms(cache: Cache) -> list[tuple[Form, ...]]:
    """Of each layer's keys and of its values, in a cache that a model has filled; none where it reads another's."""
    layers: list[Any] = cache.layers
    return [() if layer.keys is None else (_form(layer.keys), _form(layer.values)) for layer in layers]


def _form(buffer: Tensor) -> Form:
    return buffer.shape[1], buffer.shape[3], buffer.dtype, buffer.device


class _RowLayer(CacheLayerMixin):
    """One layer's buffers [B, H, capacity, Dh], views of the cache's."""

    is_compileable = True
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: RowCache):
        super().__init__()
        self.is_initialized = True
        self._cache = weakref.ref(cache)  # a cycle would keep the buffers until the garbage collector comes

    @property
    def cache(self) -> RowCache:
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache is there from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, Dh] behind each row's length; return every slot that may be live."""
        cache, extent = self.cache, self.cache.extent
        keys, values = self.keys[:, :, :extent], self.values[:, :, :extent]
        if cache.lone:  # a plain copy
            keys[:, :, -cache.width :] = key_states  # casts, as under autocast
            values[:, :, -cache.width :] = value_states
        else:  # into the whole buffer: a finished row may be longer than those that go on
            self.keys[cache.rows, :, cache.slots] = key_states.transpose(1, 2).to(keys.dtype)
            self.values[cache.rows, :, cache.slots] = value_states.transpose(1, 2).to(values.dtype)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent, 0

    def get_seq_length(self) -> int:
        return self.cache.extent - self.cache.width

    def get_max_length(self) -> int:
        return self.cache.capacity


class RowCache(Cache):
    """The cache of one generation.

    Args:
        layers: the forms of each layer's keys and values, see `forms`.
        rows: B.
        capacity: slots per row: the longest row at its end, plus one verify pass.
        device: where the lengths live.

    Attributes:
        stacks: by form, the buffers [n, B, H, capacity, Dh] in one tensor, so that a path moves at once.
        lengths: [B] of the rows, updated in place.
        longest: at least the most of `lengths` over the rows in use, known to the host without asking the device. It
            decides how many slots are read.
        bucket: `reach` rounds `longest` up to a multiple of it. So shapes change once in so many tokens.
    """

    def __init__(self, layers: Sequence[tuple[Form, ...]], rows: int, capacity: int, device: torch.device):
        self.bucket = BUCKETS.get(device.type, 1)
        self.capacity = self._room(capacity)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0
        self.extent = self.width = 0
        self.rows = torch.arange(rows, device=device)[:, None]
        super().__init__(layers=[_RowLayer(self) for _ in layers])
        self._forms = layers
        counts = Counter(form for layer in layers for form in layer)
        stacks = {}
        for form, count in counts.items():
            heads, size, dtype, place = form
            stacks[form] = torch.zeros(count, rows, heads, self.capacity, size, dtype=dtype, device=place)
        self._share(stacks)

    def _share(self, stacks: dict[Form, Tensor]) -> None:
        """Let the layers have the stacks' parts."""
        self.stacks = stacks
        parts = {form: iter(stack) for form, stack in stacks.items()}
        for layer, both in zip(self.layers, self._forms, strict=True):
            assert isinstance(layer, _RowLayer)
            if both:
                layer.keys, layer.values = (next(parts[form]) for form in both)

    @property
    def exact(self) -> bool:
        """With a single row `longest` is its length; no slot that is read is dead."""
        return self.bucket == 1

    @property
    def lone(self) -> bool:
        """A single row, which ends where the host knows: slices will do."""
        return self.exact and self.rows.shape[0] == 1

    @property
    def buffers(self) -> list[Tensor]:
        """What lasts from one write to the next: updated in place until the cache grows."""
        return [self.lengths, *self.stacks.values()]

    def reach(self, length: int) -> None:
        """Let the host know how long the rows in use are at most; with a single row this must be exact."""
        self.longest = _up(length, self.bucket)

    def _room(self, capacity: int) -> int:
        """Slots for rows of `capacity`, however `longest` and `extent` are rounded."""
        return _up(capacity + self.bucket - 1, self.bucket)

    @contextmanager
    def writing(self, width: int, tree: Draft | None = None, base: int = 0) -> Iterator[Tensor]:
        """Let the model write `width` tokens a row; gives their positions [B, width].

        Without a `tree` each token follows the one before it; with one they are its verify positions from `base` on.
        The `base` positions before them have been written, and are not committed.

        Raises:
            ValueError: the tokens would not fit.
        """
        if self.longest + base + width > self.capacity:
            raise ValueError(f"{self.longest} + {base + width} tokens do not fit a cache of {self.capacity}")
        # Fused attention wants masks of aligned width.
        self.extent = self.longest + _up(base + width, min(self.bucket, 16))
        self.width, self.tree = width, tree
        self.block = self.lengths[:, None] + torch.arange(base + width, device=self.lengths.device)
        self.slots = self.positions = self.block[:, base:]
        if tree is not None:
            self.positions = self.lengths[:, None] + tree.depths[:, base : base + width]
        self._masks: dict[tuple[int, int | None, torch.dtype], Tensor] = {}
        token = _writing.set(self)
        try:
            yield self.positions
        finally:
            _writing.reset(token)
            self._masks.clear()

    def commit(self, counts: Tensor) -> None:  # [B]
        """Keep the first `counts` tokens of the last write in each row. The host owes `reach` before the next write."""
        self.lengths += counts

    def gather(self, path: Tensor) -> None:  # [B, n]
        """Put what the last write left at `path` to its front, in that order: the tokens of a tree that are kept."""
        source = self.lengths[:, None] + path
        for stack in self.stacks.values():
            if self.lone:
                stack[:, :, :, self.longest : self.longest + path.shape[1]] = stack.index_select(3, source[0])
            else:
                stack[:, self.rows, :, self.block[:, : path.shape[1]]] = stack[:, self.rows, :, source]

    def grow(self, capacity: int) -> bool:
        """Have at least `capacity` slots a row; half as many again as before, so that growing stays rare.

        Returns whether there were fewer: the buffers are others then, and for a moment both are held.
        """
        if self._room(capacity) <= self.capacity:
            return False
        capacity = self._room(max(capacity, self.capacity + self.capacity // 2))
        more = (0, 0, 0, capacity - self.capacity)
        self._share({form: nn.functional.pad(stack, more) for form, stack in self.stacks.items()})
        self.capacity = capacity
        return True

    def mask(
        self, groups: int, window: int | None, dtype: torch.dtype
    ) -> Tensor | None:  # [B, 1, groups * width, extent]
        """Who sees what in the write under way: a token sees the slots of what comes before it, and its own.

        0 is added to the score of what is seen, -inf to that of what is not. None where every token sees every slot.
        `groups` query heads share a key head and are laid end to end.
        """
        plain = self.lone and self.width == 1 and self.tree is None
        if plain and (window is None or self.extent <= window):
            return None
        if (groups, window, dtype) not in self._masks:
            slot = torch.arange(self.extent, device=self.lengths.device)
            if self.tree is None:
                seen = slot <= self.slots[:, :, None]
            else:
                count = self.block.shape[1]
                block = self.block.clamp(max=self.extent - 1)  # a finished row may be longer: what it sees is nothing
                seen = (slot < self.lengths[:, None, None]).repeat(1, self.width, 1)
                ancestors = self.tree.ancestors[:, count - self.width : count, :count]
                seen = seen.scatter(2, block[:, None].expand(-1, self.width, -1), ancestors)
            if window is not None:
                position = slot
                if self.tree is not None:
                    depths = self.lengths[:, None] + self.tree.depths[:, :count]
                    position = slot.repeat(self.rows.shape[0], 1).scatter(1, block, depths)[:, None]
                seen &= position > self.positions[:, :, None] - window
                seen |= ~seen.any(-1, keepdim=True)  # what a kernel gives a token that sees nothing may be no number
            self._masks[groups, window, dtype] = _bias(seen, dtype).repeat(1, groups, 1)[:, None]
        return self._masks[groups, window, dtype]


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What fused attention adds to the scores; made here it is made once for all layers."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def attention(
    module: nn.Module,
    query: Tensor,  # [B, Hq, T, Dh]
    key: Tensor,  # [B, H, M, Dh]
    value: Tensor,  # [B, H, M, Dh]
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention over the cache that is being written, or causal over each document of the tokens.

    Query heads that share a key head are stacked along T, so grouped keys and values are never repeated.
    """
    cache = _writing.get()
    sliding_window = WINDOWS.get(module, sliding_window)
    rows, query_heads, width, size = query.shape
    groups = query_heads // key.shape[1]
    if cache is None:
        slot = torch.arange(key.shape[2], device=query.device)
        own = slot[-width:, None]
        seen = slot <= own
        if sliding_window is not None:
            seen &= slot > own - sliding_window
        documents = _documents.get()
        if documents is not None:
            seen = (seen & (documents[:, :, None] == documents[:, None]))[:, None]
        mask: Tensor | None = torch.cat([_bias(seen, query.dtype)] * groups, dim=-2)
    else:
        mask = cache.mask(groups, sliding_window, query.dtype)
    stacked = query.reshape(rows, key.shape[1], groups * width, size)
    if softcap is None and s_aux is None:
        out = nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scaling)
    else:
        out = _explicit(stacked, key, value, mask, scaling or size**-0.5, softcap, s_aux, groups)
    return out.view(rows, query_heads, width, size).transpose(1, 2), None


def _explicit(
    query: Tensor,  # [B, H, groups * T, Dh]
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [Hq] a logit that every softmax of the head counts, without a value of its own
    groups: int,
) -> Tensor:
    """What the fused function can't do: scores squashed by tanh (Gemma 2), attention sinks (gpt-oss)."""
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    rows, heads, stacked, _ = scores.shape
    sink = sinks.view(1, heads, groups, 1).expand(rows, -1, -1, stacked // groups).reshape(rows, heads, stacked, 1)
    return torch.cat([scores, sink], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value


AttentionInterface.register(ATTENTION, attention)
