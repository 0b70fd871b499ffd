"""CUDA graphs: work on a device that is captured once and replayed, so that one launch stands for thousands.

A replay runs the captured kernels on the addresses that they had at capture, and no Python. So what is captured must
ask the device nothing, take every number that changes from tensors that stay in place, and have shapes that the key of
the capture decides.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")
DEVICES = ("cuda",)
"""Kinds of devices whose work can be captured."""


enabled = True
"""Whether anything is captured: off for the process once a graph was refused, or did not do what its function does."""
_PROVING = 2
_TOLERANCE = 1e-2
"""Between the states that a function and its graph leave, which may round otherwise; whole numbers must be equal."""


class Captured(Generic[Result]):
    """A function whose work is captured once per key.

    A key's first call runs as it is, which warms up and counts as any other. The second is captured, and that graph
    proves itself: for `_PROVING` calls the function runs too, from the same state, and what both give and leave is
    compared. All later calls are replays. The result is what the capture returned: its tensors are overwritten by every
    replay. Where a capture is refused or a replay differs, the function's own result stands, nothing is captured any
    more in this process, and a warning says so.

    Args:
        work: the function; what it is called with at later replays of a key is ignored.
        pool: the memory that it shares with other captures, which must not run at the same time.

    Attributes:
        prepared: calls so far, of all functions, that did not replay alone: their time is not a step's.
    """

    prepared = 0

    def __init__(self, work: Callable[..., Result], pool: Any):
        self.work, self.pool = work, pool
        self._graphs: dict[Hashable, tuple[Any, Result]] = {}
        self._calls: Counter[Hashable] = Counter()

    def __call__(
        self,
        key: Hashable,
        state: Sequence[Tensor],  # what the function updates in place
        *given: Any,
    ) -> Result:
        if not enabled:
            return self.work(*given)
        self._calls[key] += 1
        if self._calls[key] > 1 + _PROVING:
            graph, result = self._graphs[key]
            graph.replay()
            return result
        Captured.prepared += 1
        if self._calls[key] == 1:
            return warm_up(self.work, *given)
        return self._prove(key, state, *given)

    def _prove(self, key: Hashable, state: Sequence[Tensor], *given: Any) -> Result:
        before = [tensor.clone() for tensor in state]
        expected = self.work(*given)
        after = [tensor.clone() for tensor in state]
        eager = [tensor.clone() for tensor in tensors(expected)]
        _restore(state, before)
        try:
            if key not in self._graphs:
                self._graphs[key] = capture(self.work, self.pool, *given)
            graph, result = self._graphs[key]
            graph.replay()
            if _alike([*tensors(result), *state], [*eager, *after]):
                return result
            reason = "a replay differed from the step that was captured"
        except RuntimeError as error:
            reason = str(error.__context__ or error)
        _restore(state, after)
        _switch_off(reason)
        return expected


def _restore(state: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)


def _alike(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.allclose(x, y, rtol=_TOLERANCE, atol=_TOLERANCE) if x.is_floating_point() else torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


def _switch_off(reason: str) -> None:
    global enabled
    enabled = False
    warnings.warn(f"steps are not captured as CUDA graphs, so they are slower: {reason}", stacklevel=2)


def tensors(result: Any) -> Iterator[Tensor]:
    """Those of a tensor, a tuple of results, or a dataclass of them."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from tensors(part)
    elif is_dataclass(result):
        for field in fields(result):
            yield from tensors(getattr(result, field.name))


def capturable(target: Any, drafter: Any | None) -> bool:
    """Whether steps run as graphs: on a device that can, where neither the target's code nor the drafter needs the
    host."""
    able = target.device.type in DEVICES and target.capturable and (drafter is None or drafter.capturable)
    return able and enabled


def warm_up(work: Callable[..., Result], *given: Any) -> Result:
    """Run on a side stream, as torch asks for before a capture: libraries set themselves up at their first call."""
    side = _stream("warm-up", torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = work(*given)
    torch.cuda.current_stream().wait_stream(side)
    return result


def capture(work: Callable[..., Result], pool: Any, *given: Any) -> tuple[Any, Result]:
    """A graph of what the function launches, which does not run yet, and the result that a replay fills."""
    graph, stream = torch.cuda.CUDAGraph(), _stream("capture", torch.cuda.current_device())
    # A capture that fails may leave its stream the current one. Other threads may go on using the device: a data
    # loader's, a process group's.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        result = work(*given)
    return graph, result


@cache
def _stream(use: str, device: int) -> torch.cuda.Stream:
    """One for each use and device: libraries keep workspaces for every stream that they have seen."""
    return torch.cuda.Stream(device)


def on(device: torch.device) -> AbstractContextManager:
    """Streams, captures and replays are those of this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def new_pool(device: torch.device) -> Any:
    """Memory for captures that never run at the same time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def asks_device(work: Callable[[], Any], device: torch.device) -> bool:
    """Whether the host waits for an answer of the device in this work, seen by running it."""
    with Asked() as asked:
        work()
    if asked.names or device.type != "cuda":
        return bool(asked.names)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")  # also sees what kernels do among themselves
    try:
        work()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


class Asked(TorchDispatchMode):
    """Notes the operations that move a number between the device and the host: no graph can hold one."""

    _ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh", "unique")

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode an operation that is made of others comes whole
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
            self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.name().split("::")[-1].split(".")[0]
        chosen = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        moved = name == "_to_copy" and result.device != args[0].device
        if name.startswith(self._ASKING) or moved or any(getattr(part, "dtype", None) == torch.bool for part in chosen):
            self.names.append(name)
