"""Detect operations in which the host waits for the device; a CUDA graph can't contain them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def has_host_sync(work: Callable[[], Any], device: torch.device) -> bool:
    """Run the work, up to twice; return whether the host waits for a GPU in it (on a CPU: whether it would)."""
    with HostSyncs() as found:
        work()
    if found.names or device.type != "cuda":
        return bool(found.names)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")  # also catches waits inside operators
    try:
        work()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


class HostSyncs(TorchDispatchMode):
    """Records the names of operations that move a number between device and host."""

    _SYNCING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh", "unique")

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode composite operations are not decomposed
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
            self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation's name to `names` if the host waits in it."""
        name = func.name().split("::")[-1].split(".")[0]
        # An index by booleans has as many results as there are True ones: the host must count them.
        index = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        moved = name == "_to_copy" and result.device != args[0].device
        if name.startswith(self._SYNCING) or moved or any(getattr(part, "dtype", None) == torch.bool for part in index):
            self.names.append(name)
