"""What code allocates and computes, found by running it on tensors that have no memory.

Like torch's FakeTensor, but integers are real: the loss and the attention head look at labels and documents, and what
they then do depends on these. A `Fake` says that it is on the CPU, so that autocast and autograd treat it as usual;
each operation on it runs on torch's meta device, which knows shapes alone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from speculator.target.linear import FAST_DTYPES


class Fake(Tensor):
    """A tensor of a shape and dtype, and no numbers."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor):
        form = {"strides": meta.stride(), "storage_offset": meta.storage_offset(), "dtype": meta.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, meta.shape, **form)  # type: ignore[attr-defined]
        made.meta = meta
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fake({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        known: dict[int, Fake] = {}

        def bare(x: Any) -> Any:
            if isinstance(x, Fake):
                known[id(x.meta)] = x
                return x.meta
            return x.to("meta") if isinstance(x, Tensor) else x

        def dressed(x: Any) -> Any:  # what is changed in place stays who it is
            return (known.get(id(x)) if id(x) in known else Fake(x)) if isinstance(x, Tensor) else x

        args, kwargs = _mapped(bare, args), _mapped(bare, kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        if func is torch.ops.aten._grouped_mm.default:  # of bfloat16 alone
            return Fake(args[0].new_empty(len(args[0]), args[1].shape[-1]))
        return _mapped(dressed, func(*args, **kwargs))


def _mapped(work: Callable[[Any], Any], given: Any) -> Any:
    """`work` done on all that lists, tuples and dicts hold; torch's own tree_map takes ten times as long."""
    if isinstance(given, list | tuple):
        return type(given)([_mapped(work, each) for each in given])
    if isinstance(given, dict):
        return {name: _mapped(work, each) for name, each in given.items()}
    return work(given)


def fake(*shape: int, dtype: torch.dtype) -> Fake:
    return Fake(torch.empty(*shape, dtype=dtype, device="meta"))


def fake_weights(module: nn.Module) -> nn.Module:
    """Let a module that was made on the meta device run on `Fake` tensors; tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                one = made.setdefault(id(weight), nn.Parameter(Fake(weight.detach()), weight.requires_grad))
                part._parameters[name] = one
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = Fake(buffer)
            elif buffer is not None:
                part._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
    return module


class Trace(TorchDispatchMode):
    """Counts what is allocated inside its `with` block, real and fake, and the operations of matrix products.

    Args:
        name: the part that a new tensor belongs to, of the tensor and the part that is on.

    Attributes:
        live: bytes by part, now.
        peak: bytes by part when they were most in all.
        operations: floating-point operations so far.
    """

    def __init__(self, name: Callable[[Tensor, str], str] = lambda tensor, part: part) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.operations = 0
        self._most, self._part = 0, "other"
        self._name = name
        self._known: set[int] = set()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is allocated inside belongs to this part for as long as it lives."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        _mapped(partial(self._note, there=True), (args, kwargs))
        out = func(*args, **kwargs)
        _mapped(self._note, out)
        packet = func._overloadpacket
        if packet is _FLASH[1]:
            _mapped(self._note, _scratch(*args))
        if count := COUNTED.get(packet) or flop_registry.get(packet):
            self.operations += count(*args, **kwargs, out_val=out)
        return out

    def _note(self, tensor: Any, there: bool = False) -> None:
        """Count a tensor whose storage is seen for the first time, unless it was there before."""
        if not isinstance(tensor, Tensor):
            return
        storage = (tensor.meta if isinstance(tensor, Fake) else tensor).untyped_storage()
        key, size = storage._cdata, 0 if there else storage.nbytes()
        if key in self._known:
            return
        part = self._name(tensor, self._part)
        self._known.add(key)
        self.live[part] += size
        weakref.finalize(storage, self._free, key, part, size)
        total = sum(self.live.values())
        if total > self._most:
            self._most, self.peak = total, Counter(self.live)

    def _free(self, key: int, part: str, size: int) -> None:
        self._known.discard(key)
        self.live[part] -= size


def _product(x: Tensor, weight: Tensor, *_: object, **__: object) -> int:
    return 2 * x.numel() * weight.shape[0]


def _grouped(x: Tensor, weights: Tensor, *_: object, **__: object) -> int:  # [T, I], [experts, I, O]
    return 2 * x.numel() * weights.shape[-1]


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: object, **__: object) -> int:
    """Two products of causal attention within each document."""
    pairs = bounds.diff().double().square().sum().item() / 2
    return int(4 * pairs * query[0].numel())


def _flash_backward(_: Tensor, *given: Tensor, **__: object) -> int:
    """Five of them: one is made anew."""
    query, key, value, _, _, bounds = given[:6]
    return _flash_forward(query, key, value, bounds) * 5 // 2


def _scratch(_: Tensor, query: Tensor, key: Tensor, *more: Any) -> list[Tensor]:
    """What flash attention allocates in its backward pass: sums in float32, and keys' gradients of each query head."""
    documents = len(more[3]) - 1
    wide = query.new_empty(len(query) + 128 * documents, *query.shape[1:], dtype=torch.float32)
    return [wide] if query.shape == key.shape else [wide, torch.empty_like(query), torch.empty_like(query)]


_FLASH = (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
COUNTED: dict[Any, Callable[..., int]] = {torch.ops.aten._grouped_mm: _grouped}
"""Operations of products that torch's own counter does not know, or not as they are."""
COUNTED |= dict(zip(_FLASH, (_flash_forward, _flash_backward), strict=True))
if FAST_DTYPES:
    COUNTED[torch.ops.mkldnn._linear_pointwise] = _product
if hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # other dtypes than bfloat16
    COUNTED[torch.ops.transformers.grouped_mm_fallback] = _grouped
