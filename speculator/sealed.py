"""Folders whose files are known by their checksums: checkpoints, and the heads that a run publishes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from speculator.errors import UserError
from speculator.files import digest, parse_json, read_text, write_text

MANIFEST = "checksums.json"
_SETTLED = 2 * 10**9  # nanoseconds: a file may be changed twice under one time stamp
_known: dict[tuple, str] = {}


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
            found = _digest(folder / name)
        except (OSError, ValueError):
            return f"{name} is missing"
        if found != expected:
            return f"{name} does not match its checksum"
    return None


def _digest(file: Path) -> str:
    """SHA-256 of a file, which one process reads once for as long as the file is as it was."""
    stat = file.stat()
    key = (file.absolute(), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if key in _known:
        return _known[key]
    made = digest(file)
    if time.time_ns() - stat.st_ctime_ns > _SETTLED:
        _known[key] = made
    return made
