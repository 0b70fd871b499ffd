"""config.json and the weights in the folder of a target or a head."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculator.errors import UserError, first_line, refuse
from speculator.files import JsonObject, read_json, read_weight_map

CONFIG = "config.json"
ForeignConfig = dict[str, Any]
"""Content of a config.json that others wrote, before it is checked: its readers may fail at any malformed value."""
# In the order in which transformers prefers them; an index lists the shards of a large checkpoint.
SAFETENSORS = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = (*SAFETENSORS, "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_config(folder: Path) -> ForeignConfig:
    """Read the config.json of a head's folder."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no {CONFIG} in it, so not the folder of a head")
    return read_json(folder / CONFIG)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, by their stored names, to the CPU."""
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        tensors |= _read_file(file)
    return tensors


def read_names(folder: Path) -> set[str]:
    """Return the stored names of all tensors of a folder, without reading their values."""
    names: set[str] = set()
    for file in _weight_files(folder):
        if file.suffix == ".safetensors":
            with opened(file) as tensors:
                names.update(tensors.keys())
        else:
            names.update(_read_file(file, "meta"))
    return names


def write(folder: Path, config: JsonObject, tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors into an existing folder."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # safetensors refuses tensors that share memory, as tied ones and views do.
    unshared = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    weights = folder / "model.safetensors"
    save_file(unshared, weights, metadata={"format": "pt"})
    make_readable(weights)


def make_readable(weights: Path) -> None:
    """Give a safetensors file the mode of its config.json: the library lets only the owner read it, not a server."""
    weights.chmod((weights.parent / CONFIG).stat().st_mode)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights, shards included."""
    found = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise UserError(f"{folder}: no weights in it; expected one of {', '.join(WEIGHTS)}")
    if found.suffix != ".json":
        return [found]
    return [folder / name for name in sorted(set(read_index(found).values()))]


def read_index(file: Path) -> dict[str, str]:
    """Return {tensor name: file name} from an index of shards, all of which must be there."""
    shards = read_weight_map(file)
    for shard in sorted(set(shards.values())):
        refuse((not (file.parent / shard).is_file(), f"{file.parent}: the shard {shard} is missing"))
    return shards


def read_shards(folder: Path) -> dict[str, str]:
    """Return {tensor name: file name} of the model in a folder, from model.safetensors or its index of shards.

    Other safetensors files, such as an adapter's, are ignored. Shards of the index may be missing.
    """
    whole, index = (folder / name for name in SAFETENSORS)
    if index.is_file() and not whole.is_file():
        return read_weight_map(index)
    refuse((not whole.is_file(), f"{folder}: no {whole.name} in it, nor an index of shards"))
    with opened(whole) as file:
        return dict.fromkeys(file.keys(), whole.name)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Yield an open safetensors file, to read single tensors."""
    refuse((not file.is_file(), f"{file.parent}: the shard {file.name} is missing"))
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise UserError(f"{file}: damaged: {first_line(error)}") from None


def _read_file(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read a file's tensors by name; on the device "meta", those of a pickle without their values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles
            read = load_file(file) if file.suffix == ".safetensors" else torch.load(file, device, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{file}: damaged, or a pickle with more than weights in it, which is not opened") from None
    except Exception as error:  # a damaged file fails anywhere in the library that reads it
        raise UserError(f"{file}: damaged: {first_line(error)}") from None
    if not isinstance(read, dict) or not all(isinstance(value, Tensor) for value in read.values()):
        raise UserError(f"{file}: not a mapping of names to tensors")
    return read
