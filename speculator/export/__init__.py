"""Checkpoint layouts, one file each, both ways: a trained head for a server, a server's head for this library."""

from __future__ import annotations

from pathlib import Path

from speculator.errors import UserError
from speculator.export import files
from speculator.export.arctic import ARCTIC
from speculator.export.ibm import IBM
from speculator.export.layout import Layout, Server, load, save, table
from speculator.export.native import NATIVE
from speculator.heads.mlp import MLPSpeculator

__all__ = ["LAYOUTS", "Layout", "Server", "load", "load_any", "recognise", "save", "table"]

LAYOUTS = {layout.name: layout for layout in (IBM, ARCTIC, NATIVE)}


def recognise(folder: str | Path) -> Layout:
    """The layout of a folder, by its config.json.

    Raises:
        UserError: no config.json, or one of another kind of model.
    """
    found = files.read_config(Path(folder)).get("architectures")
    # A list; ArcticTraining's writer makes it a string.
    names = found if isinstance(found, list) else [found]
    for layout in LAYOUTS.values():
        if names == [layout.architecture]:
            return layout
    known = ", ".join(f"{layout.architecture} ({layout.name})" for layout in LAYOUTS.values())
    raise UserError(f"{folder}: architectures is {found!r} in its config.json; known: {known}")


def load_any(folder: str | Path) -> MLPSpeculator:
    """The head in a folder of any layout, on the CPU, in the dtype that it is stored in.

    Raises:
        UserError: as `recognise` and `load` do.
    """
    return load(folder, recognise(folder))
