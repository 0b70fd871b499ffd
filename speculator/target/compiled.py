"""torch.compile for functions and small modules: many element-wise passes become one kernel.

Of a target only regions are compiled: norms, MLPs, and the rotation of queries and keys. Attention and the cache stay
as they are. torch caches what it has compiled between runs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from torch.fx.experimental import _config as shapes
from torch.utils._triton import has_triton

from speculator.errors import first_line
from speculator.target.probe import gap, probed_logits, tolerance
from speculator.terminal import log

if TYPE_CHECKING:
    from speculator.target.model import Target

Result = TypeVar("Result")
DEVICES = ("cuda",)
"""Device types whose targets are compiled. On a CPU compiled MLPs are slower, without oneDNN's packed weights."""
_ROTATE = "apply_rotary_pos_emb"  # the function of all of transformers' families


def can_compile(device: torch.device) -> bool:
    """Return whether the compiler that torch.compile needs for this kind of device is installed."""
    if device.type == "cpu":
        return shutil.which(os.environ.get("CXX", "g++")) is not None
    return device.type == "cuda" and has_triton()


class Compiled(Generic[Result]):
    """A function that its first call compiles, for any number of rows.

    Args:
        function: stays as it is, with a warning, if the compiler fails.
        name: what the log calls it.
    """

    def __init__(self, function: Callable[..., Result], name: str):
        self.function, self.name = function, name
        self.work: Callable[..., Result] | None = None

    def __call__(self, *given: object) -> Result:
        if self.work is not None:
            return self.work(*given)
        self.work = torch.compile(self.function, dynamic=True)
        started = time.perf_counter()
        try:
            result = self.work(*given)
        except Exception as error:  # of the compiler, which fails in many ways, before the function has run
            log(f"warning: {self.name} is not compiled, so it is slower: {first_line(error)}")
            self.work = self.function
            return self.work(*given)
        log(f"compiled {self.name} in {time.perf_counter() - started:.1f} s")
        return result


def compile_regions(target: Target) -> None:
    """Compile the regions of a target, unless that changes its logits by more than the probe tolerates."""
    expected, started = probed_logits(target), time.perf_counter()
    changed = _install(target.model)
    if not changed:
        return
    try:
        # Neither a size of 1 nor two equal sizes are special cases, so later shapes need no compilation.
        with shapes.patch(backed_size_oblivious=True, use_duck_shape=False):  # type: ignore[attr-defined]
            with torch.inference_mode():  # as the engine does; training does not
                probed_logits(target)
            difference = gap(probed_logits(target), expected)
        reason = f"its logits differ by {difference:.2g} standard deviations"
        same = difference < tolerance(target.model)
    except Exception as error:  # of the compiler
        reason, same = first_line(error), False
    if same:
        names = ", ".join(sorted({type(module).__name__ for module in changed}))
        log(f"compiled parts of {names} in {time.perf_counter() - started:.1f} s")
    else:
        log(f"warning: {target.name} is not compiled, so it is slower: {reason}")
        for module in changed:
            del module.forward


def _install(model: nn.Module) -> list[nn.Module]:
    """Replace the forward pass of each region, and return the modules that have one of their own now."""
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
    changed = []
    for module in model.modules():
        forward: Any = type(module).forward
        if "forward" in vars(module):  # another library's hook
            continue
        if _is_region(module):
            function = compiled.setdefault(forward, torch.compile(forward, dynamic=True))
        elif _ROTATE in getattr(unwrap(forward), "__code__", _install.__code__).co_names:
            forward = unwrap(forward)  # transformers 5.24 has a decorator on it
            rotate = forward.__globals__[_ROTATE]
            rotate = compiled.setdefault(rotate, torch.compile(rotate, dynamic=True))
            names = {**forward.__globals__, _ROTATE: rotate}
            function = FunctionType(
                forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
            )
            function.__kwdefaults__ = forward.__kwdefaults__
        else:
            continue
        module.forward = partial(function, module)
        changed.append(module)
    return changed


def _is_region(module: nn.Module) -> bool:
    """Return whether a module is an MLP of plain matrices, or a norm that is not one kernel of torch already."""
    name, children = type(module).__name__, list(module.children())
    if name.endswith("MLP"):
        plain = all(isinstance(child, nn.Linear) or not list(child.parameters()) for child in children)
        return plain and not any(list(child.children()) for child in children)
    return not children and "Norm" in name and not type(module).__module__.startswith("torch.")
