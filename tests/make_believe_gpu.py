"""A make-believe GPU: tensors say `cuda:0` and live on the CPU, so code takes its branches for CUDA in any test.

It refuses operations on tensors of two devices as CUDA does, emulates autocast and the flash attention kernels, and
counts what costs time on a GPU: host waits and the signatures of fused attention. It knows nothing of speed, rounding
or memory. Everything that `make_believe_gpu` replaces in torch is put back by monkeypatch.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from torch.nn import functional
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
_ROOT = Path(__file__).parents[1]
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "allclose"}
_WAITING |= {"unique_consecutive", "_unique2", "unique_dim"}
_ATTENTION = {functional.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention}
_LOW_PRECISION = _ATTENTION | {functional.linear, torch._C._nn.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}
_LOW_PRECISION |= {torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.einsum, Tensor.__rmatmul__}
_FLOAT32 = {torch.softmax, Tensor.softmax, functional.softmax, torch.log_softmax, Tensor.log_softmax, torch.exp}
_FLOAT32 |= {functional.log_softmax, Tensor.exp, torch.log, Tensor.log, torch.pow, Tensor.pow, Tensor.__pow__}
_FLOAT32 |= {torch.rsqrt, Tensor.rsqrt, torch.sum, Tensor.sum, torch.cumsum, Tensor.cumsum, torch.cumprod}
_FLOAT32 |= {Tensor.cumprod, functional.binary_cross_entropy_with_logits}


class Counts:
    """What the code did on the device.

    Attributes:
        waits: host waits by operation and line of the project.
        signatures: calls of fused attention by what a plan depends on: shapes, strides, dtype, mask, gradient.
        elements: numbers that operations computed, views aside, by device type.
    """

    def __init__(self):
        self.elements: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.signatures: Counter[Any] = Counter()

    def wait(self, operation: str) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(_ROOT) and file != Path(__file__) and ".venv" not in file.parts:
                self.waits[f"{operation} {file.relative_to(_ROOT)}:{frame.f_lineno}"] += 1
                return
            frame = frame.f_back
        self.waits[f"{operation} in a library"] += 1

    def work(self, func: Any, device: str, result: Any) -> Any:
        if not _is_view(func):
            self.elements[device] += sum(x.numel() for x in _tensors([result]))
        return result

    def attention(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any):
        given = [
            (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else None
            for x in (query, key, value, attn_mask)
        ]
        trains = torch.is_grad_enabled() and query.requires_grad
        self.signatures[(*given, options.get("is_causal", False), trains)] += 1


counts = Counts()


class GpuTensor(Tensor):
    """A tensor whose numbers are in the CPU tensor `own`. C++ believes that it is on the meta device."""

    own: Tensor
    device = property(lambda self: GPU)
    is_cuda, is_cpu, is_meta = (property(lambda self, answer=answer: answer) for answer in (True, False, False))

    @staticmethod
    def __new__(cls, own: Tensor, requires_grad: bool = False):
        layout = {"strides": own.stride(), "storage_offset": own.storage_offset(), "dtype": own.dtype}
        with torch.inference_mode(False):  # a view of a tensor from outside inference mode must be like that tensor
            made = Tensor._make_wrapper_subclass(cls, own.size(), **layout, device="meta", requires_grad=requires_grad)
        made.own = own
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.backward:  # what it recomputes must come here again
            seeds = (torch.ones_like(args[0]),)
            options = {"allow_unreachable": True, "accumulate_grad": True}
            return torch.autograd.Variable._execution_engine.run_backward(args[:1], seeds, False, False, (), **options)
        if func in _ATTENTION:
            counts.attention(*args, **kwargs)
        if func is functional.rms_norm and not torch.is_grad_enabled():  # one kernel on a GPU
            x, shape = args
            return run(torch.ops.aten._fused_rms_norm.default, (x, list(shape), kwargs["weight"], kwargs["eps"]), {})[0]
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _on_gpu(args[1]), *args[2:])
        if torch.is_autocast_enabled("cuda"):
            if func in _LOW_PRECISION:
                args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("cuda"))
            elif func in _FLOAT32:
                args, kwargs = _cast((args, kwargs), torch.float32)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"on a make-believe GPU: {self.own!r}"

    def __deepcopy__(self, memo: dict) -> Tensor:
        made: Tensor = GpuTensor(self.own.clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    def tolist(self):
        counts.wait("tolist")
        return self.own.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self) -> int:
        return self.own.data_ptr()

    def untyped_storage(self):
        return self.own.untyped_storage()


def _cast(given: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        return x.to(dtype) if floating else x

    return tree_map(cast, given)


def _on_gpu(index: Any) -> Any:
    """Copy lists in an index to the device, as torch does."""
    if isinstance(index, tuple):
        return tuple(map(_on_gpu, index))
    if isinstance(index, list | range):
        return torch.tensor(list(index), device=GPU)
    return index


def _is_gpu(device: Any) -> bool:
    return torch.device(device).type in ("cuda", "meta")  # C++ asks for the meta device on behalf of a GpuTensor


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of torch on the CPU; its results are on the GPU if it has a tensor there or is asked to."""
    name = func._schema.name.split("::")[-1]
    given = list(_tensors((*args, *kwargs.values())))
    here = any(isinstance(each, GpuTensor) for each in given)
    asked = kwargs.get("device")
    there = here if asked is None else _is_gpu(asked)
    if (here or (given and not there)) and _is_composite(func) and func not in _EMULATED:
        before = counts.elements.copy()
        with MODE:  # these arrive whole in inference mode
            result = func.decompose(*args, **kwargs)
        if name == "scaled_dot_product_attention":  # one kernel on both, of which only the CPU's exists here
            counts.elements = before
            counts.work(func, "cuda" if here else "cpu", result)
        return result
    if here:
        _check_devices(name, args, given)
        _note_waits(name, args, there, kwargs.get("non_blocking", False))
    elif name == "_to_copy" and there:
        if not kwargs.get("non_blocking"):
            counts.wait("copy from the host")
    elif not there:
        return counts.work(func, "cpu", func(*args, **kwargs))
    if asked is not None:
        kwargs = {**kwargs, "device": CPU}
    plain_args, plain_kwargs = [_own(x) for x in args], {name: _own(x) for name, x in kwargs.items()}
    emulated = _EMULATED.get(func)
    with nullcontext() if emulated is None else torch.no_grad():
        result = (emulated or func)(*plain_args, **plain_kwargs)
    counts.work(func, "cuda" if here else "cpu", result)
    if name == "_local_scalar_dense":
        return result
    if func._schema.is_mutable:  # it returns its own arguments
        written = {id(_own(each)): each for each in given}
        return _map(lambda x: written.get(id(x), x), result)
    return _map(GpuTensor, result) if there else result


@cache
def _is_view(func: Any) -> bool:
    return any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to the tensors in lists and tuples; torch's pytree takes ten times as long."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_map(change, each) for each in value) if type(value) in (list, tuple) else value


def _own(value: Any) -> Any:
    return _map(lambda x: x.own if isinstance(x, GpuTensor) else x, value)


def _check_devices(name: str, args: Any, given: list[Tensor]) -> None:
    if name in ("copy_", "_to_copy"):
        return
    if name.lstrip("_").startswith(("index", "unsafe_index")) and isinstance(args[1], list | tuple):
        given = [args[0], *args[2:3]]  # the indices alone may be on the CPU
    if any(not isinstance(each, GpuTensor) and each.ndim for each in given):
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")


def _note_waits(name: str, args: Any, there: bool, non_blocking: bool) -> None:
    indices = args[1] if "index" in name and isinstance(args[1], list | tuple) else ()
    if name in _WAITING or name == "repeat_interleave":
        counts.wait(name)
    elif any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices):
        counts.wait(f"{name} by a mask")
    elif any(isinstance(each, Tensor) and not isinstance(each, GpuTensor) for each in indices):
        counts.wait(f"{name} by an index of the host")
    elif name == "_to_copy" and not there and not non_blocking:
        counts.wait("copy to the host")
    elif name == "copy_" and isinstance(args[0], GpuTensor) != isinstance(args[1], GpuTensor) and not non_blocking:
        counts.wait("copy between devices")


class _Mode(TorchDispatchMode):
    """Sees operations without a GpuTensor among their arguments: new tensors, and copies to the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


MODE = _Mode()


# ---- kernels that have no CPU form


def _documents(bounds: Tensor, left: int | None):
    for start, stop in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        place = torch.arange(stop - start)
        seen = place <= place[:, None]
        if left is not None and left >= 0:
            seen &= place >= place[:, None] - left
        yield slice(start, stop), seen


def _scores(query: Tensor, key: Tensor, seen: Tensor, scale: float) -> Tensor:  # [H, T, T]
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float().repeat_interleave(groups, 1)) * scale
    return scores.masked_fill(~seen, -torch.inf)


def _flash_forward(query, key, value, bounds, key_bounds, *_, scale=None, window_size_left=None, **options):
    assert query.dtype in (torch.bfloat16, torch.float16), f"no flash attention in {query.dtype}"
    assert bounds.dtype == torch.int32
    groups, scale = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    out, lse = torch.zeros_like(query), torch.zeros(query.shape[1], len(query))
    for span, seen in _documents(bounds, window_size_left):
        scores = _scores(query[span], key[span], seen, scale)
        lse[:, span] = scores.logsumexp(-1)
        shared = value[span].float().repeat_interleave(groups, 1)
        out[span] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), shared).to(out.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), torch.empty(0)


def _flash_backward(d_out, query, key, value, out, lse, bounds, *_, scale=None, window_size_left=None, **options):
    groups, scale = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    d_query, d_key, d_value = (torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value))
    for span, seen in _documents(bounds, window_size_left):
        p = (_scores(query[span], key[span], seen, scale) - lse[:, span, None]).exp()
        d, o, q = (x[span].float() for x in (d_out, out, query))
        k, v = (x[span].float().repeat_interleave(groups, 1) for x in (key, value))
        ds = p * (torch.einsum("qhd,khd->hqk", d, v) - (d * o).sum(-1).T[:, :, None]) * scale
        d_query[span] = torch.einsum("hqk,khd->qhd", ds, k)
        d_key[span] = torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, (-1, groups)).sum(2)
        d_value[span] = torch.einsum("hqk,qhd->khd", p, d).unflatten(1, (-1, groups)).sum(2)
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)


def _add_product(total, a, b, dtype, *, out):
    return out.copy_(total + a.to(dtype) @ b.to(dtype))


def _histc(x, *args, **kwargs):
    return torch.ops.aten.histc.default(x.float(), *args, **kwargs).to(x.dtype)  # a CPU counts no integers


def _rms_norm(x, shape, weight, eps):
    return functional.rms_norm(x, shape, weight, eps), torch.empty(0)


_EMULATED = {
    torch.ops.aten._fused_rms_norm.default: _rms_norm,
    torch.ops.aten.histc.default: _histc,
    torch.ops.aten._flash_attention_forward.default: _flash_forward,
    torch.ops.aten._flash_attention_backward.default: _flash_backward,
    torch.ops.aten.addmm.dtype_out: _add_product,
}


# ---- what torch says about its devices

_real_tensor = torch.tensor


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dtype, device, copy = kwargs.get("dtype"), kwargs.get("device"), kwargs.get("copy", False)
    for given in args:
        if isinstance(given, Tensor):
            dtype, device = given.dtype, given.device
        elif isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, torch.device | str | int) and not isinstance(given, bool):
            device = given
    device = self.device if device is None else GPU if isinstance(device, int) else torch.device(device)
    if device.type == self.device.type and dtype in (None, self.dtype) and not copy:
        return self
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.aten._to_copy(self, dtype=dtype, device=device, non_blocking=kwargs.get("non_blocking", False))


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    made = _real_tensor(_own(data), **kwargs)
    return made if device is None else made.to(device)


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    made = data if isinstance(data, Tensor) else _tensor(data)
    return made.to(device=device or made.device, dtype=dtype or made.dtype)


class _Nothing:
    """Streams, events and device guards: there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, *others: Any) -> None:
        pass

    record = synchronize = wait_stream

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, other: Any) -> float:
        return 1.0


@pytest.fixture
def gpu(monkeypatch) -> Counts:
    """Make the machine have a GPU, an H100, and return what is counted on it."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a real GPU")
    with making_believe(monkeypatch):
        yield counts


@contextmanager
def making_believe(monkeypatch):
    # torch keeps the set of functions that `with torch.device(...)` redirects. The real ones have to be in it: else
    # models that the process loads later have buffers that nobody filled.
    _device_constructors()
    memory = 80 * 10**9
    facts = SimpleNamespace(name="NVIDIA H100 (make-believe)", total_memory=memory, major=9, minor=0)
    facts.multi_processor_count = 132
    answers = {
        "_lazy_init": None,
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": facts.name,
        "get_device_capability": (9, 0),
        "get_device_properties": facts,
        "is_bf16_supported": True,
        "mem_get_info": (memory, memory),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "graph_pool_handle": 0,
        "get_sync_debug_mode": 0,
        "set_sync_debug_mode": None,
        "set_device": None,
        "manual_seed": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "manual_seed_all": None,
        "is_current_stream_capturing": False,
        "current_stream": _Nothing(),
        "stream": _Nothing(),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    for name in ("device", "Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, _Nothing)
    monkeypatch.setattr(torch, "Event", _Nothing)
    monkeypatch.setattr("train.states.batch._LOADERS", 0)  # a process of a loader would see the real machine
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: counts.wait("synchronize"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: counts.wait("synchronize"))
    answers = {"is_available": True, "current_accelerator": GPU, "device_count": 1, "current_device_index": 0}
    answers["current_stream"] = _Nothing()
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *args, answer=answer, **kwargs: answer)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch, "tensor", _tensor)
    monkeypatch.setattr(torch, "as_tensor", _as_tensor)
    monkeypatch.setattr(Tensor, "to", _to)
    monkeypatch.setattr(Tensor, "cuda", lambda self, *args, **kwargs: self.to(GPU))
    monkeypatch.setattr(Tensor, "cpu", lambda self: self.to(CPU))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self, *args: self)
    run_thread = threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with _Mode():  # modes belong to a thread
            run_thread(thread)

    monkeypatch.setattr(threading.Thread, "run", run_in_mode)
    cudnn, overwrite = (
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.__future__.get_overwrite_module_params_on_conversion(),
    )
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)
    counts.__init__()
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with MODE:
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
