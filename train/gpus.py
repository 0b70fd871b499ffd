"""The GPUs that `--plan` knows, by their makers' figures, and the devices that a run uses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from speculator.errors import UserError
from speculator.tables import gigabytes
from train.config import HERE


class Gpu(NamedTuple):
    """A GPU maker's figures: GB of memory, TB/s, and dense TFLOP/s in 16 bits and in float32."""

    memory: int
    bandwidth: float
    half: float
    single: float


GPUS = {
    "B200": Gpu(memory=180, bandwidth=8.0, half=2250, single=75),
    "H200": Gpu(memory=141, bandwidth=4.8, half=989, single=67),
    "H100": Gpu(memory=80, bandwidth=3.35, half=989, single=67),
    "A100": Gpu(memory=80, bandwidth=2.04, half=312, single=19.5),
    "L40S": Gpu(memory=48, bandwidth=0.864, half=362, single=91.6),
    "A10G": Gpu(memory=24, bandwidth=0.6, half=70, single=35),
    "L4": Gpu(memory=24, bandwidth=0.3, half=121, single=30.3),
    "RTX 4090": Gpu(memory=24, bandwidth=1.008, half=165, single=82.6),
    "RTX 3090": Gpu(memory=24, bandwidth=0.936, half=71, single=35.6),
    "V100": Gpu(memory=32, bandwidth=0.9, half=125, single=15.7),
    "T4": Gpu(memory=16, bandwidth=0.32, half=65, single=8.1),
}


_CONTEXT = 2 * 10**9
"""Bytes that CUDA itself may hold for this process."""


@dataclass(frozen=True)
class Place:
    """The processes of a run and their devices, one for each.

    Attributes:
        memory: bytes of a device; None: unknown, as on a CPU.
        gpu: its maker's figures, if known.
        taken: bytes of a device that other processes hold, which `memory` leaves out.
    """

    processes: int
    name: str = "CPU"
    memory: int | None = None
    gpu: Gpu | None = None
    taken: int = 0

    @property
    def advice(self) -> str:
        """What to do about other processes on the device; "" without them."""
        if not self.taken:
            return ""
        return (
            f". Other processes hold {gigabytes(self.taken)} GB of this GPU: name another one by CUDA_VISIBLE_DEVICES, "
            "or let the server take less (--gpu-memory-utilization)"
        )


def gpu_named(name: str) -> str | None:
    """Return the key of `GPUS` that a device's name contains; None: there is none."""
    return next((known for known in GPUS if re.search(rf"(?<!\w){known}(?!\d)", name)), None)


def place_of(wanted: str, processes: int) -> Place:
    """Return this machine's devices, one for each process, if `wanted` is `HERE`; else the GPUs that it names.

    "8xH100" stands for 8 processes, whatever `processes` is; "A100-40GB" has another memory than `GPUS` says. A GPU
    that `GPUS` lacks raises a UserError.
    """
    if wanted != HERE:
        named = re.fullmatch(r"(?:([1-9]\d{0,5})\s*x\s*)?([^,]+)", wanted)
        name = named and gpu_named(named[2].upper())
        if not named or not name:
            raise UserError(f"--plan {wanted}: name a GPU as in 8xH100 or 4xA100-40GB; known: {', '.join(GPUS)}")
        stated = re.search(r"[- ]([1-9]\d{0,4}) ?GB?\b", named[2].upper())
        memory = int(stated[1]) if stated else GPUS[name].memory
        return Place(processes=int(named[1] or 1), name=name, memory=memory * 10**9, gpu=GPUS[name])
    if not torch.cuda.is_available():
        return Place(processes)
    own = torch.cuda.get_device_properties(torch.cuda.current_device())
    known, (free, total) = gpu_named(own.name), torch.cuda.mem_get_info()
    taken = total - free - torch.cuda.memory_reserved()
    taken = taken if taken > _CONTEXT else 0
    gpu = GPUS[known] if known else None
    return Place(processes=processes, name=own.name, memory=own.total_memory - taken, gpu=gpu, taken=taken)
