"""Checkpoint layouts, one file each: write a trained head for a server, and read a server's head."""

from __future__ import annotations

from pathlib import Path

from speculator.checkpoints import files, mtp
from speculator.checkpoints.arctic import ARCTIC
from speculator.checkpoints.block_drafters import DFLASH, DFLASH2, DSPARK, SPECULATORS_BLOCK
from speculator.checkpoints.eagle3 import EAGLE3
from speculator.checkpoints.gguf_file import GGUF
from speculator.checkpoints.hub import FILES, PICKLES, downloaded, is_hub_id
from speculator.checkpoints.ibm import IBM
from speculator.checkpoints.layout import Layout, Server, load, load_config, save, tensor_shapes
from speculator.checkpoints.mtp import MTP, is_model, shipped
from speculator.checkpoints.native import native_layout
from speculator.checkpoints.speculators import SPECULATORS
from speculator.checkpoints.transformers_dflash import TRANSFORMERS
from speculator.checkpoints.vllm_plugin import VLLM_PLUGIN
from speculator.errors import UserError, refuse, removed
from speculator.files import MANIFEST, manifest_error
from speculator.heads import ARCHITECTURES
from speculator.heads.base import Speculator, SpeculatorConfig

__all__ = [
    "FORMATS",
    "SERVER_LAYOUTS",
    "Layout",
    "Server",
    "config_of",
    "head_folder",
    "layout_of",
    "layouts",
    "load",
    "load_any",
    "recognise",
    "save",
    "shipped",
    "tensor_shapes",
]

SERVER_LAYOUTS = (
    *(IBM, ARCTIC, VLLM_PLUGIN, EAGLE3, SPECULATORS),
    *(SPECULATORS_BLOCK, DSPARK, DFLASH, DFLASH2, TRANSFORMERS, *GGUF, MTP),
)
"""Layouts that programs other than this library load."""
FORMATS = (*dict.fromkeys(layout.name for layout in SERVER_LAYOUTS), "native")
"""Names of all layouts."""


def layouts() -> tuple[Layout, ...]:
    """Return all layouts: those of servers, and the `native` layout of each registered head class."""
    return (*SERVER_LAYOUTS, *map(native_layout, ARCHITECTURES.values()))


def layout_of(name: str, head: Speculator) -> Layout:
    """Return the layout of this name for this kind of head."""
    fitting = {layout.name: layout for layout in layouts() if layout.head is type(head)}
    if name not in fitting:
        raise UserError(f"no {name} layout for a {type(head).__name__}; it has: {', '.join(fitting)}")
    return fitting[name]


def head_folder(name: str | Path, revision: str | None = None) -> Path:
    """Return the local folder of a head, which is named by a folder or a hub id.

    Files that the hub's cache lacks are downloaded, of a repository without a head only config.json. Raises a UserError
    for such a repository, and for the `revision` (branch, tag or commit) of a local folder.
    """
    if not is_hub_id(name):
        refuse((revision is not None, f"revision {revision}: {name} is no hub id, so has no revisions"))
        return Path(name)
    if _layout_by_config(downloaded(str(name), revision, [files.CONFIG])) is MTP:
        return mtp.head_folder(str(name), revision)
    folder = downloaded(str(name), revision, FILES)
    if not any((folder / weights).is_file() for weights in files.SAFETENSORS):
        downloaded(str(name), revision, PICKLES)
    return folder


def recognise(folder: str | Path) -> Layout:
    """Return the layout of the head in a folder or hub id, recognised by config.json.

    Raises a UserError if no layout fits, or if a file differs from its checksum in the folder's manifest (if any).
    """
    folder = head_folder(folder)
    if (folder / MANIFEST).exists() and (error := manifest_error(folder)):
        raise UserError(f"{folder}: {error}; if it was changed on purpose, delete {MANIFEST}")
    return _layout_by_config(folder)


def _layout_by_config(folder: Path) -> Layout:
    """Return the layout that a local folder's config.json names."""
    config = files.read_config(folder)
    found = config.get("architectures")
    # ArcticTraining writes MLP heads with a string, IBM's architecture, in place of the list.
    names = found if isinstance(found, list) else [found]
    readable = [layout for layout in layouts() if layout.write is None]
    for layout in readable:
        marked = layout.mark is None or layout.mark in config
        if len(names) == 1 and names[0] in (layout.architecture, *layout.also) and marked:
            if not isinstance(found, list) and layout.name == "arctic":
                raise UserError(f"{folder}: architectures is {found!r}; arctic-inference needs a list of one name")
            return layout
    if names == ["LlamaForCausalLM"] and "draft_vocab_size" in config:  # a head in EAGLE's own form, not a model
        return EAGLE3
    if is_model(config):
        return MTP
    refuse((any("LSTM" in str(name) for name in names), f"{folder}: {removed('architecture lstm')}"))
    known = ", ".join(f"{layout.architecture} ({layout.name})" for layout in readable)
    raise UserError(f"{folder}: architectures is {found!r} in its config.json; known: {known}")


def config_of(folder: str | Path) -> SpeculatorConfig:
    """Read the config of the head in a folder or hub id, in any layout, without checking its weights."""
    folder = head_folder(folder)
    return load_config(folder, _layout_by_config(folder))


def load_any(folder: str | Path) -> Speculator:
    """Load the head of a folder or hub id, in any layout, to the CPU, in its stored dtype."""
    folder = head_folder(folder)
    return load(folder, recognise(folder))
