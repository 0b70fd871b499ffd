"""A checkpoint folder on disk: its config.json, and its tensors from whichever file names hold them.

Everything comes back as it is stored; what the tensors ought to be is the layouts' business.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculator.errors import UserError, first_line

CONFIG = "config.json"
# In the order in which transformers prefers them. An index lists the files of a checkpoint that was cut in several.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UserError: it is not there, or is no JSON object.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f"{folder}: no {CONFIG} there, so not a speculator's folder")
    return _read_object(file)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's checkpoint by its stored name, on the CPU.

    Raises:
        UserError: no checkpoint, a shard that is missing or does not hold what the index says, a damaged file, or a
            pickle with anything but tensors in it.
    """
    for name in _WEIGHTS:
        file = folder / name
        if file.is_file():
            return _read_shards(file) if name.endswith(".index.json") else _read_file(file)
    raise UserError(f"{folder}: no weights there; looked for {', '.join(_WEIGHTS)}")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors; each tensor gets bytes of its own."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    weights = folder / "model.safetensors"
    save_file(own, weights, metadata={"format": "pt"})
    weights.chmod((folder / CONFIG).stat().st_mode)  # safetensors makes it the owner's alone; servers run as others


def _read_object(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(read, dict):
        raise UserError(f"{file}: not a JSON object")
    return read


def _read_shards(index: Path) -> dict[str, Tensor]:
    listed = _read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(shard, str) for shard in listed.values()):
        raise UserError(f"{index}: no weight_map from tensor names to file names in it")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(listed.values())):
        if Path(shard).name != shard:
            raise UserError(f"{index}: {shard!r} is not a file name")
        if not (index.parent / shard).is_file():
            raise UserError(f"{index.parent}: the shard {shard} is missing")
        held = _read_file(index.parent / shard)
        differing = set(held) ^ {name for name, where in listed.items() if where == shard}
        if differing:
            raise UserError(f"{index.parent}: {shard} and the index disagree on {', '.join(sorted(differing))}")
        tensors.update(held)
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        read = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{file}: damaged, or a pickle of more than weights, which is not opened") from None
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, BadZipFile, SafetensorError) as error:
        raise UserError(f"{file}: damaged: {first_line(error)}") from None
    if not isinstance(read, dict) or not all(isinstance(value, Tensor) for value in read.values()):
        raise UserError(f"{file}: not a plain mapping of names to tensors")
    return read
