"""Matrix products on a CPU, by oneDNN: a few rows at about the price of one.

Speculation pays because a verify pass of G+1 tokens reads the weights once, as a plain step does. With torch's own
product (MKL's) a few rows cost two or three times one on some processors (docs/benchmarks/linear.md). Here the weight
is laid out once for oneDNN, and multiplied by the operators that torch.compile's generated code calls. A second copy of
the weights is kept for it. Small products, other dtypes and devices, and calls that need a gradient go torch's own way.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Multiplications below which a call costs more than its product.
_SMALL = 2**18


def _dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return ()
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,)


FAST_DTYPES = _dtypes()
"""What oneDNN multiplies on this processor without emulation."""


def _pays(x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() * weight.shape[0] >= _SMALL
        and x.dtype is weight.dtype
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
    return _onednn(x, matrix, None) if _pays(x, matrix) else nn.functional.linear(x, matrix)


def _onednn(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, matrix, bias, "none", [], "")


class _Copy:
    """A weight as oneDNN wants it."""

    def __init__(self, weight: Tensor):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
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

    def forward(self, input: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        needs_gradient = torch.is_grad_enabled() and input.requires_grad
        trained = self.weight.requires_grad
        if torch.compiler.is_compiling() or needs_gradient or trained or not _pays(input, self.weight):
            return super().forward(input)
        if self._copy is None or not self._copy.is_of(self.weight):
            self._copy = _Copy(self.weight)
        return _onednn(input, self._copy.packed, self.bias)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_copy"}


def pack_linears(module: nn.Module, copies: dict[nn.Module, _Copy] | None = None) -> list[PackedLinear]:
    """Make every `torch.nn.Linear` in a module one of these, in place: its parameters, hooks and identity stay.

    Args:
        module: where they are looked for.
        copies: what `unpack_linears` gave when these were made plain again, so that they are not copied anew.

    Gives those that were changed.
    """
    # Weights made under inference mode don't say when they change.
    parts: list = [p for p in module.modules() if type(p) is nn.Linear and not p.weight.is_inference()]
    for part in parts:
        part.__class__ = PackedLinear
        if copies and part in copies:
            part._copy = copies[part]
    return parts


def unpack_linears(parts: Iterable[PackedLinear]) -> dict[nn.Module, _Copy]:
    """Make them `torch.nn.Linear` again; gives the copies of their weights."""
    copies: dict[nn.Module, _Copy] = {}
    for part in parts:
        if copy := part.__dict__.pop("_copy", None):
            copies[part] = copy
        part.__class__ = nn.Linear  # type: ignore[assignment]
    return copies
