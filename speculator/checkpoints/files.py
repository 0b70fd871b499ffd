"""A checkpoint folder on disk: its config.json, and its tensors from whichever file names hold them.

Everything comes back as it is stored; what the tensors ought to be is the layouts' business.
"""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculator.errors import UserError, first_line
from speculator.target.stored import CONFIG, read_object, weight_files


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UserError: it is not there, or is no JSON object.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f"{folder}: no {CONFIG} there, so not a speculator's folder")
    return read_object(file)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's checkpoint by its stored name, on the CPU.

    Raises:
        UserError: no checkpoint, a shard that is missing or does not hold what the index says, a damaged file, or a
            pickle with anything but tensors in it.
    """
    tensors: dict[str, Tensor] = {}
    for file, listed in weight_files(folder).items():
        held = _read_file(file)
        differing = set() if listed is None else set(held) ^ listed
        if differing:
            raise UserError(f"{folder}: {file.name} and the index disagree on {', '.join(sorted(differing)[:4])}")
        tensors.update(held)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors; each tensor gets bytes of its own."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    weights = folder / "model.safetensors"
    save_file(own, weights, metadata={"format": "pt"})
    weights.chmod((folder / CONFIG).stat().st_mode)  # safetensors makes it the owner's alone; servers run as others


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unusual pickles
            read = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{file}: damaged, or a pickle of more than weights, which is not opened") from None
    except Exception as error:  # a damaged file fails anywhere in what reads it
        raise UserError(f"{file}: damaged: {first_line(error)}") from None
    if not isinstance(read, dict) or not all(isinstance(value, Tensor) for value in read.values()):
        raise UserError(f"{file}: not a plain mapping of names to tensors")
    for name, tensor in read.items():  # a pickle may spread one number over any shape
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(f"{file}: {name!r:.80} is {list(tensor.shape)}, but less than that is stored")
    return read
