"""Counts the memory of tensors that operations make, on any device: meta tensors show what real sizes would take."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Counts bytes of the tensors made inside the block. Scratch memory within an operation is not seen.

    Attributes:
        peak: the most bytes that were alive at a time.
        largest: bytes of the largest tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = self._alive = 0
        self._tensors: Counter[int] = Counter()  # tensors by storage: views share one

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in _tensors(result):
            self._note(x, x.untyped_storage()._cdata in given)
        return result

    def _note(self, x: torch.Tensor, known: bool) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if known and not self._tensors[key]:
            return  # a view of a tensor from outside
        if not self._tensors[key]:
            self._alive += size
            self.peak, self.largest = max(self.peak, self._alive), max(self.largest, size)
        self._tensors[key] += 1
        weakref.finalize(x, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            self._alive -= size


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, except packed weights, which have no storage."""
    leaves = _pytree.tree_leaves(value)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided]
