"""Folders of checkpoints that are changed, and what they are then refused with."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from speculator import UserError
from speculator.checkpoints import load_any


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path) -> str:
    """The one line that a folder is refused with."""
    with pytest.raises(UserError) as error:
        load_any(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)
