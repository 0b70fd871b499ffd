"""Heads on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download

from speculator.errors import UserError, first_line

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FILES = ["config.json", "README.md", "decoding.json", "forecast.json", "*.safetensors", "*.safetensors.index.json"]
"""Files of a head, at the top of its folder or repository; others stay there."""
PICKLES = ["pytorch_model*.bin*"]
"""Weights of a head that has no safetensors."""
MODEL_FILES = [*FILES, "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*"]
"""Files of a model, which has a tokenizer, a generation config and a chat template too."""


def is_hub_id(name: str | Path) -> bool:
    """Return whether a head's name is org/name and no path on this machine."""
    return bool(_HUB_ID.fullmatch(str(name))) and not os.path.exists(name)


def downloaded(name: str, revision: str | None = None, files: list[str] | None = None) -> Path:
    """Download a repository's files that the hub's cache lacks; return its folder there.

    `revision`: branch, tag or commit; None: the hub's default. `files`: patterns at the top level; None: all, in
    subfolders too.
    """
    below = None if files is None else ["*/*"]  # a * in a pattern crosses folders
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=below))
    except Exception as error:  # the network, the hub, the disk
        which = f" in revision {revision}" if revision else ""
        raise UserError(f"{name}: no such folder, and nothing came from the hub{which}: {first_line(error)}") from None
