"""`speculator push`: upload a head's folder to the Hugging Face hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import filter_repo_objects

from speculator.checkpoints import gguf_file, load, recognise
from speculator.checkpoints.card import NAME, card_of, public_name
from speculator.checkpoints.files import CONFIG
from speculator.checkpoints.hub import FILES, MODEL_FILES, PICKLES
from speculator.checkpoints.mtp import MTP
from speculator.errors import UserError, check_secret, hide, refuse
from speculator.files import read_json, write_json, write_text
from speculator.target.gguf.file import metadata


def run(arguments: argparse.Namespace) -> None:
    """Load the head, which checks it, create the repository unless it exists, and upload the head's files."""
    folder, repo = arguments.speculator, arguments.repo_id
    refuse((not folder.is_dir(), f"--speculator {folder}: no such folder on this machine"))
    patterns = _checked(folder)
    token = get_token() or ""
    refuse((not token, "no token for the hub: `hf auth login` stores one, or set HF_TOKEN"))
    check_secret("the hub's token", token)
    api = HfApi()
    with TemporaryDirectory() as copies:
        _stage(folder, Path(copies), patterns)
        try:
            made = api.create_repo(repo, private=arguments.private or None, exist_ok=True)
            # The hub ignores `private` if the repository exists.
            public = arguments.private and not api.repo_info(made.repo_id).private
            refuse((public, "--private, but this repository exists and is public; nothing was uploaded"))
            if not (folder / NAME).is_file() and api.file_exists(made.repo_id, NAME):
                (Path(copies) / NAME).unlink(missing_ok=True)  # someone may have edited the one there
            commit = api.upload_folder(
                repo_id=made.repo_id, folder_path=copies, commit_message=f"Draft head from {folder.resolve().name}"
            )
        except Exception as error:  # the network, the hub, the disk
            raise UserError(f"can't push to {repo} at {api.endpoint}: {hide(str(error), token)}") from None
    print(f"{folder}: pushed to {commit.repo_url}")


def _checked(folder: Path) -> list[str]:
    """Load the head of a folder, which checks it; return patterns of the files to upload."""
    if (folder / gguf_file.FILE).is_file() and not (folder / CONFIG).is_file():
        metadata(str(folder / gguf_file.FILE))
        return [gguf_file.FILE, NAME]
    layout = recognise(folder)
    load(folder, layout)
    return MODEL_FILES if layout is MTP else [*FILES, *PICKLES]


def _stage(folder: Path, copies: Path, patterns: list[str]) -> None:
    """Fill a folder with links to the files to upload, a config.json without paths of this machine, and a card."""
    names = [file.name for file in folder.iterdir() if file.is_file()]
    for name in filter_repo_objects(names, allow_patterns=patterns):
        if name == CONFIG:
            write_json(copies / name, _public(read_json(folder / name)))
        else:
            (copies / name).symlink_to((folder / name).resolve())
    if NAME not in names and CONFIG in names:
        write_text(copies / NAME, card_of(folder))


def _public(content: Any) -> Any:
    """Return a copy of JSON content with absolute paths reduced to their last parts, as in the card."""
    if isinstance(content, dict):
        return {name: _public(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_public(value) for value in content]
    return public_name(content) if isinstance(content, str) else content
