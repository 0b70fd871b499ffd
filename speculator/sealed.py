"""Folders whose files are known by their checksums: checkpoints, and the heads that a run publishes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from speculator.errors import UserError
from speculator.files import digest, parse_json, read_text, write_text

MANIFEST = "checksums.json"


def seal(folder: str | Path) -> None:
    """Make a finished folder durable and mark it whole.

    The files are flushed to disk first; the manifest comes under its name by a rename, so it is there entirely or
    not at all. A checkpoint without it was cut off while it was written.
    """
    folder = Path(folder)
    sums = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        sums[file.relative_to(folder).as_posix()] = digest(file)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    write_text(folder / MANIFEST, json.dumps(sums, indent=1))
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, in words; None if all that was sealed is as it was."""
    if not (folder / MANIFEST).exists():
        return f"it has no {MANIFEST}: it was cut off while being written"
    try:
        sums = parse_json(read_text(folder / MANIFEST), MANIFEST)
    except UserError:
        sums = None
    if not (isinstance(sums, dict) and sums and all(isinstance(value, str) for value in sums.values())):
        return f"its {MANIFEST} is damaged"
    for name, expected in sums.items():
        try:
            found = digest(folder / name)
        except (OSError, ValueError):
            return f"{name} is missing"
        if found != expected:
            return f"{name} does not match its checksum"
    return None
