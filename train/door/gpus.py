"""The GPUs that `--plan` knows, by their makers' figures, and the devices that a run uses."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from speculator.errors import UserError
from speculator.kernels.linear import product
from speculator.tables import gigabytes
from train.options.config import HERE


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
    "RTX 5090": Gpu(memory=32, bandwidth=1.792, half=210, single=105),
    "RTX 4090": Gpu(memory=24, bandwidth=1.008, half=165, single=82.6),
    "RTX 3090": Gpu(memory=24, bandwidth=0.936, half=71, single=35.6),
    "V100": Gpu(memory=32, bandwidth=0.9, half=125, single=15.7),
    "T4": Gpu(memory=16, bandwidth=0.32, half=65, single=8.1),
}


_CPU = "CPU"
_CONTEXT, _PYTHON = 2 * 10**9, 4 * 10**8
"""Bytes that CUDA, or Python and torch, may hold for this process beside its tensors."""


@dataclass(frozen=True)
class Place:
    """The processes of a run and their devices, one for each."""

    processes: int
    name: str = _CPU
    memory: int | None = None  # bytes of a device, or of this machine for each process on a CPU; None: unknown
    gpu: Gpu | None = None  # its maker's figures, or those measured of a CPU; None: unknown
    taken: int = 0  # bytes of a device that other processes hold, which `memory` leaves out

    @property
    def kind(self) -> str:
        """The device's kind, "cpu" or "cuda"."""
        return "cpu" if self.name == _CPU else "cuda"

    def holds(self, need: int, spare: bool) -> bool:
        """Return whether a device has `need` bytes, or is not known to have less.

        `spare` leaves room for what tensors do not tell: Python and torch on a CPU; on a GPU a tenth for fragments (a
        run reserved 50.4 GB for 45.6), CUDA's context and the buffers of NCCL.
        """
        if spare:
            need = need + _PYTHON if self.kind == "cpu" else need + need // 10 + _CONTEXT
        return self.memory is None or need <= self.memory

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
        here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Place(processes, memory=here // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    own = torch.cuda.get_device_properties(torch.cuda.current_device())
    known, (free, total) = gpu_named(own.name), torch.cuda.mem_get_info()
    taken = total - free - torch.cuda.memory_reserved()
    taken = taken if taken > _CONTEXT else 0
    gpu = GPUS[known] if known else None
    return Place(processes=processes, name=own.name, memory=own.total_memory - taken, gpu=gpu, taken=taken)


def timed(place: Place) -> Place:
    """Return a CPU's place with this machine's rates, measured in half a second, and a GPU's place as it is."""
    if place.kind != "cpu":
        return place
    operations, numbers = 2 * 1024**3, torch.ones(2**25)
    half, single = (
        operations / _seconds(partial(product, square, square)) / 1e12
        for square in (torch.ones(1024, 1024, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    )
    bandwidth = 4 * numbers.numel() / _seconds(numbers.sum) / 1e12
    return replace(place, gpu=Gpu(memory=0, bandwidth=bandwidth, half=half, single=single))


def _seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of five runs of some work."""

    def once() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return min(once() for _ in range(5))
