"""Where text comes from: one function per kind of source, each giving a dataset of documents.

A document is a row {"id": str, "text": str}. `id` names it for the reader and decides its split, so a
document stays in its split whatever machine the source is read on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from speculator.errors import UserError

SPLITS = {"train": range(0, 90), "validation": range(90, 95), "held-out": range(95, 100)}
"""Share of each split, as ranges of a document's SHA-256 modulo 100."""

PYTHON_SOURCES = "python-sources"
_TEST_PARTS = re.compile(r"^(tests?|testing|.*_tests?)$")
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}
_PIECE_CHARACTERS = 10_000
_FILE_BYTES = range(1_000, 200_000)
_MAX_DIGIT_SHARE = 0.10


class SourceError(UserError):
    """A source that can't be read, or that holds nothing to train on."""


def split_of(document_id: str) -> str:
    """The split of a document: a function of its id alone."""
    bucket = int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def documents(
    sources: Sequence[str], split: str | None, *, max_package_bytes: int = 2_000_000
) -> Iterator[dict[str, str]]:
    """The documents of one split of some sources, without exact duplicates among all of them.

    Args:
        sources: each "python-sources", or the path of a .txt or .jsonl (key `text`) file, or a folder of such
            files; .gz of any.
        split: "train", "validation" or "held-out"; None for all three.
        max_package_bytes: "python-sources" only: at most this much of each top-level package.

    Raises:
        SourceError: no such file, or an unreadable row.
    """
    if split is not None and split not in SPLITS:
        raise SourceError(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
    seen: set[bytes] = set()
    for source in sources:
        for row in python_sources(max_package_bytes) if source == PYTHON_SOURCES else local_files(Path(source)):
            # Duplicates are dropped before the split, or a copy could sit on both sides of it.
            digest = hashlib.sha256(row["text"].encode(errors="surrogatepass")).digest()
            if digest not in seen and row["text"].strip():
                seen.add(digest)
                if split is None or split_of(row["id"]) == split:
                    yield row


def fingerprint(source: str) -> str:
    """Changes whenever the content of a source does: names, sizes and modification times, not the bytes."""
    files = _python_files() if source == PYTHON_SOURCES else {p.as_posix(): p for p in _local_paths(Path(source))}
    stats = ((name, path.stat()) for name, path in sorted(files.items()))
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _python_files() -> dict[str, Path]:
    """Module path -> file, over the standard library and installed packages, tests left out."""
    files: dict[str, Path] = {}
    for root in sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}):
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if "site-packages" not in relative.parts and not any(map(_TEST_PARTS.match, relative.parts)):
                files.setdefault(relative.as_posix(), path)
    return files


def python_sources(max_package_bytes: int) -> Iterator[dict[str, str]]:
    """The running interpreter's standard library and installed packages: real text on every machine.

    Left out: tests, files outside 1-200 kB, generated tables (more than a tenth of the characters are
    digits), text that is not UTF-8. Ids are module paths ("json/decoder.py"). Within a package files come
    in the order of their ids' hashes, so the byte cap picks the same ones everywhere.
    """
    files = _python_files()
    taken: Counter[str] = Counter()
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        package, size = name.split("/")[0], files[name].stat().st_size
        if size not in _FILE_BYTES or taken[package] + size > max_package_bytes:
            continue
        try:
            raw = files[name].read_bytes()
            text = raw.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digits = size - len(raw.translate(None, b"0123456789"))
        if digits <= _MAX_DIGIT_SHARE * size:
            taken[package] += size
            yield {"id": name, "text": text}


def _local_paths(path: Path) -> list[Path]:
    if not path.exists():
        raise SourceError(f"no such source: {path} (a local file or folder, or {PYTHON_SOURCES!r})")
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def local_files(path: Path) -> Iterator[dict[str, str]]:
    """Documents of a local file or folder: .jsonl row by row, text files in pieces of some 10 kB; .gz of any."""
    for file in _local_paths(path):
        suffix = Path(file.name.removesuffix(".gz")).suffix
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        if suffix == ".jsonl":
            yield from _jsonl(file, name)
        elif suffix in _TEXT_SUFFIXES:
            yield from _pieces(_read(file), name)
        elif not path.is_dir():
            raise SourceError(
                f"{file}: can't read {suffix or 'a file without a suffix'}: .jsonl or .txt, .gz of either"
            )


def _read(file: Path) -> str:
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise SourceError(f"{file}: {error}") from None


def _pieces(text: str, name: str) -> Iterator[dict[str, str]]:
    """Cut a text at line ends, so that one long file has a share in every split."""
    piece: list[str] = []
    count = size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= _PIECE_CHARACTERS:
            yield {"id": f"{name}:{count}", "text": "".join(piece)}
            piece, size, count = [], 0, count + 1
    if piece:
        yield {"id": f"{name}:{count}", "text": "".join(piece)}


def _jsonl(file: Path, name: str) -> Iterator[dict[str, str]]:
    # Not splitlines: JSON strings may hold line separators other than the newline.
    for number, line in enumerate(_read(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise SourceError(f'{file}:{number}: not a row of the shape {{"text": "..."}}')
        yield {"id": f"{name}:{number}", "text": text}
