"""`decoding.json` beside a head: what it drafts fastest, as `python -m eval tune` found."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speculator.drafters.fixed_tree import FixedTree
from speculator.drafters.shapes import Chain, Shape
from speculator.errors import UserError
from speculator.heads import Speculator

TUNED = "decoding.json"


def tuned_shape(folder: str | Path, temperature: float) -> Shape | None:
    """The shape for a temperature: tuned greedily for 0, for the nearest tuned one above it; None where none was.

    Raises:
        UserError: a file that is not what `tune` writes.
    """
    file = Path(folder) / TUNED
    if not file.is_file():
        return None
    try:
        settings: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["settings"]
        fitting = [each for each in settings if (each["temperature"] == 0) == (temperature == 0)]
        if not fitting:
            return None
        best = min(fitting, key=lambda each: abs(each["temperature"] - temperature))
        return FixedTree(best["tree"]) if "tree" in best else Chain(best["draft_length"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        raise UserError(f"{file} is not what `python -m eval tune` writes: make it anew, or delete it") from None


def tuned_shapes(folder: str | Path, head: Speculator, temperatures: Iterable[float]) -> dict[float, Shape | None]:
    """The shape for each temperature, as `tuned_shape` has it.

    Raises:
        UserError: a file that is not what `tune` writes, or that is for another head.
    """
    shapes = {temperature: tuned_shape(folder, temperature) for temperature in temperatures}
    for shape in shapes.values():
        if shape is not None and shape.depth > head.n_predict:
            raise UserError(f"{Path(folder) / TUNED} is for a head of {shape.depth} tokens: tune this one anew")
    return shapes


def described(shape: Shape) -> str:
    """A shape in words."""
    if isinstance(shape, FixedTree):
        return f"a tree of {shape.nodes} tokens, {shape.depth} deep"
    return f"{shape.depth} token{'s' * (shape.depth > 1)}"
