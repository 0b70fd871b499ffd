"""CUDA graphs: work on a device that is captured once and replayed, so that one launch stands for thousands.

A replay runs the captured kernels on the addresses that they had at capture, and no Python. So what is captured must
ask the device nothing, take every number that changes from tensors that stay in place, and have shapes that the key of
the capture decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")
DEVICES = ("cuda",)
"""Kinds of devices whose work can be captured."""


class CaptureError(RuntimeError):
    """The work can't be captured; nothing of it was done."""


class Captured(Generic[Result]):
    """A function whose work is captured once per key.

    A key's first call runs as it is, which warms up and counts as any other; the second is captured and replayed, and
    all later ones are replayed. The result is what the capture returned: its tensors are overwritten by every replay.

    Args:
        work: the function; what it is called with at later replays of a key is ignored.
        pool: the memory that it shares with other captures, which must not run at the same time.

    Attributes:
        prepared: calls so far, of all functions, that warmed up or captured: their time is not a step's.

    Raises:
        CaptureError: the device refused the capture.
    """

    prepared = 0

    def __init__(self, work: Callable[..., Result], pool: Any):
        self.work, self.pool = work, pool
        self._graphs: dict[Hashable, tuple[Any, Result] | None] = {}

    def __call__(self, key: Hashable, *given: Any) -> Result:
        if key not in self._graphs:
            Captured.prepared += 1
            result = warm_up(self.work, *given)
            self._graphs[key] = None
            return result
        captured = self._graphs[key]
        if captured is None:
            Captured.prepared += 1
            try:
                captured = self._graphs[key] = capture(self.work, self.pool, *given)
            except RuntimeError as error:
                raise CaptureError(str(error.__context__ or error)) from error
        graph, result = captured
        graph.replay()
        return result


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
