"""`decoding.json` beside a head: what it drafts fastest, as `python -m eval tune` found, and where it was measured."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speculator.checkpoints.loading import load_head
from speculator.drafters.fixed_tree import FixedTree
from speculator.drafters.head import HeadDrafter
from speculator.drafters.topology import Chain, Shape
from speculator.errors import UserError
from speculator.heads import Speculator
from speculator.sampling import Sampling
from speculator.stored import read_object
from speculator.target import Target, dtype_name, hardware

TUNED = "decoding.json"
_log = logging.getLogger(__name__)


def place(target: Target, batch_size: int) -> dict[str, Any]:
    """What a tuned shape depends on beside the head: the machine and its threads, the dtype, the batch size."""
    return {"hardware": hardware(target.device), "dtype": dtype_name(target.dtype), "batch_size": batch_size}


def tuned_drafter(
    folder: str | Path,
    target: Target,
    temperature: float = 0.0,
    batch_size: int = 1,
    head: Speculator | None = None,
) -> HeadDrafter:
    """The head of a folder, drafting what `tune` found fastest: for this temperature, where it was measured in this
    place (see `place`). Otherwise it drafts a chain of all it has, and a line on stderr says how to tune.

    Args:
        head: what `load_head` gave for the folder, where that was called before.

    Raises:
        UserError: as `load_head`, or a `decoding.json` that is not what `tune` writes, or for another head.
    """
    head = load_head(folder, target) if head is None else head
    return HeadDrafter(head, tuned_shapes(folder, target, head, [temperature], batch_size)[temperature])


def tuned_shapes(
    folder: str | Path, target: Target, head: Speculator, temperatures: Iterable[float], batch_size: int = 1
) -> dict[float, Shape | None]:
    """The shape for each temperature: tuned greedily for 0, for the nearest tuned one above it. None where none was, or
    not in this place, which a line on stderr says.

    Raises:
        UserError: a file that is not what `tune` writes, or that is for another head.
    """
    file, temperatures = Path(folder) / TUNED, list(temperatures)
    if not file.is_file():
        return dict.fromkeys(temperatures)
    here = place(target, batch_size)
    try:
        read = read_object(file)
        shapes = {temperature: _shape(read["settings"], temperature) for temperature in temperatures}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, UserError):
        raise UserError(f"{file} is not what `python -m eval tune` writes: make it anew, or delete it") from None
    for shape in shapes.values():
        if shape is not None and shape.depth > head.n_predict:
            raise UserError(f"{file} is for a head of {shape.depth} tokens: tune this one anew")
    there = {name: read.get(name) for name in here}
    if there != here and any(shapes.values()):
        _log.warning(
            f"{file} was measured {_told(there)}, and this is {_told(here)}: the head drafts a chain of "
            f"{head.n_predict}. To measure here: python -m eval tune --target {target.name} --speculator {folder} "
            f"--batch_size {batch_size}"
        )
        return dict.fromkeys(temperatures)
    return shapes


def _shape(settings: list[dict[str, Any]], temperature: float) -> Shape | None:
    if type(settings) is not list:
        raise TypeError(settings)
    fitting = [each for each in settings if Sampling(each["temperature"]).greedy == (temperature == 0)]
    if not fitting:
        return None
    best = min(fitting, key=lambda each: abs(each["temperature"] - temperature))
    return FixedTree(best["tree"]) if "tree" in best else Chain(best["draft_length"])


def _told(place: dict[str, Any]) -> str:
    if None in place.values():
        return "it does not say where"
    return f"{place['hardware']}, {place['dtype']}, batch size {place['batch_size']}"


def described(shape: Shape) -> str:
    """A shape in words."""
    if isinstance(shape, FixedTree):
        return f"a tree of {shape.nodes} tokens, {shape.depth} deep"
    return f"{shape.depth} token{'s' * (shape.depth > 1)}"
