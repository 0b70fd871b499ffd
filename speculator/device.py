"""Devices, dtypes and hardware, by the names in flags and reports."""

from __future__ import annotations

import os
from functools import cache

import torch

from speculator.about import processor
from speculator.errors import UserError
from speculator.terminal import log


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def hardware(device: torch.device) -> str:
    """Return one line about a device: the GPU's name, or the CPU's and torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {processor()}, {torch.get_num_threads()} threads"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's if that is on and x is not float64, else that of x."""
    kind = x.device.type
    narrow = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrow else x.dtype


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor's copy on a device; on a CPU the tensor itself. The host does not wait for a GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def exact(x: torch.Tensor) -> torch.Tensor:
    """Return x in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def has_accelerator() -> bool:
    """Return whether this process computes on an accelerator: not on a Mac's, see `resolve_device`."""
    return resolve_device().type != "cpu"


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Return the requested device; None: the accelerator if there is one that can be used, else the CPU.

    Raises a UserError for an unknown device, for CUDA without a GPU, and for Apple's GPUs ("mps"), which lack the
    64-bit floating point numbers that sampling needs.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator and accelerator.type == "mps":
            _log_mps()
        return accelerator if accelerator and accelerator.type != "mps" else torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UserError(f"device {device!r}: not a device of torch") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device!r}: this machine has no CUDA device")
    if found.type == "mps":
        raise UserError(f"device {device!r}: sampling needs 64-bit floating point numbers, which it lacks; use cpu")
    return found


@cache
def _log_mps() -> None:
    log("Apple's GPU lacks the 64-bit numbers that sampling needs: all runs on the CPU; llama.cpp uses this GPU")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that an allocation failed, on the CPU or a GPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
