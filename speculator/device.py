"""Where tensors are: devices and dtypes, as a user names them and a report shows them."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path

import torch

from speculator.errors import UserError


def dtype_name(dtype: torch.dtype) -> str:
    """As a user types it: float32."""
    return str(dtype).removeprefix("torch.")


def hardware(device: torch.device) -> str:
    """The machine in a line: GPU, or CPU and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {processor()}, {torch.get_num_threads()} threads"


def processor() -> str:
    """The CPU's name, family and model: virtual machines call several by one name."""
    with suppress(OSError):
        facts = dict(re.findall(r"^(.+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
        if "model name" in facts:
            return f"{facts['model name'].strip()} (family {facts.get('cpu family')}, model {facts.get('model')})"
    return platform.machine()


def cores() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def synchronize() -> None:
    """Wait for what was started on the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """The device asked for, or the accelerator if there is one, else the CPU.

    Raises:
        UserError: no such device, or CUDA asked for where there is none.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UserError(f"device {device!r}: torch knows no such device") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device!r} asked for, but this machine has no CUDA device")
    return place
