"""Heads on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from speculator.errors import UserError, first_line, refuse

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FILES = [
    "config.json",
    "README.md",
    "decoding.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin*",
]
"""Files of a head; others in its folder or repository stay there."""


def is_hub_id(name: str | Path) -> bool:
    """Return whether a head's name is org/name and no path on this machine."""
    return bool(_HUB_ID.fullmatch(str(name))) and not os.path.exists(name)


def head_folder(name: str | Path, revision: str | None = None, whole: bool = False) -> Path:
    """Return the folder of a head; a hub id is downloaded into the hub's cache first, or found there.

    Args:
        whole: download all files, not those of a head alone.
    """
    if not is_hub_id(name):
        refuse((revision is not None, f"revision {revision}: {name} is no hub id, so has no revisions"))
        return Path(name)
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=None if whole else FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        which = f" in revision {revision}" if revision else ""
        raise UserError(f"{name}: no such folder, and no head on the hub{which}: {first_line(error)}") from None
