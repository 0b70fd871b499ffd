"""Rows of prompts, from local .jsonl files and hub datasets."""

from __future__ import annotations

from pathlib import Path

from data.readers import raw_rows
from speculator.errors import UserError


def is_document(source: str) -> bool:
    """A local file or folder of documents to cut prompts from, not a .jsonl file of rows."""
    path = Path(source)
    return not _is_jsonl(path) if path.is_file() else path.is_dir() or _looks_local(source)


def read_rows(source: str) -> list[tuple[str, dict]]:
    """The rows of a local .jsonl file (.gz too) or of a hub dataset, each with where it stands.

    Raises:
        UserError: a line that is no JSON object, no row at all, or no such dataset.
    """
    rows = list(raw_rows(source))
    if not rows:
        raise UserError(f"--suite {source}: no rows in it")
    for where, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{where}: not an object with keys")
    return rows


def _looks_local(source: str) -> bool:
    """Of a name that is not there: meant as a file, so that the reader of documents is the one to say so."""
    suffixes = (".jsonl", ".txt", ".md", ".rst", ".py", ".gz")
    return source.startswith((".", "/")) or source.endswith(suffixes) or "/" not in source


def _is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")


def keys(row: dict) -> list[str]:
    """Those of its keys that can hold a prompt."""
    return [key for key in ("turns", "messages", "prompt", "question", "text") if key in row]
