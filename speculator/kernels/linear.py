"""Matrix products on a CPU by oneDNN: a few rows take about as long as one.

Speculative decoding pays because verifying G+1 tokens reads the weights once, as a plain step does. torch's own product
(MKL) takes two to three times as long for a few rows as for one on some processors. Each weight therefore has a
second copy in oneDNN's layout, multiplied by the operators that torch.compile generates.

Products that need a gradient use oneDNN too, without a copy; there torch's own float32 products took twice as long.
Small products, other dtypes and other devices use torch's own.

Most processors have no unit for bfloat16, and emulate products of several rows at a tenth of float32's rate. There a
bfloat16 weight's copy is in float32. A product of two bfloat16 numbers is exact in float32, which holds the sums either
way, and the result is rounded to bfloat16: the same product, up to the order of the sum. One row is left to torch's own
product: it takes as long as reading the weight, which is half as large in bfloat16.

On some processors oneDNN takes longer for one or two rows than for four. There they are repeated, if the matrix is
large. They then have the bits that they have in a verification, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from speculator.about import processor
from speculator.files import cached_object

_MIN_MULTIPLICATIONS = 2**20
"""Below this torch's own product is as fast or faster: calling oneDNN takes longer."""
_MIN_MULTIPLICATIONS_PACKED = 2**16
"""The same for a weight in oneDNN's layout. It has to be small: if plain decoding of a small model stayed below it and
verification did not, drafts would seem to pay more than they do."""


_TIMED = (128, 1024, 1024)  # rows, inputs and outputs of the product that is timed
_FEW = 4
"""Rows of a product that may take less time than fewer rows."""
_FEW_TIMED = (4096, 8192)  # inputs and outputs of the product whose few rows are timed; its weight exceeds most caches
_GAIN = 1.05
"""Rows are repeated where that is at least so many times as fast: a smaller difference may be noise."""
_MIN_REPEATED = 2**18
"""Weights of a matrix from which on rows are repeated. Below, the call that repeats them costs what it gains."""


def _has_onednn() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    return torch.backends.mkldnn.is_available() and capability in ("AVX2", "AVX512")


HAS_ONEDNN = _has_onednn()
"""Whether oneDNN's products are used on this processor."""


@cache
def bfloat16_pays() -> bool:
    """Return whether this CPU multiplies bfloat16 at least as fast as float32: by oneDNN, or without it by torch alone.

    The first process on a machine times both, which takes up to a second; the user's cache keeps the result.
    """
    if HAS_ONEDNN and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    name = f"{processor()} {torch.__version__} {os.environ.get('ONEDNN_MAX_CPU_ISA', '')}"
    with cached_object("products", name) as stored:
        with suppress(KeyError, TypeError):  # never measured, or damaged
            return bool(stored["bfloat16"] <= stored["float32"])
        rows, inputs, outputs = _TIMED
        dtypes = (torch.bfloat16, torch.float32)
        pairs = [(torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)) for dtype in dtypes]
        stored["bfloat16"], stored["float32"] = _seconds(pairs)
        return bool(stored["bfloat16"] <= stored["float32"])


def _seconds(pairs: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the seconds of each product, the shortest of five measurements in turns, for pairs of x and matrix."""

    def once(x: Tensor, matrix: Tensor) -> float:
        started = time.perf_counter()
        _onednn(x, matrix) if HAS_ONEDNN else nn.functional.linear(x, matrix)
        return time.perf_counter() - started

    return [min(times) for times in zip(*([once(*pair) for pair in pairs] for _ in range(5)), strict=True)]


@cache
def slow_rows(dtype: torch.dtype, threads: int) -> frozenset[int]:
    """Return which numbers of rows, of 1 and 2, take this CPU longer than four rows, with the `threads` that torch has.

    The first process on a machine times them, which takes up to a second; the user's cache keeps the result.
    """
    name = f"{processor()} {torch.__version__} {os.environ.get('ONEDNN_MAX_CPU_ISA', '')} {threads} {dtype}"
    with cached_object("rows", name) as stored:
        try:
            one, two, few = (float(stored[key]) for key in ("one", "two", "few"))
        except (KeyError, TypeError, ValueError):  # never measured, or damaged
            inputs, outputs = _FEW_TIMED
            packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(outputs, inputs, dtype=dtype), None)
            one, two, few = _seconds([(torch.ones(rows, inputs, dtype=dtype), packed) for rows in (1, 2, _FEW)])
            stored |= {"one": one, "two": two, "few": few}
        return frozenset(rows for rows, seconds in ((1, one), (2, two)) if seconds > _GAIN * few)


def product(
    x: Tensor,  # [..., I]
    matrix: Tensor,  # [O, I]
) -> Tensor:  # [..., O]
    """Return `x @ matrix.T`, for use without autograd, by oneDNN if that is faster."""
    if x.numel() * matrix.shape[0] < _MIN_MULTIPLICATIONS or not _is_ours(x, matrix):
        return nn.functional.linear(x, matrix)
    if not (matrix.is_contiguous() or matrix.T.is_contiguous()):
        matrix = matrix.contiguous()  # for a part of a wider matrix oneDNN has no kernel: a thousand times slower
    return _widened(x, matrix) if _widens(x) else _onednn(x, matrix)


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product is oneDNN's: float32, or bfloat16, maybe by way of float32."""
    return (
        HAS_ONEDNN
        and x.dtype is weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.is_cpu
        and weight.is_cpu
        and not torch.is_autocast_enabled("cpu")
    )


def _widens(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and not bfloat16_pays()


def _widened(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the bfloat16 product of `product`, computed in float32; the matrix may be a packed float32 copy."""
    wide = matrix.float() if matrix.dtype is torch.bfloat16 else matrix
    return _onednn(x.float(), wide, None if bias is None else bias.float()).to(torch.bfloat16)


def _onednn(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, matrix, bias, "none", [], "")


def packed_bytes(weights: int, dtype: torch.dtype) -> int:
    """Return the bytes of the copies that `PackedLinear` makes of so many weights on this machine."""
    if not HAS_ONEDNN or dtype not in (torch.float32, torch.bfloat16):
        return 0
    return weights * (dtype.itemsize if dtype is torch.bfloat16 and bfloat16_pays() else 4)


class _Copy:
    """A weight in oneDNN's layout, in float32 where bfloat16 is slower."""

    def __init__(self, weight: Tensor):
        dense = weight.detach().float() if _widens(weight) else weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(dense, None)
        # Keeps the memory, so that no other tensor can have the same address.
        self._original, self._version = weight.detach(), weight._version

    def is_current(self, weight: Tensor) -> bool:
        return self._original.data_ptr() == weight.data_ptr() and self._version == weight._version


class _Trained(torch.autograd.Function):
    """`torch.nn.functional.linear` whose three products are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x, d_weight, d_bias = ctx.needs_input_grad
        # The products of the backward pass: d_x = d_out W, and d_W = d_out^T x.
        d_rows = d_out.flatten(0, -2)
        return (
            product(d_out, weight.T) if d_x else None,
            product(d_rows.T, x.flatten(0, -2).T) if d_weight else None,
            d_rows.sum(0) if d_bias else None,
        )


class PackedLinear(nn.Linear):
    """A `torch.nn.Linear` that multiplies by a copy of its weight in oneDNN's layout.

    The first product makes the copy, and a replaced weight or a new version of it renews the copy. Fused optimizers and
    changes through `weight.data`, as when PEFT merges an adapter, make no new version: a weight that is trained has no
    copy, and `pack_linears` drops the copies that it finds.
    """

    _copy: _Copy | None = None

    def forward(self, input: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        # Not `self.weight`: torch looks attributes up in 1 µs, and a small model has hundreds of products in a step.
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        trained = weight is not None and (weight.requires_grad or (input.requires_grad and torch.is_grad_enabled()))
        if trained and self._copy is not None and weight is not None and weight.requires_grad:
            self._copy = None  # it may be frozen again after steps of a fused optimizer
        if weight is None or not _is_ours(input, weight) or torch.compiler.is_compiling():
            return super().forward(input)
        if input.numel() * weight.shape[0] < (_MIN_MULTIPLICATIONS if trained else _MIN_MULTIPLICATIONS_PACKED):
            return nn.functional.linear(input, weight, bias)
        widens = _widens(weight)
        if trained:
            return super().forward(input) if widens else _Trained.apply(input, weight, bias)
        if widens and input.numel() == input.shape[-1]:
            return nn.functional.linear(input, weight, bias)
        if self._copy is None or not self._copy.is_current(weight):
            self._copy = _Copy(weight)
        multiply, rows = _widened if widens else _onednn, input.numel() // input.shape[-1]
        few_of_many = rows < _FEW and weight.numel() >= _MIN_REPEATED
        if few_of_many and rows in slow_rows(self._copy.packed.dtype, torch.get_num_threads()):
            few = torch.cat([input.reshape(rows, -1)] * (_FEW // rows))
            return multiply(few, self._copy.packed, bias)[:rows].view(*input.shape[:-1], -1)
        return multiply(input, self._copy.packed, bias)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_copy"}


def pack_linears(module: nn.Module) -> list[PackedLinear]:
    """Turn each plain `torch.nn.Linear` in a module into a `PackedLinear` in place, and return those.

    Parameters and hooks stay as they are, and so do subclasses and quantised or sharded weights. Modules that were
    packed before make their copies again.
    """
    parts: list = [part for part in module.modules() if type(part) is nn.Linear and _is_plain(part.weight)]
    for part in parts:
        part.__class__ = PackedLinear
    _drop_copies(part for part in module.modules() if isinstance(part, PackedLinear))
    return parts


def _is_plain(weight: Tensor) -> bool:
    """Return whether a weight is a plain tensor (not quantised, not sharded) whose version counts changes."""
    return type(weight.data) is Tensor and not weight.is_inference()


def unpack_linears(parts: Iterable[PackedLinear]) -> None:
    parts = list(parts)
    _drop_copies(parts)
    for part in parts:
        part.__class__ = nn.Linear  # type: ignore[assignment]


def _drop_copies(parts: Iterable[PackedLinear]) -> None:
    for part in parts:
        part.__dict__.pop("_copy", None)
