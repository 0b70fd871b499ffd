"""torch.compile for functions of many element-wise passes, which become one kernel: the loss, and noise on GPUs.

torch caches what it has compiled between runs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch.utils._triton import has_triton

from speculator.device import is_out_of_memory
from speculator.errors import first_line
from speculator.terminal import log

Result = TypeVar("Result")


def can_compile(device: torch.device) -> bool:
    """Return whether the compiler that torch.compile needs for this kind of device is installed."""
    if device.type == "cpu":
        return shutil.which(os.environ.get("CXX", "g++")) is not None
    return device.type == "cuda" and has_triton()


class Compiled(Generic[Result]):
    """A function that is compiled at its first call, for any number of rows.

    Args:
        function: the function. If the compiler fails, it runs as it is, with a warning.
        name: what the log calls it.
    """

    def __init__(self, function: Callable[..., Result], name: str):
        self.function, self.name = function, name
        self.work: Callable[..., Result] | None = None

    def __call__(self, *given: object) -> Result:
        if self.work is not None:
            return self.work(*given)
        # One kernel for any number of rows: every batch has another one, and compiling takes seconds.
        self.work = torch.compile(self.function, dynamic=True)
        started = time.perf_counter()
        try:
            result = self.work(*given)
        except Exception as error:  # of the compiler, which fails in many ways, before the function has run
            if is_out_of_memory(error):
                raise
            log(f"warning: {self.name} is not compiled, so it is slower: {first_line(error)}")
            self.work = self.function
            return self.work(*given)
        log(f"compiled {self.name} in {time.perf_counter() - started:.1f} s")
        return result
