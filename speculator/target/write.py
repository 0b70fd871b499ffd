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
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculator.target.tree import TokenTree

if TYPE_CHECKING:
    from speculator.target.cross_memory import CrossMemory


@dataclass
class Packing:
    """Tokens of ragged rows laid end to end in one row: [[a b .] [c d e]] becomes [[a b c d e]].

    Attributes:
        places: [N] index of each token in the flattened padded rows.
        sources: [R, width] index in the packed row of each padded place.
        runs: (first row, last row + 1, tokens of each) of neighbouring rows with as many tokens; none where packed rows
            fill buckets.
    """

    places: Tensor
    sources: Tensor
    runs: list[tuple[int, int, int]]

    @classmethod
    def of(cls, counts: Sequence[int], width: int, bucket: int, device: torch.device) -> Packing:
        """Pack rows of `counts` tokens. The last token is repeated up to a whole bucket, so that shapes are few."""
        real = torch.arange(width) < torch.tensor(counts)[:, None]
        # The k-th real token has k + 1 real ones up to it, so its index in the packed row is cumsum - 1. Padding gets
        # that of the token before it: a valid index, whose value nobody reads.
        sources, places = real.flatten().cumsum(0).view_as(real) - 1, real.flatten().nonzero()[:, 0]
        places = torch.cat([places, places[-1:].expand(-len(places) % bucket)])
        ends = [row for row in range(1, len(counts)) if counts[row] != counts[row - 1]]
        bounds = pairwise([0, *ends, len(counts)]) if bucket == 1 else ()
        runs = [(start, stop, counts[start]) for start, stop in bounds]
        return cls(places.to(device), sources.to(device), runs)


@dataclass
class Write:
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
        cross: what the selected rows read of their sources; None without an encoder.
        masks: attention masks, shared by all layers, and the biases by distance that are in them.
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
    cross: CrossMemory | None = None
    masks: dict[Any, tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def packed(self, x: Tensor) -> Tensor:  # [R, width, ...] -> the same, or [1, N, ...]
        """Lay out the rows as the model reads them."""
        return x if self.packing is None else x.flatten(0, 1)[None, self.packing.places.to(x.device)]

    def padded(self, x: Tensor) -> Tensor:  # the same, or [1, N, ...] -> [R, width, ...]
        """Undo `packed`; padding holds the last token of its row."""
        return x if self.packing is None else x[0, self.packing.sources.to(x.device)]

    @cached_property
    def parts(self) -> list[Write]:
        """Packed chains as one write for each of `Packing.runs`, so that attention costs what rows have."""
        assert self.packing
        parts = []
        for start, stop, count in self.packing.runs:
            rows, tokens = slice(start, stop), (slice(start, stop), slice(count))
            extent = int(self.lengths[rows].max()) + count
            placed = self.block[tokens], self.cache_positions[tokens], self.positions[tokens]
            parts.append(Write(self.lengths[rows], count, extent, *placed, None, stop == start + 1))
        return parts

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:  # [R, 1] and [R, width], or [1, N] both
        """Rows and cache positions of the tokens as the model reads them."""
        written = self.cache_positions
        rows = torch.arange(len(written), device=written.device)[:, None]
        return (rows if self.packing is None else self.packed(rows.expand_as(written))), self.packed(written)


_current: ContextVar[Write | None] = ContextVar("_current", default=None)


def current() -> Write | None:
    """Return the write of the forward pass that is running, or None outside of `in_progress`."""
    return _current.get()


@contextmanager
def in_progress(write: Write) -> Iterator[None]:
    """Make this the write in progress inside the block."""
    token = _current.set(write)
    try:
        yield
    finally:
        _current.reset(token)
        write.masks.clear()
