"""A bad input as one command line, and helpers that build tables of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Content = str | bytes | None


@dataclass(frozen=True)
class Case:
    """A command that must fail with exit code 2 and one line on stderr.

    Attributes:
        command: `train`, `data`, `eval` or `speculator` with its flags, as a shell splits them. A word in capitals that
            names a shared input (TARGET, MLP, ...) stands for its path.
        keyword: words that the line must contain.
        files: files that the command finds in its working folder, by name; a name that ends in / is a folder.
    """

    command: str
    keyword: str = ""
    files: Mapping[str, Content] = field(default_factory=dict)


def flags(command: str, keywords: Mapping[str, str]) -> list[Case]:
    """One case for each string of wrong flags, which is appended to `command`; the values are the keywords."""
    return [Case(f"{command} {wrong}", keyword) for wrong, keyword in keywords.items()]


def bad_files(command: str, name: str, contents: Mapping[str, Content]) -> list[Case]:
    """One case for each content of the file `name` that `command` reads; the error must name the file."""
    return [
        Case(command, name, {f"{name}/": None} if content == "a folder" else {name: content})
        for content in contents.values()
    ]


def table(*tables: list[Case]) -> pytest.MarkDecorator:
    """Parametrise a test over the cases of all tables."""
    cases = [case for cases in tables for case in cases]
    return pytest.mark.parametrize("case", cases, ids=[f"{case.command[-70:]} {case.keyword}" for case in cases])


def write(folder: Path, files: Mapping[str, Content]) -> None:
    """Create the files of a case."""
    for name, content in files.items():
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        elif content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)


NOT_TEXT: dict[str, Content] = {
    "missing": None,
    "folder": "a folder",
    "binary": bytes(range(256)) * 64,
    "UTF-16": '{"prompt": "x", "text": "x"}'.encode("utf-16"),
}
NOT_ROWS: dict[str, Content] = {"cut": '{"prompt": "x", "te', "number": "7"}


def bad_rows(command: str, source: str = "bad.jsonl") -> list[Case]:
    """Build one case for each bad source of rows that `command`, with `source` appended, reads."""
    return bad_files(f"{command} {source}", "bad.jsonl", {**NOT_TEXT, **NOT_ROWS})
