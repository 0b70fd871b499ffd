"""What a drafter keeps of every row between steps. Drafters read it; the engine does everything else with it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculator.kernels import cuda_graphs
from speculator.target.cache.kv_cache import KVCache

if TYPE_CHECKING:
    from typing_extensions import Self

    from speculator.decoding.drafter import Shape

Sequences = Sequence[Sequence[int]]
"""Prompt and new tokens of each row, on the host. A request's list stays the same object and grows."""


class LookupPaths:
    """Paths that n-gram lookup found for the rows of a step, in a device tensor that captured steps can reread.

    Args:
        most: the most tokens of a path.
    """

    _table: Tensor  # [slots, 1 + most] length of each row's path, and its tokens

    def __init__(self, most: int):
        self.most, self._longest = most, 0

    def open(self, slots: int, device: torch.device) -> LookupPaths:
        """Return a copy with a table for `slots` rows; every row's path has no tokens yet."""
        opened = copy(self)
        opened._table = torch.zeros(slots, 1 + self.most, dtype=torch.long, device=device)
        return opened

    def put(self, found: Sequence[Sequence[int]]) -> None:
        """Set the lookup paths of rows 0, 1, ... for the next step, each cut to `most` tokens; other rows get none."""
        paths = [*(list(path[: self.most]) for path in found), *([] for _ in range(len(self._table) - len(found)))]
        self._table.copy_(torch.tensor([[len(path), *path, *[0] * (self.most - len(path))] for path in paths]))
        # The form of a captured step can't depend on what was found.
        captured = self._table.device.type in cuda_graphs.DEVICES
        self._longest = self.most if captured else max(map(len, paths))

    def first(self, rows: int, most: int) -> tuple[Tensor, Tensor]:  # [rows, W], [rows]
        """Return the paths of the first `rows` rows, at most `most` tokens each and padded with 0, and path lengths."""
        width = min(most, self._longest)
        return self._table[:rows, 1 : 1 + width], self._table[:rows, 0].clamp(max=width)


class Memory:
    """State that a drafter keeps of every row, such as a head's KV cache; this base class keeps none.

    The engine calls `open` once, `prefill` for every chunk of a prompt, `commit` after every step, `move` when rows
    change places, and `grow` when they need more room.

    Attributes:
        capturable: nothing here reads a value back from the device, so CUDA graphs can replay it.
        overlap: positions at the end of a reused prefix that `prefill` must see again.
        version: changes when the tensors in `buffers` are replaced; older graphs are then invalid.
        paths: what n-gram lookup found for the next draft.
    """

    capturable: bool = True
    overlap: int = 0
    version: int = 0
    paths: LookupPaths = LookupPaths(0)

    def reserve(self, shape: Shape) -> None:
        """Make room for drafts of this shape; raise a UserError if this memory can't draft it."""

    def open(self, cache: KVCache) -> Self:
        """Return an empty copy with as many rows and positions as `cache`, the target's."""
        opened = copy(self)
        opened.paths = self.paths.open(len(cache.lengths), cache.lengths.device)
        return opened

    def grow(self, capacity: int) -> None:
        """Make room for rows of `capacity` tokens."""

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        """Copy row source[i], at most `longest` tokens, to row destination[i], all at once."""

    def erase(self, row: int) -> None:
        """Set all that a row holds to 0, see `Rows.erase`."""

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        """Read a chunk of R prompts into the memory. State after a row's first `begins` tokens is an older sequence's.

        Args:
            start: the first of R neighbouring rows.
            sequences: tokens of each row's prompt; of a preempted request, its completion too.
            begins: tokens of each prompt before the chunk.
            hidden: [R, W, D] target hidden states of the chunk, left-aligned, or [R, W, nD] auxiliary hidden states.
            counts: tokens of each prompt in the chunk.
        """

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        """Keep the tokens that a step accepted.

        Args:
            tokens: [R, G+1] tokens on the accepted path, the pending token first.
            hidden: [R, G+1, D] their hidden states, or [R, G+1, nD] auxiliary hidden states.
            counts: [R] number of accepted tokens, the pending token included; 0 for idle rows.
        """

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Tensors that steps update in place, keys and values aside: a trial step saves and restores them."""
        return ()
