"""Files and folders that appear whole or not at all, inputs that are read only if they can be, the user's cache."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import get_native_id
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError

from speculator.errors import UserError, first_line, refuse

MOST_BYTES = 64 << 20
"""Of a small text file."""
_PARTIAL = ".partial"
_WAIT = 60  # seconds for who measures


def cache_folder() -> Path:
    """$SPECULATOR_CACHE, or `speculator` under the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("SPECULATOR_CACHE") or Path(home) / "speculator"))


@contextmanager
def cached_object(kind: str, name: str) -> Iterator[dict[str, Any]]:
    """A dict that is kept as JSON in the user's cache folder: read here, written back at the end.

    Others who ask for it wait, up to a minute. A missing or damaged one is empty; where nothing can be written, nothing
    is kept.
    """
    file = cache_folder() / kind / (re.sub(r"[^\w.+]+", "-", name) + ".json")
    content: dict[str, Any] = {}
    with ExitStack() as stack:
        with suppress(OSError, UserError):
            make_folder(file.parent)
            stack.enter_context(FileLock(f"{file}.lock", timeout=_WAIT))
        with suppress(OSError, ValueError):
            stored = json.loads(file.read_text())
            content |= stored if isinstance(stored, dict) else {}
        yield content
        with suppress(OSError, UserError):
            write_json(file, content)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of a text as UTF-8; half of a surrogate pair, which a path may have, as its escape."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, content: Any) -> None:
    """`write_text` of JSON, in which what is no finite number is null: JSON has no NaN."""
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(content), indent=1)
    write_text(path, text)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def take(lock: BaseFileLock, busy: str) -> None:
    """Take a lock at once. A file system without locks is passed over.

    Raises:
        UserError: another process has it: what `busy` says.
    """
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(busy) from None
    except (OSError, NotImplementedError):
        pass


def is_partial(path: Path) -> bool:
    """Whether it is what a kill left of a file that was being written."""
    return path.suffix == _PARTIAL


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file aside, flush it to disk, then rename it: under its name there is never half of it.

    A symlink stays; what it leads to is written.

    Raises:
        UserError: it can't be written, or is a folder, pipe or device.
    """
    scratch = None
    try:
        final = _destination(path)
        # Processes and threads that write the same file do not meet.
        scratch = final.with_name(f"{final.name}.{get_native_id()}{_PARTIAL}")
        with scratch.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(final)
    except (OSError, ValueError) as error:
        raise _unwritten(path, error) from None
    finally:
        if scratch:
            with suppress(OSError):
                scratch.unlink()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, that comes under its name, flushed to disk, when the block ends; if it raises, nothing is left.

    Gives the folder to write to, beside the final one; what a kill has left there is removed first.

    Raises:
        UserError: it can't be written, or something but an empty folder has its name.
    """
    scratch = None
    try:
        final = _real(path)
        scratch = final.with_name(f"{final.name}{_PARTIAL}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        for parent, _, names in os.walk(scratch):
            for name in names:
                with open(os.path.join(parent, name), "rb") as stream:
                    os.fsync(stream.fileno())
        scratch.replace(final)
    except (OSError, ValueError, SafetensorError) as error:
        foreign = getattr(error, "filename", None)
        if (isinstance(error, ValueError) and scratch) or (foreign and scratch and str(scratch) not in str(foreign)):
            raise  # of what the block reads
        raise _unwritten(path, error) from None
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def _destination(path: Path) -> Path:
    """The regular file that a name leads to, or will."""
    final = _real(path)
    refuse((final.exists() and not final.is_file(), f"can't write {path}: {_kind(final)}, not a file"))
    return final


def _real(path: Path) -> Path:
    real = Path(os.path.realpath(path))
    refuse((real.is_symlink(), f"can't write {path}: a symlink that leads to itself"))
    return real


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "a pipe or device"


def _unwritten(path: Path, error: Exception) -> UserError:
    return UserError(f"can't write {path}: {getattr(error, 'strerror', None) or first_line(error)}")


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    made = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            made.update(block)
    return made.hexdigest()


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


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
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
        UserError: its folder is not there, it is a folder, pipe or device itself, or it is where stdout or stderr go.
    """
    if file is None:
        return
    try:
        final = _real(file)
        there = final.stat() if final.exists() else None
        parent, writable = final.parent.is_dir(), os.access(final.parent, os.W_OK)
    except ValueError:
        raise UserError(f"{flag} {file}: not a path: it has a NUL in it") from None
    except OSError as error:
        raise UserError(f"{flag} {file}: {error.strerror}") from None
    refuse(
        (not parent, f"{flag} {file}: no folder {file.parent}"),
        (
            there and _is_shown(there),
            f"{flag} {file}: where this command prints to; take another file, or leave it out",
        ),
        (there and not final.is_file(), f"{flag} {file} is {_kind(final)}, not a file"),
        (not writable, f"{flag} {file}: the folder can't be written to"),
    )


def _is_shown(file: os.stat_result) -> bool:
    """Whether a file is this process's stdout or stderr, by whatever name."""
    for stream in (1, 2):
        with suppress(OSError):
            if os.path.samestat(file, os.fstat(stream)):
                return True
    return False


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a name that can't be a folder's, before there is anything to write.

    Raises:
        UserError: it has a NUL, or is something else, or lies below something else.
    """
    try:
        mode = os.stat(folder).st_mode
    except FileNotFoundError:
        return
    except ValueError:
        raise UserError(f"{flag} {folder}: not a path: it has a NUL in it") from None
    except OSError as error:
        raise UserError(f"{flag} {folder}: {error.strerror}") from None
    kind = "a file" if stat.S_ISREG(mode) else "a pipe or device"
    refuse((not stat.S_ISDIR(mode), f"{flag} {folder} is {kind}, not a folder"))


def make_folder(path: Path) -> None:
    """Have a folder to write to.

    Raises:
        UserError: it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"can't make the folder {path}: {getattr(error, 'strerror', None) or first_line(error)}"
        ) from None
