"""Writing files whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from speculator.errors import UserError, first_line, refuse


def write_text(path: Path, text: str) -> None:
    """Write a file aside, flush it to disk, then rename it: under its name there is never half of it.

    Raises:
        UserError: it can't be written.
    """
    scratch = path.with_name(f"{path.name}.partial")
    try:
        with scratch.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise UserError(f"can't write {path}: {error.strerror}") from None


def parse_json(text: str, where: str) -> Any:
    """What a text says in JSON.

    Raises:
        UserError: it is no JSON, or nested deeper or with a longer number than Python reads.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: JSON that can't be read: {first_line(error)}") from None


def check_input(path: str | Path) -> Path:
    """A file that can be read to its end: regular, not a folder, pipe or device.

    Raises:
        UserError: it is none, or not there.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError:
        raise UserError(f"{path}: not a path: it has a NUL in it") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    refuse((not stat.S_ISREG(mode), f"{path}: {'a folder' if stat.S_ISDIR(mode) else 'a pipe or device'}, not a file"))
    return Path(path)


def read_text(path: str | Path, most: int = 64 << 20) -> str:
    """A small text file, such as a config or a manifest.

    Args:
        most: bytes; a larger file is refused unread.

    Raises:
        UserError: no regular file, larger than that, not to be read, or not UTF-8.
    """
    file = check_input(path)
    refuse((file.stat().st_size > most, f"{path}: {file.stat().st_size:,} bytes where at most {most:,} are expected"))
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def check_file(flag: str, file: Path | None) -> None:
    """Refuse a file that can't be written, before there is anything to write.

    Raises:
        UserError: its folder is not there, or it is a folder itself.
    """
    if file is not None:
        refuse(
            (not file.parent.is_dir(), f"{flag} {file}: no folder {file.parent}"),
            (file.is_dir(), f"{flag} {file} is a folder, not a file"),
            (not os.access(file.parent, os.W_OK), f"{flag} {file}: the folder can't be written to"),
        )


def make_folder(path: Path) -> None:
    """Have a folder to write to.

    Raises:
        UserError: it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't make the folder {path}: {error.strerror}") from None
