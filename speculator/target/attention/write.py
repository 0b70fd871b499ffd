"""The tokens that a forward pass writes into the KV cache: their rows and positions, and how the model reads them.

A context variable holds the write in progress, because in some families (GPT-2, OPT, StableLM) keyword arguments of the
model do not reach its attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speculator.target.attention.tree import TokenTree
from speculator.target.text import Source

_CALL = 2**15
"""Values of keys that attention on a CPU reads in the time of one more call; a position has heads times head size."""
_BLOCK = 64
"""Tokens of a row that attend together on a CPU: fewer take more calls, more read keys that most of them do not see."""


class Sources:
    """What rows attend to besides their own tokens: nothing, unless an encoder reads sources, see `CrossMemory`."""

    bias: Tensor | None = None

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token of one row's source takes in all layers."""
        return 0.0

    def arguments(self, name: str, own: Any) -> dict[str, object]:
        """Return arguments for attending to the selected sources, and to the decoder's cache `own`, called `name`."""
        return {name: own}

    def holds(self, keys: Tensor) -> bool:
        """Return whether this tensor holds the keys of sources: then the layer is one of cross attention."""
        return False

    def read(self, start: int, sources: Sequence[Source]) -> None:
        """Store keys and values of sources in rows start, start + 1, ...; a source that some row has is copied."""

    def select(self, start: int, stop: int) -> None:
        """Let the next passes attend to the sources of rows start..stop - 1."""

    def erase(self, row: int) -> None:
        """Forget the source of a row."""

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy row source[i] to row destination[i], with its source, all at once."""


_NO_SOURCES = Sources()


@dataclass
class Packing:
    """Tokens of ragged rows laid end to end in one row: [[a b .] [c d e]] becomes [[a b c d e]].

    Attributes:
        indices: [N] index in the flattened padded rows of each packed token: 0 1 3 4 5 in the example.
        sources: [R, width] index in the packed row of each padded token: [[0 1 1] [2 3 4]].
    """

    indices: Tensor
    sources: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], width: int, bucket: int, device: torch.device) -> Packing:
        """Return the packing of rows that have `counts` tokens; the last is repeated up to a multiple of `bucket`."""
        real = torch.arange(width) < torch.tensor(counts)[:, None]
        # The k-th real token has k + 1 real ones up to it, so its index in the packed row is cumsum - 1. Padding gets
        # that of the token before it: a valid index, whose value nobody reads.
        sources, indices = real.flatten().cumsum(0).view_as(real) - 1, real.flatten().nonzero()[:, 0]
        indices = torch.cat([indices, indices[-1:].expand(-len(indices) % bucket)])
        return cls(indices.to(device), sources.to(device))


def _parts_of(lengths: Sequence[int], counts: Sequence[int], call: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, last row + 1) of neighbouring rows that attend together, until all rows are covered.

    They have equally many new tokens (`counts`). Reading all of them as far as the longest of `lengths` (committed
    tokens) costs less than another call, which takes as long as reading `call` positions.
    """
    first, longest, total = 0, lengths[0], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        # Reads that nobody needs: with lengths 100, 90 and 40 they are 3 * 100 - 230 = 70, so row 2 starts another
        # part.
        longest, total = max(longest, length), total + length
        if count != counts[first] or (row + 1 - first) * longest - total > call:
            yield first, row
            first, longest, total = row, length, length
    yield first, len(lengths)


class Part(NamedTuple):
    """Tokens that attend in one call: equally many of each of some neighbouring rows.

    Attributes:
        rows: these rows, among the R of the pass.
        tokens: the part's tokens, counted within each of these rows.
        packed: all tokens of these rows, also those of other parts, where the pass's rows are joined to one of N
            tokens; these rows then have equally many.
        write: a `CacheWrite` for these tokens alone.
    """

    rows: slice
    tokens: slice
    packed: slice
    write: CacheWrite

    def of(self, x: Tensor, packed: bool) -> Tensor:  # [R, width, ...] or [1, N, ...] -> [rows, tokens, ...], a view
        # The tokens of these rows are neighbours in the packed row, equally many of each: [rows * count, ...] is cut
        # into [rows, count, ...].
        own = x[0, self.packed].unflatten(0, (self.rows.stop - self.rows.start, -1)) if packed else x[self.rows]
        return own[:, self.tokens]


@dataclass
class CacheWrite:
    """Tokens of one pass, R rows of `width`, that are being written into the cache.

    Example: a row has 5 committed tokens, an earlier pass wrote one token after them (base 1), and this one writes two
    alternatives for the token after that. Then lengths is [5], block [[5, 6, 7]], cache_positions [[6, 7]], and
    positions [[6, 6]].

    Attributes:
        lengths: [R] committed tokens of each row.
        width: tokens per row, padding included.
        extent: positions of each row that attention reads.
        block: [R, base + width] cache positions after the committed ones; earlier passes wrote the first `base`.
        cache_positions: [R, width] where this pass writes: the last of `block`.
        positions: [R, width] positions in the sequence, which alternatives share.
        tree: structure of the tokens; None for a chain.
        single_row: one row whose length the host knows, so that slices suffice and every position read is live.
        packing: how the model reads the rows as one without padding; None: as they are.
        counts: tokens of each row, for attention in `parts`; None: in one part, whose shapes are few.
        position_size: values of a position's keys in a layer.
        cross: keys and values of the selected rows' sources.
        masks: attention masks that layers share, by (groups, window, dtype), and the bias by distance in each, if any.
    """

    lengths: Tensor
    width: int
    extent: int
    block: Tensor
    cache_positions: Tensor
    positions: Tensor
    tree: TokenTree | None
    single_row: bool
    packing: Packing | None = None
    counts: Sequence[int] | None = None
    position_size: int = 1
    cross: Sources = _NO_SOURCES
    masks: dict[Any, tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def packed(self, x: Tensor) -> Tensor:  # [R, width, ...] -> the same, or [1, N, ...]
        """Return x as the model reads it: in one packed row, or unchanged without a `packing`."""
        return x if self.packing is None else x.flatten(0, 1)[None, self.packing.indices.to(x.device)]

    def padded(self, x: Tensor) -> Tensor:  # the same, or [1, N, ...] -> [R, width, ...]
        """Return x in padded rows again, the inverse of `packed`; padding holds a copy of the token before it."""
        return x if self.packing is None else x[0, self.packing.sources.to(x.device)]

    @cached_property
    def parts(self) -> list[Part]:
        """Parts that attend in one call each, so that short rows don't pay for long ones.

        Empty if one call will do without packing, or if attention is not cut into parts.
        """
        if self.counts is None or (len(self.counts) == 1 and self.width <= _BLOCK):
            return []
        parts, lengths, base = [], self.lengths.tolist(), self.block.shape[1] - self.width
        for start, stop in _parts_of(lengths, self.counts, _CALL // self.position_size):
            rows, count, done = slice(start, stop), self.counts[start], sum(self.counts[:start])
            for first in range(0, count, _BLOCK):
                tokens = slice(first, min(count, first + _BLOCK))
                # A row that another pass has made longer than the host knows is not read further.
                extent = min(self.extent, max(lengths[rows]) + base + tokens.stop)
                write = CacheWrite(
                    lengths=self.lengths[rows],
                    width=tokens.stop - first,
                    extent=extent,
                    block=self.block[rows],
                    cache_positions=self.cache_positions[rows, tokens],
                    positions=self.positions[rows, tokens],
                    tree=None,
                    single_row=stop == start + 1,
                )
                parts.append(Part(rows, tokens, packed=slice(done, done + (stop - start) * count), write=write))
        return parts if len(parts) > 1 or self.packing else []

    @cached_property
    def destinations(self) -> tuple[Tensor, Tensor]:  # [R, 1] and [R, width], or [1, N] both
        """Row and cache position of each token, in the order in which the model reads them."""
        written = self.cache_positions
        rows = torch.arange(len(written), device=written.device)[:, None]
        return (rows if self.packing is None else self.packed(rows.expand_as(written))), self.packed(written)


_current: ContextVar[CacheWrite | None] = ContextVar("_current", default=None)


def current() -> CacheWrite | None:
    """Return the write of the forward pass that is running, or None outside of `in_progress`."""
    return _current.get()


@contextmanager
def in_progress(write: CacheWrite) -> Iterator[None]:
    """Make this the write in progress inside the block; afterwards drop its masks and parts."""
    token = _current.set(write)
    try:
        yield
    finally:
        _current.reset(token)
        write.masks.clear()
        write.__dict__.pop("parts", None)  # and their masks
