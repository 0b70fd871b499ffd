"""`decoding.json` beside a head: what it drafts fastest, as `python -m eval tune` found, and where it was measured."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculator.checkpoints.loading import load_head
from speculator.device import dtype_name, hardware
from speculator.drafters.fixed_tree import FixedTree
from speculator.drafters.head import HeadDrafter
from speculator.drafters.topology import Chain, Shape
from speculator.errors import UserError
from speculator.heads import Speculator
from speculator.sampling import Sampling
from speculator.stored import read_object
from speculator.target import Target

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
    here, found = place(target, batch_size), _read(file, head)
    there = found.place | {"batch_size": batch_size if batch_size in found.settings else min(found.settings)}
    shapes = {each: _shape(found.settings[there["batch_size"]], each) for each in temperatures}
    if there != here and any(shapes.values()):
        _log.warning(
            f"{file} was measured {_named(there)}, and this is {_named(here)}: the head drafts a chain of "
            f"{head.n_predict}. To measure here: python -m eval tune --target {target.name} --speculator {folder} "
            f"--batch_size {batch_size}"
        )
        return dict.fromkeys(temperatures)
    return shapes


class Table:
    """What a head drafts for so many rows in flight.

    Args:
        settings: of each batch size that was tuned, the shapes for greedy rows (False) and for others (True).
        default: the shape where none was tuned.
    """

    def __init__(self, settings: dict[int, dict[bool, Shape | None]], default: Shape):
        self.settings, self.default = settings, default

    def shape(self, rows: int, sampled: bool) -> Shape:
        """As tuned for the smallest batch size of at least so many rows."""
        fitting = [size for size in self.settings if size >= rows]
        return (self.settings[min(fitting)][sampled] if fitting else None) or self.default

    @property
    def alone(self) -> Shape:
        """What `generate` drafts for one row above temperature 0."""
        return self.settings.get(1, {}).get(True) or self.default


def tuned_table(folder: str | Path, target: Target, head: Speculator, rows: int) -> Table:
    """The shapes for 1 to `rows` rows, above temperature 0 those tuned nearest to 1. Where some were not tuned in this
    place, a line on stderr says so.

    Raises:
        UserError: as `tuned_shapes`.
    """
    file, default = Path(folder) / TUNED, Chain(head.n_predict)
    settings: dict[int, dict[bool, Shape | None]] = {}
    if file.is_file():
        found, here = _read(file, head), place(target, 1)
        if all(here[name] == found.place[name] for name in found.place if name != "batch_size"):
            own = {size: each for size, each in found.settings.items() if size is not None}
            settings = {size: {False: _shape(each, 0.0), True: _shape(each, 1.0)} for size, each in own.items()}
    if max(settings, default=0) < rows:
        sizes = " ".join(f"--batch_size {1 << i}" for i in range((rows - 1).bit_length() + 1))
        _log.warning(
            f"{folder} is tuned here for {max(settings, default=0)} rows in flight, and {rows} may be: beyond, it "
            f"drafts a chain of {head.n_predict}. To measure here: python -m eval tune --target {target.name} "
            f"--speculator {folder} {sizes}"
        )
    return Table(settings, default)


@dataclass
class _Tuned:
    """What `decoding.json` says: where it was measured, and the settings of each batch size."""

    place: dict[str, Any]
    settings: dict[int, list[dict[str, Any]]]


def _read(file: Path, head: Speculator) -> _Tuned:
    try:
        read = read_object(file)
        if type(read["settings"]) is not list:
            raise TypeError(read["settings"])
        batch_size: Any = read.get("batch_size")
        settings: dict[Any, list[dict[str, Any]]] = {}
        for each in read["settings"]:
            settings.setdefault(each.get("batch_size", batch_size), []).append(each)
        shapes = [_shape(own, each["temperature"]) for own in settings.values() for each in own]
        if not all(type(size) is int for size in settings) and set(settings) != {None}:
            raise TypeError(settings)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, UserError):
        raise UserError(f"{file} is not what `python -m eval tune` writes: make it anew, or delete it") from None
    for shape in shapes:
        if shape is not None and shape.depth > head.n_predict:
            raise UserError(f"{file} is for a head of {shape.depth} tokens: tune this one anew")
    return _Tuned({name: read.get(name) for name in ("hardware", "dtype")}, settings or {batch_size: []})


def _shape(settings: list[dict[str, Any]], temperature: float) -> Shape | None:
    fitting = [each for each in settings if Sampling(each["temperature"]).greedy == (temperature == 0)]
    if not fitting:
        return None
    best = min(fitting, key=lambda each: abs(each["temperature"] - temperature))
    return FixedTree(best["tree"]) if "tree" in best else Chain(best["draft_length"])


def _named(place: dict[str, Any]) -> str:
    if None in place.values():
        return "it does not say where"
    return f"{place['hardware']}, {place['dtype']}, batch size {place['batch_size']}"


def described(shape: Shape) -> str:
    """A shape in words."""
    if isinstance(shape, FixedTree):
        return f"a tree of {shape.nodes} tokens, {shape.depth} deep"
    return f"{shape.depth} token{'s' * (shape.depth > 1)}"
