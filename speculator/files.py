"""Read text, JSON and JSON lines; write files and folders atomically; lock; record and verify checksums."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

from filelock import BaseFileLock, FileLock, Timeout

from speculator.errors import UserError, first_line, refuse
from speculator.terminal import log

MANIFEST = "checksums.json"
"""Name of the file with a folder's checksums, see `write_manifest`."""
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value of JSON that others wrote, before it is checked."""
JsonObject: TypeAlias = dict[str, Json]
"""An object of JSON, such as a config.json to write."""
_PARTIAL = ".partial"
_CACHE_LOCK_SECONDS = 60
_OTHER_CACHE = "set SPECULATOR_CACHE to a writable folder"


def check_input(path: str | Path) -> Path:
    if not os.path.isfile(path):
        raise UserError(f"{path}: {'not a regular file' if os.path.exists(path) else 'No such file'}")
    return Path(path)


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file; raise a UserError if it is missing or has another encoding."""
    try:
        return check_input(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def parse_json(text: str, where: str) -> Any:
    """Parse JSON; raise a UserError that begins with `where`, the origin of the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {getattr(error, 'msg', first_line(error))}") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file; raise a UserError unless it holds an object."""
    content = parse_json(read_text(file), str(file))
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object")
    return content


def read_weight_map(file: Path) -> dict[str, str]:
    """Return {tensor name: file name} from an index of shards; the files are in its folder, if they exist."""
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise UserError(f"{file}: no weight_map in it")
    for shard in sorted(set(shards.values())):
        # Shards are read and, in a copy of the folder, written by names that come from whoever published it.
        if shard in ("", "..") or shard != Path(shard).name:
            raise UserError(f"{file}: the shard {shard!r} is not the name of a file in its folder")
    return shards


@contextmanager
def open_binary(file: Path) -> Iterator[IO[bytes]]:
    """Yield the stream of a file's bytes, decompressed if its name ends in .gz; errors of reading are UserErrors."""
    check_input(file)
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as stream:
            yield stream  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: {getattr(error, 'strerror', None) or error}") from None


def parse_rows(file: Path) -> Iterator[tuple[int, Any, str | None]]:
    """Yield (line number from 1, row, error) of each non-blank line of JSON lines; the row or the error is None."""
    with open_binary(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                # The first line may begin with a byte order mark, as Windows' editors write it.
                yield number, parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"), ""), None
            except UnicodeDecodeError as error:
                yield number, None, f"not UTF-8 text: {error.reason}"
            except UserError as error:
                yield number, None, str(error).removeprefix(": ")


def read_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield ("FILE:LINE", parsed row) of each non-blank line of JSON lines; an invalid one raises a UserError."""
    for number, row, error in parse_rows(file):
        if error:
            raise UserError(f"{file}:{number}: {error}")
        yield f"{file}:{number}", row


def check_output_file(flag: str, file: Path | None) -> None:
    """Raise a UserError that begins with `flag` if a file can't be written (None passes); called before the work."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise UserError(f"{flag} {file}: no folder {file.parent}")
    if file.exists() and not file.is_file():
        raise UserError(f"{flag} {file}: not a regular file")
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"{flag} {file}: the folder can't be written to")


def check_output_folder(flag: str, folder: Path) -> None:
    """Raise a UserError that begins with `flag` if a folder can't be made or written to; called before the work."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{flag} {folder}: not a folder")
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK):
        raise UserError(f"{flag} {folder}: {place} can't be written to")


def make_folder(path: Path) -> None:
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: it is flushed to disk under a temporary name, then renamed. Symlinks are followed."""
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():
        raise UserError(f"can't write {path}: not a regular file")
    # Threads and processes that write the same file have a scratch file each; the last to finish wins.
    scratch = final.with_name(f"{final.name}.{secrets.token_hex(4)}{_PARTIAL}")
    with _writing(path):
        try:
            with scratch.open("wb") as stream:
                stream.write(content)
                stream.flush()
                # Else a power cut could leave the new name with nothing behind it: the rename may reach the disk first.
                os.fsync(stream.fileno())
            scratch.replace(final)
        finally:
            with suppress(OSError):
                scratch.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically; unpaired surrogates, which a path may contain, are escaped."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, with null for NaN and infinities."""
    write_text(path, json.dumps(_finite(content), indent=1))


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def check_new_folder(path: Path) -> None:
    """Raise a UserError unless a folder can be made there: nothing, or an empty folder, has this name."""
    if path.is_file() or (path.is_dir() and any(not is_partial(each) for each in path.iterdir())):
        raise UserError(f"{path} exists and is not empty")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a scratch folder that is flushed to disk and renamed to `path` at the end, or removed after an error.

    An existing empty folder is kept, and the files are moved into it, config.json last: it may be the current folder,
    or a mount point. Raises a UserError if it is no longer empty at the end, or if another process is writing it.
    """
    final = Path(os.path.realpath(path))
    filled = final.is_dir()
    place = final if filled else final.parent
    scratch = place / f"{final.name}{_PARTIAL}"
    make_folder(place)
    with locked(place / f"{final.name}.lock{_PARTIAL}", f"another process is writing {path}"):
        check_new_folder(final)
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
        make_folder(scratch)
        try:
            yield scratch
            # The content must be on the disk before the name is: a folder under its final name is complete.
            for file in scratch.rglob("*"):
                _sync(file)
            with _writing(path):
                if filled:
                    check_new_folder(final)
                    for each in sorted(scratch.iterdir(), key=lambda each: each.name == "config.json"):
                        each.replace(final / each.name)
                else:
                    scratch.replace(final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def is_partial(path: Path) -> bool:
    """Return whether a file or folder has the name of an unfinished one, such as a killed process leaves."""
    return path.suffix == _PARTIAL


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError: "can't write `path`"."""
    try:
        yield
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror}") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def acquire(lock: BaseFileLock, busy: str, wait: bool = False) -> None:
    """Acquire a lock; if another process holds it, raise a UserError with the message `busy`, or print it and wait."""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if not wait:
            raise UserError(busy) from None
        log(f"{busy}; it holds {lock.lock_file}")
        lock.acquire()


@contextmanager
def locked(file: Path, busy: str, wait: bool = False) -> Iterator[None]:
    """Hold a lock file for the block, then remove it; `busy` and `wait` are those of `acquire`."""
    lock = FileLock(file)
    with _writing(file):
        acquire(lock, busy, wait)
    try:
        yield
    finally:
        if not wait:  # one that waits may have opened the file already
            file.unlink(missing_ok=True)  # while it is held, so that it is not another process's
        lock.release()


def sha256(path: Path) -> str:
    made = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            made.update(block)
    return made.hexdigest()


def write_manifest(folder: Path) -> None:
    """Flush a finished folder to disk, then write its manifest: the SHA-256 checksum of each file, by relative path."""
    checksums = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        checksums[file.relative_to(folder).as_posix()] = sha256(file)
        _sync(file)
    write_text(folder / MANIFEST, json.dumps(checksums, indent=1))
    # The names of files belong to the folder, which is flushed on its own.
    _sync(folder)


def manifest_error(folder: Path) -> str | None:
    """Compare a folder with its manifest; return the first difference in words, or None if all files match."""
    if not (folder / MANIFEST).exists():
        return f"it has no {MANIFEST}: it was cut off while being written"
    try:
        checksums = read_json(folder / MANIFEST)
    except UserError:
        return f"its {MANIFEST} is damaged"
    if not checksums:
        return f"its {MANIFEST} is empty"
    for name, expected in checksums.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256(folder / name) != expected:
            return f"{name} does not match its checksum"
    return None


def cache_folder() -> Path:
    """Return $SPECULATOR_CACHE, or `speculator` in the user's cache folder; raise a UserError if there is no home."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get("SPECULATOR_CACHE") or f"{home}/speculator")
    # Containers run under users that the machine does not know: `expanduser` leaves the tilde, a folder of this name.
    refuse((folder.startswith("~"), f"there is no home folder for {folder}: {_OTHER_CACHE}"))
    return Path(folder)


def make_cache_folder(below: str = "") -> Path:
    """Create the cache folder, or one below it, and return it; raise a UserError if it can't be written to."""
    folder = cache_folder() / below
    try:
        make_folder(folder)
    except UserError as error:
        raise UserError(f"{error}: {_OTHER_CACHE}") from None
    refuse((not os.access(folder, os.W_OK), f"can't write to the cache folder {folder}: {_OTHER_CACHE}"))
    return folder


@contextmanager
def cached_object(kind: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the dict in KIND/NAME.json of the cache folder, and write it back, changed by the caller, at the end.

    Other processes wait for the file's lock, up to a minute. Without a readable file the dict is empty. Nothing is
    written after an exception, or if the cache can't be written to.
    """
    content: dict[str, Any] = {}
    file: Path | None = None
    with ExitStack() as stack:
        with suppress(OSError, UserError):
            file = cache_folder() / kind / (re.sub(r"[^\w.+]+", "-", name) + ".json")
            make_cache_folder(kind)
            stack.enter_context(FileLock(f"{file}.lock", timeout=_CACHE_LOCK_SECONDS))
        with suppress(UserError):
            content |= read_json(file) if file else {}
        yield content
        # Still under the lock, so that no process that waits for it reads the old content.
        with suppress(UserError):
            if file:
                write_json(file, content)
