"""Where a run is to be: processes, and what the makers of GPUs say of these."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from speculator.errors import UserError
from train.config import HERE


@dataclass(frozen=True)
class Gpu:
    """What its maker says of it: GB of memory, TB/s, and dense TFLOP/s of products in 16 bits and in float32."""

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


def gpu_named(name: str) -> str | None:
    """Which of `GPUS` a device's own name says it is."""
    return next((known for known in GPUS if re.search(rf"(?<!\w){known}(?!\d)", name)), None)


@dataclass(frozen=True)
class Place:
    """Where a run is to be: so many processes, each on a GPU or on the CPU.

    Attributes:
        name: of the GPU or the CPU.
        memory: bytes that each has; None where nobody knows.
        gpu: its figures, if it is one of `GPUS`.
        shards: processes that hold the target together.
    """

    kind: str
    processes: int
    name: str
    memory: int | None = None
    gpu: Gpu | None = None
    shards: int = 1

    @property
    def copies(self) -> int:
        """Of the target. The processes of one decode the same rows."""
        return self.processes // self.shards

    @classmethod
    def of(cls, wanted: str, processes: int) -> Place:
        """Where this process is, or GPUs by count and name, such as 8xH100.

        Raises:
            UserError: no such GPU is known.
        """
        if wanted != HERE:
            named = re.fullmatch(r"(?:(\d{1,6})\s*x\s*)?(.+)", wanted)
            name = named and gpu_named(named[2].upper())
            if not named or not name or "," in wanted or int(named[1] or 1) < 1:
                raise UserError(f"--plan {wanted}: a GPU is named as in 8xH100; known are {', '.join(GPUS)}")
            return cls("cuda", int(named[1] or 1), name, GPUS[name].memory * 10**9, GPUS[name])
        if not torch.cuda.is_available():
            return cls("cpu", processes, "CPU")
        own = torch.cuda.get_device_properties(torch.cuda.current_device())
        known = gpu_named(own.name)
        return cls("cuda", processes, own.name, own.total_memory, GPUS[known] if known else None)
