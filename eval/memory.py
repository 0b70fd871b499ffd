"""How much memory something took at its height."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def kind(device: torch.device) -> str | None:
    """What `peak` counts on this machine; None where it can't be measured piece by piece."""
    if device.type == "cuda":
        return "allocated on the device"
    return "resident memory of the process" if _restart_resident() else None


def restart(device: torch.device) -> None:
    """Forget the height so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _restart_resident()


def peak(device: torch.device) -> int:
    """Bytes at the height since `restart`: of the device's memory, or of the process (Linux; 0 elsewhere)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def _restart_resident() -> bool:
    with suppress(OSError):
        _CLEAR.write_text("5")  # the kernel's word for: the height is what it is now
        return True
    return False
