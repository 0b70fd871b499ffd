"""A bad input and what its refusal is held to; every table of this folder is a list of these cases."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECONDS, BYTES = 10, 1 << 30
Content = str | bytes | Callable[[Path], Any] | None


class HungError(BaseException):
    """The command did not end in time. No Exception: no command may catch it."""


class TakenError(BaseException):
    """A run took its folder: what was wrong with its input was not seen."""


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        name: unique in its table.
        argv: the command line, `train`, `data`, `eval` or `speculator` first. Words that name a shared input (TARGET,
            MLP, ...) are replaced by its path. The command runs in a folder that holds `files` and a FIFO named "pipe":
            no device, which a faulty command run as root could replace.
        mentions: what the one line must hold, whatever the case of the letters; one of several with | between.
        files: by name, what is written before: text, bytes, or a function that makes the path.
        begins: a folder that may be left: the work in it is gone on with once the fault has passed.
    """

    name: str
    argv: Sequence[str]
    mentions: str
    files: Mapping[str, Content] = field(default_factory=dict)
    begins: str = ""


def table(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Parametrises a test by cases, under their names."""
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return pytest.mark.parametrize("case", cases, ids=names)


def make(folder: Path, files: Mapping[str, Content]) -> None:
    """Write a case's files."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def listing(*folders: Path) -> dict[str, tuple]:
    """Every path under the folders with its kind, and of files size and time."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            stat = path.lstat()
            whole = (stat.st_size, stat.st_mtime_ns) if path.is_file() else ()
            found[str(path)] = (stat.st_mode, *whole)
    return found


@contextmanager
def within(seconds: float = SECONDS, room: int = BYTES) -> Iterator[None]:
    """Raises HungError in the main thread when the time is up, MemoryError where that many bytes more are asked for."""

    def ring(*_: object) -> None:
        raise HungError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + room, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# What a file can be instead of what it should be


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


NO_FILES: dict[str, Content] = {
    "missing": None,
    "a folder": folder,
    "a pipe": fifo,
    "a device": device,
    "a link to itself": loop,
}
"""Nothing that can be read to its end."""

NO_TEXT: dict[str, Content] = {
    "empty": b"",
    "binary": bytes(range(256)) * 64,
    "UTF-16": '{"prompt": "x", "text": "x"}'.encode("utf-16"),
    "Latin-1": '{"prompt": "\xe9", "text": "\xe9"}'.encode("latin-1"),
    "zeros": bytes(10_000),
}
"""Files that are no text."""

NO_OBJECT: dict[str, Content] = {
    "truncated JSON": '{"prompt": "x", "te',
    "a JSON list": "[1, 2]",
    "a JSON number": "7",
    "a JSON string": '"x"',
    "a JSON null": "null",
    "deep nesting": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "a long number": '{"prompt": ' + "9" * 10_000 + "}",
}
"""Files that are no JSON object."""


def files(prefix: str, argv: Sequence[str], name: str, kinds: Mapping[str, Content], mentions: str = "") -> list[Case]:
    """A case for each kind of content of the file `name` that `argv` reads; the file's name must be mentioned."""
    return [
        Case(f"{prefix}: {name}: {kind}", argv, mentions or name, {name: content}) for kind, content in kinds.items()
    ]


def changed(source: Path, **changes: Any) -> str:
    """A JSON object with other values; ... deletes a key."""
    read = {**json.loads(source.read_text()), **changes}
    return json.dumps({key: value for key, value in read.items() if value is not ...})
