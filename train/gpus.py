"""The GPUs that `--plan` knows, by their makers' figures, and the devices that a run uses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from speculator.errors import UserError
from train.config import HERE


class Gpu(NamedTuple):
    """A GPU maker's figures: GB of memory, TB/s, and dense TFLOP/s in 16 bits and in float32."""

    memory: int
    bandwidth: float
    half: float
    single: float


GPUS = {
    "B200": Gpu(180, 8.0, 2250, 75),
    "H200": Gpu(141, 4.8, 989, 67),
    "H100": Gpu(80, 3.35, 989, 67),
    "A100": Gpu(80, 2.04, 312, 19.5),
    "L40S": Gpu(48, 0.864, 362, 91.6),
    "A10G": Gpu(24, 0.6, 70, 35),
    "L4": Gpu(24, 0.3, 121, 30.3),
    "RTX 4090": Gpu(24, 1.008, 165, 82.6),
    "RTX 3090": Gpu(24, 0.936, 71, 35.6),
    "V100": Gpu(32, 0.9, 125, 15.7),
    "T4": Gpu(16, 0.32, 65, 8.1),
}


@dataclass(frozen=True)
class Place:
    """The processes of a run and their devices, one for each.

    Attributes:
        memory: bytes of a device; None: unknown, as on a CPU.
        gpu: its maker's figures, if known.
    """

    processes: int
    name: str = "CPU"
    memory: int | None = None
    gpu: Gpu | None = None


def gpu_named(name: str) -> str | None:
    """Find the entry of `GPUS` that a device's name contains."""
    return next((known for known in GPUS if re.search(rf"(?<!\w){known}(?!\d)", name)), None)


def place_of(wanted: str, processes: int) -> Place:
    """Return this machine's devices, one for each process, if `wanted` is `HERE`; else the GPUs that it names.

    "8xH100" stands for 8 processes, whatever `processes` is. A GPU that `GPUS` lacks raises a UserError.
    """
    if wanted != HERE:
        named = re.fullmatch(r"(?:([1-9]\d{0,5})\s*x\s*)?([^,]+)", wanted)
        name = named and gpu_named(named[2].upper())
        if not named or not name:
            raise UserError(f"--plan {wanted}: name a GPU as in 8xH100; known: {', '.join(GPUS)}")
        return Place(int(named[1] or 1), name, GPUS[name].memory * 10**9, GPUS[name])
    if not torch.cuda.is_available():
        return Place(processes)
    own = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = gpu_named(own.name)
    return Place(processes, own.name, own.total_memory, GPUS[known] if known else None)
