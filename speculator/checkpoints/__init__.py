"""Checkpoint layouts, one file each, both ways: a trained head for a server, a server's head for this library."""

from __future__ import annotations

from pathlib import Path

from speculator.checkpoints import files
from speculator.checkpoints.arctic import ARCTIC
from speculator.checkpoints.arctic_lstm import ARCTIC_LSTM
from speculator.checkpoints.eagle3 import EAGLE3
from speculator.checkpoints.ibm import IBM
from speculator.checkpoints.layout import Layout, Server, load, save, tensor_shapes
from speculator.checkpoints.native import native_layout
from speculator.checkpoints.speculators import SPECULATORS
from speculator.checkpoints.vllm_plugin import VLLM_PLUGIN
from speculator.errors import UserError
from speculator.files import MANIFEST, manifest_error
from speculator.heads import ARCHITECTURES
from speculator.heads.base import Speculator

__all__ = [
    "FORMATS",
    "SERVER_LAYOUTS",
    "Layout",
    "Server",
    "layout_of",
    "layouts",
    "load",
    "load_any",
    "recognise",
    "save",
    "tensor_shapes",
]

SERVER_LAYOUTS = (IBM, ARCTIC, ARCTIC_LSTM, *VLLM_PLUGIN, EAGLE3, SPECULATORS)
FORMATS = (*dict.fromkeys(layout.name for layout in SERVER_LAYOUTS), "native")


def layouts() -> tuple[Layout, ...]:
    """All layouts: those of servers, and the native one of every registered head."""
    return (*SERVER_LAYOUTS, *map(native_layout, ARCHITECTURES.values()))


def layout_of(name: str, head: Speculator) -> Layout:
    """The layout of this name for a head of this kind.

    Raises:
        UserError: there is none.
    """
    fitting = {layout.name: layout for layout in layouts() if layout.head is type(head)}
    if name not in fitting:
        raise UserError(f"the {name} layout has no {type(head).__name__}; these have: {', '.join(fitting)}")
    return fitting[name]


def recognise(folder: str | Path) -> Layout:
    """The layout of a folder, by its config.json.

    Raises:
        UserError: no config.json, or one of another kind of model; or the folder was sealed, and is not as it was.
    """
    if (Path(folder) / MANIFEST).exists() and (problem := manifest_error(Path(folder))):
        raise UserError(f"{folder}: {problem}; if it was changed on purpose, delete {MANIFEST}")
    config = files.read_config(Path(folder))
    found = config.get("architectures")
    # A list; ArcticTraining's writer of MLP heads makes it a string, of the name that IBM gives them.
    names = found if isinstance(found, list) else [found]
    for layout in layouts():
        known_by = layout.mark is None or layout.mark in config
        if len(names) == 1 and names[0] in (layout.architecture, *layout.also) and known_by:
            if not isinstance(found, list) and layout.name == "arctic":
                raise UserError(f"{folder}: architectures is {found!r}, but arctic-inference takes a list of one only")
            return layout
    known = ", ".join(f"{layout.architecture} ({layout.name})" for layout in layouts())
    raise UserError(f"{folder}: architectures is {found!r} in its config.json; known: {known}")


def load_any(folder: str | Path) -> Speculator:
    """The head in a folder of any layout, on the CPU, in the dtype that it is stored in.

    Raises:
        UserError: as `recognise` and `load` do.
    """
    return load(folder, recognise(folder))
