"""The KV cache: storage for a fixed number of rows, each with a length of its own, allocated once.

A row's positions below its length are committed; what lies above is dead and will be overwritten. So a verify pass
writes its tokens behind each row's length, and to keep n of them, or none, is one addition to `lengths`; the accepted
path of a tree moves to the front first. Who sees what is not decided here but in `speculator.target.attention`.

transformers' models are used unmodified: their layers write through `KVCache`. A pass runs over neighbouring rows,
those that `select` names. What is being written is found in a context variable (`current`), because keyword arguments
given to a model do not reach its attention in every family (GPT-2, OPT and StableLM drop them).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from speculator.target.tree import TokenTree

Form = tuple[int, int, torch.dtype, torch.device]
"""Of one layer's keys, or of its values: heads, their size, and what they are kept as."""
BUCKETS = {"cuda": 256}
"""By kind of device: `KVCache.bucket`. Elsewhere 1, since dead positions cost time where nothing is captured."""


def forms(cache: Cache) -> list[tuple[Form, ...]]:
    """(keys, values) of each layer in a cache that a model has filled; () of a layer that shares another's."""
    layers: list[Any] = cache.layers
    return [() if layer.keys is None else (_form(layer.keys), _form(layer.values)) for layer in layers]


def _form(buffer: Tensor) -> Form:
    return buffer.shape[1], buffer.shape[3], buffer.dtype, buffer.device


@dataclass
class Write:
    """The tokens of one pass, R rows of `width`, on their way into the cache.

    Attributes:
        lengths: [R] tokens that were committed before them.
        width: tokens of each row.
        extent: how many positions of each row are read.
        block: [R, base + width] where they lie, behind the `base` positions that earlier passes wrote uncommitted.
        slots: [R, width] where this pass writes: the last of `block`.
        positions: [R, width] in the text.
        tree: their parents; None where each token follows the one before it.
        lone: a single row, which ends where the host knows: slices will do, and no position that is read is dead.
        masks: whoever attends keeps them here for the other layers.
    """

    lengths: Tensor
    width: int
    extent: int
    block: Tensor
    slots: Tensor
    positions: Tensor
    tree: TokenTree | None
    lone: bool
    masks: dict[Any, Tensor] = field(default_factory=dict)


_current: ContextVar[Write | None] = ContextVar("_current", default=None)


def current() -> Write | None:
    """The write that is under way, if a cache is being written."""
    return _current.get()


class _Layer(CacheLayerMixin):
    """One layer's buffers [B, H, capacity, Dh], views of the cache's, and of these the selected rows."""

    is_compileable = True
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: KVCache):
        super().__init__()
        self.is_initialized = True
        self._cache = weakref.ref(cache)  # a cycle would keep the buffers until the garbage collector comes

    @property
    def cache(self) -> KVCache:
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache is there from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write [R, H, T, Dh] behind each row's length; return every position that may be live."""
        cache, write = self.cache, _current.get()
        assert write is not None
        keys, values = self.selected[0][:, :, : write.extent], self.selected[1][:, :, : write.extent]
        if write.lone:  # a plain copy
            keys[:, :, -write.width :] = key_states  # casts, as under autocast
            values[:, :, -write.width :] = value_states
        else:  # into the whole buffer: a row that is not decoding may be longer than those that are
            rows, slots = cache.index.to(keys.device), write.slots.to(keys.device)  # a layer may be elsewhere
            self.selected[0][rows, :, slots] = key_states.transpose(1, 2).to(keys.dtype)
            self.selected[1][rows, :, slots] = value_states.transpose(1, 2).to(values.dtype)
        return keys, values

    def select(self, start: int, stop: int) -> None:
        if hasattr(self, "keys") and self.keys is not None:
            self.selected = self.keys[start:stop], self.values[start:stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        write = _current.get()
        assert write is not None
        return write.extent, 0

    def get_seq_length(self) -> int:
        write = _current.get()
        return 0 if write is None else write.extent - write.width

    def get_max_length(self) -> int:
        return self.cache.capacity


class KVCache(Cache):
    """Keys and values of B rows.

    Args:
        layers: the forms of each layer's keys and values, see `forms`.
        rows: B.
        capacity: positions per row: the longest text, plus what a pass writes behind it.
        device: where the lengths live.

    Attributes:
        stacks: by form, the buffers [n, B, H, capacity, Dh] in one tensor, so that a path moves at once.
        lengths: [B] of the rows, updated in place.
        selected: [R] of the selected rows, a view.
        longest: at least the most of these, known to the host without asking the device. It decides how many positions
            are read.
        bucket: `longest` is rounded up to a multiple of it. So shapes change once in so many tokens.
    """

    def __init__(self, layers: Sequence[tuple[Form, ...]], rows: int, capacity: int, device: torch.device):
        self.bucket = BUCKETS.get(device.type, 1)
        self.capacity = self._room(capacity)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._index = torch.arange(rows, device=device)[:, None]
        super().__init__(layers=[_Layer(self) for _ in layers])
        self._forms = layers
        counts = Counter(form for layer in layers for form in layer)
        stacks = {}
        for form, count in counts.items():
            heads, size, dtype, place = form
            stacks[form] = torch.zeros(count, rows, heads, self.capacity, size, dtype=dtype, device=place)
        self._share(stacks)
        self.select(0, rows, 0)

    def _share(self, stacks: dict[Form, Tensor]) -> None:
        """Let the layers have the stacks' parts."""
        self.stacks = stacks
        self.rows = (0, 0)
        parts = {form: iter(stack) for form, stack in stacks.items()}
        for layer, both in zip(self.layers, self._forms, strict=True):
            assert isinstance(layer, _Layer)
            if both:
                layer.keys, layer.values = (next(parts[form]) for form in both)

    def _room(self, capacity: int) -> int:
        """Positions for rows of `capacity`, however `longest` and the extent of a write are rounded."""
        return _up(capacity + self.bucket - 1, self.bucket)

    def select(self, start: int, stop: int, longest: int) -> None:
        """Let the next passes run over the rows start..stop - 1, the longest of which has `longest` tokens at most.

        With a single row this must be exact, unless the device has a bucket.
        """
        self.longest = _up(longest, self.bucket)
        if (start, stop) != self.rows:
            self.rows = start, stop
            self.selected, self.index = self.lengths[start:stop], self._index[: stop - start]
            self._parts = [stack[:, start:stop] for stack in self.stacks.values()]
            for layer in self.layers:
                layer.select(start, stop)  # type: ignore[union-attr]

    @property
    def lone(self) -> bool:
        return self.bucket == 1 and self.rows[1] - self.rows[0] == 1

    @contextmanager
    def writing(self, width: int, tree: TokenTree | None = None, base: int = 0) -> Iterator[Tensor]:
        """Let a model write `width` tokens into each selected row; gives their positions [R, width].

        Without a `tree` each token follows the one before it; with one they are its verify positions from `base` on.
        The `base` positions before them have been written, and are not committed.

        Raises:
            ValueError: the tokens would not fit.
        """
        if self.longest + base + width > self.capacity:
            raise ValueError(f"{self.longest} + {base + width} tokens do not fit a cache of {self.capacity}")
        # Fused attention wants masks of aligned width.
        extent = self.longest + _up(base + width, min(self.bucket, 16))
        block = self.selected[:, None] + torch.arange(base + width, device=self.lengths.device)
        slots = positions = block[:, base:] if base else block
        if tree is not None:
            positions = self.selected[:, None] + tree.depths[:, base : base + width]
        self.write = Write(self.selected, width, extent, block, slots, positions, tree, self.lone)
        token = _current.set(self.write)
        try:
            yield positions
        finally:
            _current.reset(token)
            self.write.masks.clear()

    def commit(self, counts: Tensor) -> None:  # [R]
        """Keep the first `counts` tokens of the last write in each selected row."""
        self.selected += counts

    def truncate(self, lengths: Tensor) -> None:  # [R]
        """Let the selected rows end there: what lies above is dead."""
        self.selected.copy_(lengths)

    def gather(self, path: Tensor) -> None:  # [R, n]
        """Put what the last write left at `path` to its front, in that order: the accepted tokens of a tree."""
        source, count = self.selected[:, None] + path, path.shape[1]
        for part in self._parts:
            places = source.to(part.device)
            if self.lone:
                part[:, :, :, self.longest : self.longest + count] = part.index_select(3, places[0])
            else:
                rows, front = self.index.to(part.device), self.write.block[:, :count].to(part.device)
                part[:, rows, :, front] = part[:, rows, :, places]

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        """Row destination[i] becomes what row source[i] was, as far as the first `longest` tokens go."""
        old, new = (torch.tensor(rows, device=self.lengths.device) for rows in (source, destination))
        self.lengths[new] = self.lengths[old]
        for stack in self.stacks.values():
            # On a CPU index_copy_ and index_select take twenty times as long for a row of many.
            stack[:, new.to(stack.device), :, :longest] = stack[:, old.to(stack.device), :, :longest]

    def grow(self, capacity: int) -> bool:
        """Have at least `capacity` positions a row; half as many again as before, so that growing stays rare.

        Returns whether there were fewer: the buffers are others then, and for a moment both are held.
        """
        if self._room(capacity) <= self.capacity:
            return False
        capacity = self._room(max(capacity, self.capacity + self.capacity // 2))
        more = (0, 0, 0, capacity - self.capacity)
        rows = self.rows
        self._share({form: nn.functional.pad(stack, more) for form, stack in self.stacks.items()})
        self.capacity = capacity
        self.select(*rows, self.longest)
        return True


def bucketed(longest: int, device: torch.device) -> int:
    """What caches on a device take for the most tokens of their rows, so that shapes change rarely."""
    return _up(longest, BUCKETS.get(device.type, 1))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
