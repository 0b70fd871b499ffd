"""CUDA graphs: device work that is captured once and replayed, so that one launch stands for thousands.

A replay runs the captured kernels on the addresses that they had at capture, and no Python. So captured work must never
wait for the device, must read every changing number from tensors that stay in place, and must have shapes that the key
of the capture determines.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import inf
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from speculator.device import is_out_of_memory

Result = TypeVar("Result")
DEVICES = ("cuda",)
"""Device types whose work can be captured."""
MAX_GRAPHS = 64
"""Graphs that one engine keeps; the least recently used is freed. Keys are rows x cache bucket x sampling x shape."""
_PRICE = 40.0
"""What a capture costs, in replayed steps: three eager steps, two replays and the capture itself."""

enabled = True
"""Set to False for the rest of the process when captures of several keys have failed."""
_MAX_FAILURES = 3
"""Keys whose capture fails, or whose replay differs, before capturing is switched off."""
_RETRY = 256
"""Calls of a key that run eagerly after its capture failed for lack of memory."""
_CHECKED_REPLAYS = 2
_TOLERANCE = 1e-2
"""Largest difference between the results of a function and of its graph, which may round differently."""


@dataclass
class _Entry(Generic[Result]):
    """State of one key.

    Attributes:
        calls: number of calls that succeeded.
        graph: the CUDA graph; None until a call has captured it.
        result: what the function returned during capture; every replay overwrites its tensors.
    """

    calls: int = 0
    graph: Any = None
    result: Result | None = None


class Captured(Generic[Result]):
    """A function whose work is captured once per key.

    A key's first call runs eagerly, as a warm-up. The second is captured. In the first `_CHECKED_REPLAYS` replays the
    function also runs eagerly from the same state, and both results are compared. Later calls only replay. The result
    is the one returned during capture: every replay overwrites its tensors. If a capture fails or a replay differs, the
    eager result is used, and so is the function in later calls of the key; after a lack of memory the key is tried
    again. The third such key switches capturing off for the process, with a warning.

    Args:
        work: the function. A replay ignores its arguments.
        pool: memory pool shared with captures that never run at the same time.

    Attributes:
        prepared: calls so far, of all functions, that did more than replay; their time is not that of a step.
        failures: keys of all functions that can't be captured.
    """

    prepared = failures = 0

    def __init__(self, work: Callable[..., Result], pool: Any):
        self.work = work
        self.clear(pool)

    def clear(self, pool: Any) -> None:
        self.pool = pool
        self._entries: OrderedDict[Hashable, _Entry[Result]] = OrderedDict()
        self._failed: dict[Hashable, float] = {}
        """Number of further calls that run eagerly, by key."""
        self._saved: dict[Hashable, float] = {}
        """What graphs would have saved so far, by keys that have none."""

    def __call__(
        self,
        key: Hashable,
        state: Sequence[Tensor],  # all tensors that the function updates in place
        *arguments: Any,
    ) -> Result:
        """Return the function's result; calls of one key must launch the same kernels on the same addresses."""
        if not enabled or self._waits(key):
            return self.work(*arguments)
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        # Call 0 warms up, 1 captures, 1 and 2 are compared with an eager run. From call 3 on no Python runs but this.
        if entry.calls > _CHECKED_REPLAYS:
            entry.graph.replay()
            return entry.result  # type: ignore[return-value]
        Captured.prepared += 1
        if entry.calls == 0:
            self._evict()
            result = warm_up(self.work, *arguments)
        else:
            result = self._check(key, entry, state, *arguments)
        entry.calls += 1  # a call that failed, such as for lack of memory, does not count
        return result

    def pays(self, key: Hashable, saving: Callable[[], float]) -> bool:
        """Return whether to call this key in place of a coarser one, whose graph does more work for the same result.

        True once its calls would have saved what a capture costs, and from then on; False after a failed capture.

        Args:
            saving: gives the share of a step's time that a call saves.
        """
        if key in self._entries or key in self._failed:
            return key in self._entries
        self._saved[key] = saved = self._saved.get(key, 0.0) + saving()
        return saved >= _PRICE

    def _waits(self, key: Hashable) -> bool:
        """Return whether a key runs eagerly in this call, because its capture failed."""
        left = self._failed.pop(key, 0)
        if left > 1:
            self._failed[key] = left - 1
        return left > 0

    def _evict(self) -> None:
        """Free the least recently used graphs. Their memory in the pool serves the next captures."""
        while len(self._entries) > MAX_GRAPHS:
            key, entry = self._entries.popitem(last=False)
            self._saved.pop(key, None)
            if entry.graph is not None:
                entry.graph.reset()

    def _check(self, key: Hashable, entry: _Entry[Result], state: Sequence[Tensor], *arguments: Any) -> Result:
        """Return the graph's result if an eager run from `state` agrees; else drop the graph, return the eager one."""
        # The work changes the state in place, so the graph's run needs it put back first.
        before = [tensor.clone() for tensor in state]
        expected = self.work(*arguments)
        after = [tensor.clone() for tensor in state]
        eager = [tensor.clone() for tensor in tensors(expected)]
        _restore(state, before)
        try:
            if entry.graph is None:
                entry.graph, entry.result = capture(self.work, self.pool, *arguments)
            entry.graph.replay()
            if _all_close([*tensors(entry.result), *state], [*eager, *after]):
                return entry.result  # type: ignore[return-value]
            reason = "a replay differed from the step that was captured"
            left = inf
        except RuntimeError as error:
            reason = str(error.__context__ or error)
            full = any(is_out_of_memory(each) for each in (error, error.__context__) if isinstance(each, Exception))
            left = _RETRY if full else inf
        # The eager result stands: a wrong replay may have written anything into the state.
        _restore(state, after)
        self._drop(key, left, reason)
        return expected

    def _drop(self, key: Hashable, left: float, reason: str) -> None:
        """Free a key's graph, and run the key eagerly for `left` more calls (inf: always). Other keys keep theirs."""
        graph = self._entries.pop(key).graph
        if graph is not None:
            graph.reset()
        if self.pool is not None and not any(entry.graph for entry in self._entries.values()):
            self.pool = torch.cuda.graph_pool_handle()  # torch can't capture into a pool whose graphs are all gone
        self._failed[key] = left
        # Too little memory is not a failure: later there may be more.
        Captured.failures += left == inf
        if left != inf:
            torch.cuda.empty_cache()
        elif Captured.failures == _MAX_FAILURES:
            _switch_off(reason)


def _restore(state: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    # In place: a graph reads the addresses that the tensors had at its capture.
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)


def _all_close(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    # Token ids and counts must be equal; floats may round differently, and a request that fails has NaN in both.
    return len(a) == len(b) and all(
        torch.allclose(x, y, _TOLERANCE, _TOLERANCE, equal_nan=True) if x.is_floating_point() else torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


def _switch_off(reason: str) -> None:
    global enabled
    enabled = False
    warnings.warn(f"steps are not captured as CUDA graphs, so they are slower: {reason}", stacklevel=2)


def tensors(result: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tensor, a tuple of results, or a dataclass of them."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from tensors(part)
    elif is_dataclass(result):
        for field in fields(result):
            yield from tensors(getattr(result, field.name))


def capturable(target: Any, drafter: Any | None) -> bool:
    """Return whether the device supports captures and neither target nor drafter waits for the device."""
    on_device = enabled and target.device.type in DEVICES
    return on_device and target.capturable and (drafter is None or drafter.capturable)


def warm_up(work: Callable[..., Result], *given: Any) -> Result:
    """Run on a side stream, as torch requires before a capture: libraries initialise themselves in their first call."""
    device = torch.cuda.current_device()
    side = _stream("warm-up", device)
    # Streams run independently: the side stream must see the inputs, and the caller's stream the result.
    with _lock(device):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = work(*given)
        torch.cuda.current_stream().wait_stream(side)
    return result


def capture(work: Callable[..., Result], pool: Any, *given: Any) -> tuple[Any, Result]:
    """Capture what the function launches, without running it. Returns the graph and the result that a replay fills."""
    device = torch.cuda.current_device()
    graph, stream = torch.cuda.CUDAGraph(), _stream("capture", device)
    # A failed capture may leave its stream the current one. Other threads (data loader, process group) may use the
    # device meanwhile.
    with (
        _lock(device),
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        result = work(*given)
    return graph, result


@cache
def _stream(use: str, device: int) -> torch.cuda.Stream:
    """Return the one stream of a use and a device: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)


@cache
def _lock(device: int) -> RLock:
    """Return the lock of a device's streams: engines of two targets may capture in two threads."""
    return RLock()


def on(device: torch.device) -> AbstractContextManager:
    """Make this device the current one for streams, captures and replays."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def new_pool(device: torch.device) -> Any:
    """Return the handle of a new memory pool, for captures that never run at the same time; None without CUDA."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
