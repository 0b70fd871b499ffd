"""KV cache: storage for a fixed number of rows, allocated once, each row with its own length.

A row's positions below its length are committed; those above are free and will be overwritten. A verification writes
its tokens after each row's length. Keeping n of them is one addition to `lengths`; a tree's accepted path moves to the
front first. `speculator.target.attention.attention` decides which positions a token sees.

transformers' models are used unmodified: their layers write through `KVCache`. A pass runs over the neighbouring rows
that `select` chose.
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
from transformers.cache_utils import Cache, CacheLayerMixin

from speculator.target.attention.tree import TokenTree
from speculator.target.attention.write import CacheWrite, Packing, Sources, current, in_progress
from speculator.target.recurrent.layer import RecurrentLayer, StateForm, pass_ended
from speculator.target.text import source_of

Form = tuple[int, int, torch.dtype, torch.device]
"""Heads, head size, dtype and device of one layer's keys or values."""
BUCKETS = {"cuda": 256}
"""`KVCache.bucket` by device type; 1 elsewhere, because reading free positions takes time."""
_ALIGNED = 16
"""Fused attention needs masks whose width is a multiple of this."""
_LEAST_WIDTH = 32
"""Smallest width of a prefill chunk for attention on a GPU; then four and sixteen times it, then as `bucketed`."""


def forms(cache: Cache) -> list[tuple[Form, ...]]:
    """Return the `Form`s of each layer's keys and values in a filled cache; () if it has none, as a recurrent one."""
    layers: list[Any] = [getattr(layer, "keys", None) is not None and layer for layer in cache.layers]
    return [(_form(layer.keys), _form(layer.values)) if layer else () for layer in layers]


def _form(buffer: Tensor) -> Form:  # [B, H, M, Dh]
    return buffer.shape[1], buffer.shape[3], buffer.dtype, buffer.device


class _CacheLayer(CacheLayerMixin):
    """One layer's buffers [B, H, capacity, Dh], views of the cache's, and views of their selected rows."""

    is_compileable = True
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: KVCache):
        super().__init__()
        self.is_initialized = True
        self._cache = weakref.ref(cache)  # a reference cycle would delay freeing the buffers

    @property
    def cache(self) -> KVCache:
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write keys and values [R, H, T, Dh] after each row's length; return those to read, [R, H, extent, Dh]."""
        write = current()
        assert write is not None
        # Positions beyond a row's own tokens hold leftovers of rejected drafts. They are read and masked: shapes stay
        # the same for all rows, and clearing them would cost a write per step.
        keys, values = self.selected[0][:, :, : write.extent], self.selected[1][:, :, : write.extent]
        if write.single_row:
            # One row: `extent` ends with its new tokens. With 5 committed tokens and 3 new ones it is 8, and 5, 6, 7
            # are written.
            keys[:, :, -write.width :] = key_states  # casts, for autocast
            values[:, :, -write.width :] = value_states
        else:  # into the whole buffer: an idle row may be longer than the decoding rows
            # Each row writes after its own length, which differs: with lengths [5, 2] and width 3 row 0 writes 5, 6, 7
            # and row 1 writes 2, 3, 4. An index on either side of the slice moves those two dimensions first, hence the
            # transpose.
            rows, positions = (each.to(keys.device) for each in write.destinations)  # layers may be on several devices
            self.selected[0][rows, :, positions] = key_states.transpose(1, 2).to(keys.dtype)
            self.selected[1][rows, :, positions] = value_states.transpose(1, 2).to(values.dtype)
        return keys, values

    def select(self, start: int, stop: int) -> None:
        if hasattr(self, "keys") and self.keys is not None:
            self.selected = self.keys[start:stop], self.values[start:stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of positions that attention reads, and 0, the first of them."""
        write = current()
        assert write is not None
        return write.extent, 0

    def get_seq_length(self) -> int:
        """Return the number of positions that attention reads before the new ones; 0 while nothing is written."""
        write = current()
        return 0 if write is None else write.extent - write.width

    def get_max_length(self) -> int:
        return self.cache.capacity


class KVCache(Cache):
    """Keys and values of B rows, and the states of recurrent layers.

    Args:
        layers: forms of each layer's keys and values, see `forms`.
        rows: B, the number of rows.
        capacity: positions per row: tokens of the longest sequence, plus those that one pass writes after it.
        device: device of the lengths.
        states: forms of each layer's states, see `speculator.target.recurrent.layer.state_forms`.
        cross: keys and values of the rows' sources.

    Attributes:
        recurrent: the recurrent layers, by their numbers. Their rows can't be shortened, only cleared.
        stacks: by form, one buffer [n, B, H, capacity, Dh] for the n keys or values of this form in all layers, so that
            `gather` moves an accepted path in all layers at once.
        lengths: [B] committed tokens of each row, updated in place.
        selected: [R] lengths of the selected rows, a view.
        key_heads: key heads of the layer with the fewest; 1 without attention.
        longest: upper bound of the selected lengths, known to the host; it decides how many positions are read.
        bucket: the smallest bucket, to which `longest` is rounded up so that shapes are few, see `bucketed`.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Form, ...]],
        rows: int,
        capacity: int,
        device: torch.device,
        states: Sequence[tuple[StateForm, ...]] = (),
        cross: Sources | None = None,
    ):
        self.cross = cross or Sources()
        self.bucket = BUCKETS.get(device.type, 1)
        self.capacity = self.room_for(capacity)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        super().__init__(layers=[_CacheLayer(self) for _ in layers])
        self.recurrent = {number: RecurrentLayer(forms, rows) for number, forms in enumerate(states) if forms}
        self._forms = layers
        self.key_heads = min((heads for layer in layers for heads, *_ in layer), default=1)
        self._position_size = max((heads * size for layer in layers for heads, size, *_ in layer), default=1)
        counts = Counter(form for layer in layers for form in layer)
        stacks = {}
        for form, count in counts.items():
            heads, size, dtype, where = form
            stacks[form] = torch.zeros(count, rows, heads, self.capacity, size, dtype=dtype, device=where)
        self._share(stacks)
        self.select(0, rows, 0)

    def _share(self, stacks: dict[Form, Tensor]) -> None:
        """Make every layer's keys and values views into the stacks, one for all layers of the same shape."""
        self.stacks = stacks
        self.rows = (0, 0)
        parts = {form: iter(stack) for form, stack in stacks.items()}
        for layer, both in zip(self.layers, self._forms, strict=True):
            assert isinstance(layer, _CacheLayer)
            if both:
                layer.keys, layer.values = (next(parts[form]) for form in both)

    def room_for(self, capacity: int) -> int:
        """Return the number of positions to allocate for rows of `capacity` tokens, rounded up to whole buckets."""
        return _up(capacity + self.bucket - 1, self.bucket)

    def select(self, start: int, stop: int, longest: int) -> None:
        """Select rows start..stop - 1 for the next passes; none of them has more than `longest` tokens.

        For a single row `longest` must be its exact length where `bucket` is 1.
        """
        self._used, self.longest = longest, bucketed(longest, self.lengths.device)
        if (start, stop) != self.rows:
            self.rows = start, stop
            self.selected = self.lengths[start:stop]
            self._parts = [stack[:, start:stop] for stack in self.stacks.values()]
            for layer in (*self.layers, *self.recurrent.values()):
                layer.select(start, stop)  # type: ignore[union-attr]
        self.cross.select(start, stop)

    @property
    def spared(self) -> int:
        """Cache positions of all selected rows together that attention would also read with `coarse_buckets`."""
        with coarse_buckets():
            doubled = bucketed(self._used, self.lengths.device)
        return (self.rows[1] - self.rows[0]) * max(0, min(doubled, self.capacity) - self.longest)

    @property
    def room(self) -> int:
        """Number of positions after those of the longest selected row."""
        return self.capacity - self._used

    def round_again(self) -> None:
        """Round `longest` to the buckets in use now, see `coarse_buckets`."""
        self.longest = bucketed(self._used, self.lengths.device)

    def read_sources(self, sequences: Sequence[Sequence[int]]) -> None:
        """Encode the sources of the selected rows' sequences, if they have some that are not in the rows yet."""
        self.cross.read(self.rows[0], [source_of(sequence) for sequence in sequences])
        self.cross.select(*self.rows)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token of one row takes in all layers, states of recurrent layers aside."""
        return sum(stack[:, :1].numel() * stack.element_size() for stack in self.stacks.values()) / self.capacity

    @property
    def single_row(self) -> bool:
        """True if one row is selected and the host knows its length exactly, see `select`."""
        return self.bucket == 1 and self.rows[1] - self.rows[0] == 1

    @property
    def state(self) -> list[Tensor]:
        """Tensors to restore after a trial step, which writes keys and values at free positions only."""
        return [self.lengths, *(state for layer in self.recurrent.values() for state in layer.states)]

    @contextmanager
    def writing(
        self, width: int, tree: TokenTree | None = None, base: int = 0, counts: Sequence[int] | None = None
    ) -> Iterator[CacheWrite]:
        """Let passes inside the block write `width` tokens into each selected row; yields the write.

        Args:
            width: tokens per row.
            tree: a draft's structure; None for a chain. The tokens are consecutive tokens of the draft, from number
                `base` on (number 0 is the pending token, i + 1 is draft token i).
            base: tokens per row that earlier passes wrote and did not commit.
            counts: tokens of each row that will be committed; the others are padding, and the model reads all rows as
                one without padding, unless it has recurrent layers, whose state runs through a row. None: not known.

        Raises:
            ValueError: the tokens do not fit.
        """
        # `_used` is the bound as given, `longest` the same rounded up to a bucket.
        if self._used + base + width > self.capacity:
            raise ValueError(f"{self._used} + {base + width} tokens do not fit a cache of {self.capacity}")
        extent = min(self.longest + aligned(base + width, self.lengths.device), self.capacity)
        # Lengths stay on the device: reading them would stall the host in every step, and a captured step could not
        # replay it.
        block = self.selected[:, None] + torch.arange(base + width, device=self.lengths.device)
        cache_positions = positions = block[:, base:] if base else block
        if tree is not None:
            # Alternatives share a position in the sequence and need a cache position each. Rope reads `positions`,
            # storage reads `cache_positions`: two alternatives after 5 tokens are at position 5 both, and in the cache
            # at 5 and 6.
            positions = self.selected[:, None] + tree.depths[:, base : base + width]
        packing = None
        if counts is not None and sum(counts) < len(block) * width and not self.recurrent:
            packing = Packing.of(counts, width, self.bucket, block.device)
        apart = (counts if packing else [width] * len(block)) if self.bucket == 1 and tree is None else None
        self.write = CacheWrite(
            lengths=self.selected,
            width=width,
            extent=extent,
            block=block,
            cache_positions=cache_positions,
            positions=positions,
            tree=tree,
            single_row=self.single_row,
            packing=packing,
            counts=apart,
            position_size=self._position_size,
            cross=self.cross,
        )
        for layer in self.recurrent.values():
            layer.begin(width, counts, tree, again=base > 0)
        with in_progress(self.write):
            try:
                yield self.write
            finally:
                pass_ended()

    # ---- called by recurrent layers, in place of transformers' own

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the layer hands its inputs to `update_conv_state`.

        Given a state, it could change that in place, which a rejected draft would not undo.
        """

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Append new inputs [R, C, T] to the last K that the layer kept, and keep the newest K.

        Returns all [R, C, K + T], which the convolution reads.
        """
        return self.recurrent[layer_idx].convolve(conv_states)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a copy of the layer's recurrent state if this pass reads one token per row; None for longer passes."""
        return self.recurrent[layer_idx].single_token_state()

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keep the state [R, ...] after the pass's last token until `commit`, and return it."""
        self.recurrent[layer_idx].finish(recurrent_states)
        return recurrent_states

    # ---- between passes

    def commit(self, counts: Tensor) -> None:  # [R]
        """Keep the first `counts` tokens of the last write in each selected row; the others become free positions."""
        # Everything that a rejected draft left is now above the length, where the next pass overwrites it. In place:
        # `selected` is a view of `lengths`, and captured steps hold the address of both.
        self.selected += counts
        for layer in self.recurrent.values():
            layer.commit(counts)

    def truncate(self, lengths: Tensor) -> None:  # [R]
        """Set the selected rows' lengths, and free the rest; with recurrent layers only to 0 or the row's own."""
        self.selected.copy_(lengths)
        for layer in self.recurrent.values():
            layer.clear(self.selected == 0)

    def gather(self, path: Tensor) -> None:  # [R, n]
        """Move the keys, values and states at the verify positions `path` of a tree to the front of the last write.

        `path` is the accepted path of each row; padding on its right fills positions that are not committed.
        """
        # Verify position p of a row with n tokens is cache position n + p. An accepted path 0, 2, 5 of a row with 7
        # tokens moves from 7, 9, 12 to 7, 8, 9.
        source, count = self.selected[:, None] + path, path.shape[1]
        for part in self._parts:
            old = source.to(part.device)
            if self.single_row:
                part[:, :, :, self.longest : self.longest + count] = part.index_select(3, old[0])
            else:
                # The right side is gathered into a new tensor before the left side is written, so overlapping moves are
                # safe.
                rows, front = self.write.destinations[0].to(part.device), self.write.block[:, :count].to(part.device)
                part[:, rows, :, front] = part[:, rows, :, old]
        for layer in self.recurrent.values():
            layer.follow(path)

    def padded_width(self, width: int) -> int:
        """Return the width to which a prefill chunk is padded if there is `room`, so that attention has few shapes.

        Other layers skip the padding. Recurrent layers would read it, so for them the width stays as it is.
        """
        if self.bucket == 1 or self.recurrent:
            return width
        # Above 512 finer steps: a chunk of 2,100 tokens attended as 8,192 would have 15 times the scores.
        steps = (step for step in (_LEAST_WIDTH, 4 * _LEAST_WIDTH, 16 * _LEAST_WIDTH) if step >= width)
        return next(steps, bucketed(width, self.lengths.device))

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        """Copy the first `longest` tokens of row source[i] to row destination[i], with length, states and source."""
        old, new = (torch.tensor(rows, device=self.lengths.device) for rows in (source, destination))
        self.lengths[new] = self.lengths[old]
        for stack in self.stacks.values():
            rows, others = old.to(stack.device), new.to(stack.device)
            for layer in stack:  # one at a time: the copied rows of all layers may take gigabytes
                # On a CPU index_copy_ and index_select take twenty times as long.
                layer[others, :, :longest] = layer[rows, :, :longest]
        for layer in self.recurrent.values():
            layer.move(old, new)
        self.cross.move(source, destination)

    def erase(self, row: int) -> None:
        """Set keys, values, states and length of a row to 0, and forget its source."""
        for tensor in self.state:
            tensor[row] = 0
        for stack in self.stacks.values():
            stack[:, row] = 0
        self.cross.erase(row)

    def grow(self, capacity: int) -> None:
        """Allocate at least `capacity` positions per row; for a moment old and new buffers exist together."""
        if self.room_for(capacity) <= self.capacity:
            return
        capacity = self.room_for(capacity)
        # pad counts from the last dimension: none to the head size, then positions at the end.
        more = (0, 0, 0, capacity - self.capacity)
        rows = self.rows
        self._share({form: nn.functional.pad(stack, more) for form, stack in self.stacks.items()})
        self.capacity = capacity
        # `_share` has dropped the views of the selected rows: they showed the old buffers.
        self.select(*rows, self.longest)


def bucketed(longest: int, device: torch.device) -> int:
    """Return `longest` rounded up to a bucket of the device, by at most an eighth beyond the first one; 0 stays.

    On a GPU: 256, 288, 320, .., 512, 576, 640, .., 1,024, 1,152, ..; inside `coarse_buckets` 256, 512, 1,024, ...
    """
    bucket = BUCKETS.get(device.type, 1)
    if bucket == 1 or not longest:
        return longest
    # The smallest 256 * 2^k that is enough: 1..256 give 256, 257..512 give 512, 513..1,024 give 1,024.
    doubled = bucket << ((longest - 1) // bucket).bit_length()
    if doubled == bucket or _coarse.get():
        return doubled
    # Eight buckets from each power of two to the next: steps of 64 from 512 to 1,024.
    return _up(longest, max(_ALIGNED, doubled // 16))


_coarse: ContextVar[bool] = ContextVar("_coarse", default=False)


@contextmanager
def coarse_buckets() -> Iterator[None]:
    """Make buckets double inside the block, in all caches, so that steps have few shapes."""
    token = _coarse.set(True)
    try:
        yield
    finally:
        _coarse.reset(token)


def aligned(count: int, device: torch.device) -> int:
    """Return a number of positions rounded up to a width that masks of fused attention may have: 16 n on a GPU."""
    return _up(count, min(BUCKETS.get(device.type, 1), _ALIGNED))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
