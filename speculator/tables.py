"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A line for the header, one for the rule below it, and one a row; a cell is one line, its bars escaped."""
    cells = [[" ".join(str(cell).split()).replace("|", r"\|") for cell in row] for row in (header, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
