"""Which checkpoints are whole: a manifest of checksums, written last."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from speculator.files import write_text

MANIFEST = "checksums.json"


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def seal(folder: str | Path) -> None:
    """Make a finished checkpoint durable and mark it whole.

    The files are flushed to disk first; the manifest comes under its name by a rename, so it is there entirely or
    not at all. A checkpoint without it was cut off while being written.
    """
    folder = Path(folder)
    sums = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        sums[file.relative_to(folder).as_posix()] = _sha256(file)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    write_text(folder / MANIFEST, json.dumps(sums, indent=1))
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if it is whole."""
    try:
        sums = json.loads((folder / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError):
        return "it was cut off while being written"
    for name, expected in sums.items():
        try:
            found = _sha256(folder / name)
        except OSError:
            return f"{name} is missing"
        if found != expected:
            return f"{name} does not match its checksum"
    return None


def newest(stage: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a stage's folder, and a line for each newer one that is not whole."""
    passed_over: list[str] = []
    folders = sorted(stage.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True)
    for folder in folders:
        problem = damage(folder)
        if problem is None:
            return folder, passed_over
        passed_over.append(f"passing over {folder}: {problem}")
    return None, passed_over
