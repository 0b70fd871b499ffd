"""Files of rows, read line by line within bounds."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from speculator.errors import UserError
from speculator.files import check_input, parse_json

MOST_BYTES = 16 << 20
"""Of a line; a longer one is no row."""
_HOPELESS = 16 * MOST_BYTES


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """The bytes of a regular file, unpacked if it ends in .gz.

    Raises:
        UserError: it can't be opened, or read to its end.
    """
    check_input(file)
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield stream  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: {getattr(error, 'strerror', None) or error}") from None


def json_rows(file: Path) -> Iterator[tuple[int, Any, str | None]]:
    """Of each line that is not blank its number, what it says in JSON, and what is wrong with it, None if nothing is.

    Raises:
        UserError: the file can't be read.
    """
    with opened(file) as stream:
        for number, line in enumerate(_lines(stream, file), start=1):
            if line is None:
                yield number, None, f"a line of more than {MOST_BYTES:,} bytes"
            elif line.strip():
                try:
                    yield number, parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"), ""), None
                except UnicodeDecodeError as error:
                    yield number, None, f"not UTF-8 text: {error.reason}"
                except UserError as error:
                    yield number, None, str(error).removeprefix(": ")


def whole_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Of each line that is not blank where it stands and what it says in JSON.

    Raises:
        UserError: the file can't be read, or a line of it can't.
    """
    for number, row, fault in json_rows(file):
        if fault:
            raise UserError(f"{file}:{number}: {fault}")
        yield f"{file}:{number}", row


def _lines(stream: IO[bytes], file: Path) -> Iterator[bytes | None]:
    """None for a line that is too long."""
    while line := stream.readline(MOST_BYTES + 1):
        if len(line) <= MOST_BYTES:
            yield line
            continue
        size = len(line)
        while line and not line.endswith(b"\n"):
            line = stream.readline(MOST_BYTES)
            size += len(line)
            if size > _HOPELESS:
                raise UserError(f"{file}: a line of more than {_HOPELESS:,} bytes: not a file of rows")
        yield None
