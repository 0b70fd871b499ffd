"""Matrix products on a CPU, by oneDNN where it is faster: a few rows at about the price of one.

Speculation pays because a verify pass of G+1 tokens reads the weights once, as a plain step does. With torch's own
product (MKL's) a few rows cost two or three times one on some processors (docs/benchmarks/linear.md). So a weight is
laid out once for oneDNN, and multiplied by the operators that torch.compile's generated code calls. Where torch's own
is clearly faster differs by processor, shape and number of rows: both are timed when a model is loaded, once for each
shape on a machine. A weight that oneDNN multiplies has a second copy for it. Small products, other dtypes and devices,
and calls that need a gradient go torch's own way.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor, nn

from speculator.device import processor
from speculator.files import cache_folder, cached_object

# Multiplications below which a call costs more than its product, unless it was timed.
_SMALL = 2**18
TIMED_ROWS = (1, 2, 3, 5, 8, 16)  # those between go with the next
_TIMED = 2**21  # elements of a shape's matrices that are timed: more than the nearest caches hold
_SECONDS = 0.8  # for all of a model's shapes
_LEAST_TURNS, _MOST_TURNS = 8, 50  # fewer say nothing, more nothing new
_GAIN = 0.9  # the share of the usual way's time that the other one stays below, in three of four pairs


def _dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return ()
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,)


FAST_DTYPES = _dtypes()
"""What oneDNN multiplies on this processor without emulation."""


def _fits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype is weight.dtype
        and x.dtype in FAST_DTYPES
        and x.is_cpu
        and weight.is_cpu
        and not torch.is_autocast_enabled("cpu")
    )


def product(
    x: Tensor,  # [..., I]
    matrix: Tensor,  # [O, I]
) -> Tensor:  # [..., O]
    """`x @ matrix.T` without a gradient, by oneDNN where that is fast: for many rows, as nothing is kept."""
    large = x.numel() * matrix.shape[0] >= _SMALL
    return _onednn(x, matrix) if large and _fits(x, matrix) else nn.functional.linear(x, matrix)


def _onednn(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, matrix, bias, "none", [], "")


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


class _Copy:
    """A weight as oneDNN wants it."""

    def __init__(self, weight: Tensor):
        self.packed = _packed(weight)
        # Held, so that no other tensor comes to lie where it was.
        self._original, self._version = weight.detach(), weight._version

    def is_of(self, weight: Tensor) -> bool:
        return self._original.data_ptr() == weight.data_ptr() and self._version == weight._version


class PackedLinear(nn.Linear):
    """A `torch.nn.Linear` in all but speed.

    The copy is made at the first product that needs it, and again when the weight has been changed or replaced. A
    weight that is trained has none: a fused optimizer changes it without saying so.
    """

    _copy: _Copy | None = None
    packs: list[bool] | None = None  # for each of TIMED_ROWS whether to multiply by the packed weight; None: not timed

    def forward(self, input: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        weight, packs = self._parameters.get("weight"), self.packs  # `self.weight` is looked for elsewhere first
        trained = weight is not None and (weight.requires_grad or (input.requires_grad and torch.is_grad_enabled()))
        if weight is None or trained or not _fits(input, weight) or torch.compiler.is_compiling():
            return super().forward(input)
        rows = input.numel() // weight.shape[1]
        if packs and 0 < rows <= TIMED_ROWS[-1]:
            fast = packs[bisect_left(TIMED_ROWS, rows)]
        else:
            fast = rows * weight.numel() >= _SMALL
        if not fast:
            return nn.functional.linear(input, weight, self.bias)
        if packs and not any(packs):
            return _onednn(input, weight, self.bias)  # many rows: a weight that is laid out anew for them
        if self._copy is None or not self._copy.is_of(weight):
            self._copy = _Copy(weight)
        return _onednn(input, self._copy.packed, self.bias)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_copy"}


def pack_linears(module: nn.Module, copies: dict[nn.Module, _Copy] | None = None) -> list[PackedLinear]:
    """Make every `torch.nn.Linear` in a module one of these, in place: its parameters, hooks and identity stay.

    Args:
        module: where they are looked for.
        copies: what `unpack_linears` gave when these were made plain again, so that they are not copied anew.

    Gives those that were changed. The first model with matrices of a shape times them, under a second in all; the
    choice is kept in the user's cache folder.
    """
    parts: list = [part for part in module.modules() if type(part) is nn.Linear and _is_plain(part.weight)]
    alike: dict[str, list[Tensor]] = defaultdict(list)
    for part in parts:
        part.__class__ = PackedLinear
        if copies and part in copies:
            part._copy = copies[part]
        if TIMED_ROWS[-1] * part.weight.numel() >= _SMALL and _fits(part.weight, part.weight):
            alike[_shape(part.weight)].append(part.weight.detach())
    chosen = _choices(alike) if alike else {}
    for part in parts:
        part.packs = chosen.get(_shape(part.weight)) or None
    return parts


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight is numbers alone, neither quantised nor sharded, and says when it changes."""
    return type(weight.data) is Tensor and not weight.is_inference()


def unpack_linears(parts: Iterable[PackedLinear]) -> dict[nn.Module, _Copy]:
    """Make them `torch.nn.Linear` again; gives the copies of their weights."""
    copies: dict[nn.Module, _Copy] = {}
    for part in parts:
        if copy := part.__dict__.pop("_copy", None):
            copies[part] = copy
        part.__dict__.pop("packs", None)
        part.__class__ = nn.Linear  # type: ignore[assignment]
    return copies


def _shape(weight: Tensor) -> str:
    return f"{weight.dtype} {weight.shape[1]}x{weight.shape[0]}"


_known: dict[tuple[Path, str], dict[str, list[bool]]] = {}


def _choices(weights: dict[str, list[Tensor]]) -> dict[str, list[bool]]:
    """`PackedLinear.packs` of these shapes, among others: as stored, or timed now and stored where that can be.

    What could not be decided is stored too: the same products give the same bits in every run on a machine.
    """
    machine = f"{processor()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    name = f"{machine} torch {torch.__version__}"
    known = _known.setdefault((cache_folder(), name), {})
    if not weights.keys() <= known.keys():
        with cached_object("products", name) as stored:
            lists = {shape: packs for shape, packs in stored.items() if isinstance(packs, list)}
            known |= {shape: packs for shape, packs in lists.items() if len(packs) in (0, len(TIMED_ROWS))}
            _time(weights, known)
            stored.clear()  # of what was damaged
            stored |= known
    return known


def _time(weights: dict[str, list[Tensor]], known: dict[str, list[bool]]) -> None:
    missing = sorted(weights.keys() - known.keys(), key=lambda name: weights[name][0].numel())
    ends = time.perf_counter() + _SECONDS
    for i, name in enumerate(missing):
        known[name] = _timed(weights[name], (ends - time.perf_counter()) / (len(missing) - i))


@torch.inference_mode()
def _timed(weights: list[Tensor], limit: float) -> list[bool]:
    """For each of `TIMED_ROWS` whether to pack: as without timing, unless paired calls show a clear gain by the other.

    Nothing, which is as without timing, if the machine is too busy to tell within `limit` seconds.
    """
    inputs, size, ends = weights[0].shape[1], weights[0].numel(), time.perf_counter() + limit
    # A few whole matrices, or the upper part of a large one.
    plain = [weight[: max(1, _TIMED // inputs)] for weight in weights[: max(1, _TIMED // size)]]
    pairs = cycle([(weight, _packed(weight)) for weight in plain])
    ratios: dict[int, list[float]] = {rows: [] for rows in TIMED_ROWS}  # torch's own time over the packed product's
    while len(ratios[1]) < _MOST_TURNS and time.perf_counter() < ends:
        for rows, each in ratios.items():
            x, (weight, packed) = torch.ones(rows, inputs, dtype=weights[0].dtype), next(pairs)
            started = time.perf_counter()
            nn.functional.linear(x, weight)
            between = time.perf_counter()
            _onednn(x, packed)
            each.append((between - started) / (time.perf_counter() - between))
    quarter, packs = (len(ratios[1]) - 1) // 4, []
    for rows, each in ratios.items():
        ordered = sorted(each[1:])  # the first warms up
        if len(ordered) < _LEAST_TURNS:
            return []
        usual = rows * size >= _SMALL
        packs.append(ordered[-1 - quarter] > _GAIN if usual else ordered[quarter] > 1 / _GAIN)
    return packs
