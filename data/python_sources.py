"""Read the Python sources of this machine: the standard library and the installed packages."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data.documents import Document

_TEST_PARTS = re.compile(r"^(tests?|testing|.*_tests?)$")
_FILE_BYTES = range(1_000, 200_000)
_MAX_DIGIT_SHARE = 0.10
MAX_PACKAGE_BYTES = 2_000_000
"""Largest number of bytes of each top-level package."""


def files() -> dict[str, Path]:
    """Return {module path: file} of the standard library and the installed packages, without tests."""
    found: dict[str, Path] = {}
    for root in sorted({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}):
        for folder, folders, names in os.walk(root):
            # Left out before they are entered: site-packages, in the standard library's folder, is another root.
            folders[:] = [name for name in folders if name != "site-packages" and not _TEST_PARTS.match(name)]
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                if path.is_file():
                    found.setdefault(path.relative_to(root).as_posix(), path)
    return found


def documents() -> Iterator[Document]:
    """Yield the Python files of the standard library and installed packages: real text on every machine.

    Tests, files outside of 1-200 kB, generated tables (more than 10% digits) and text that is not UTF-8 are skipped.
    Ids are module paths ("json/decoder.py"), which also decide the splits: a file keeps its split when it changes.
    Files come in the order of their ids' hashes, so `MAX_PACKAGE_BYTES` selects the same files everywhere.
    """
    found = files()
    taken: Counter[str] = Counter()
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        package = name.split("/")[0]
        try:
            size = found[name].stat().st_size
            if size not in _FILE_BYTES or taken[package] + size > MAX_PACKAGE_BYTES:
                continue
            raw = found[name].read_bytes()
            text = raw.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digits = size - len(raw.translate(None, b"0123456789"))
        if digits <= _MAX_DIGIT_SHARE * size:
            taken[package] += size
            yield {"id": name, "name": name, "where": str(found[name]), "text": text}
