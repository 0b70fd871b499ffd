"""From where a source lies to its documents: this machine's Python sources, local files and folders, the hub.

A document is {"id", "where", ...}: `id` names it wherever the source is read, `where` is the place on this machine
for errors, and the rest is what `data.rows` makes of the row. Files are read row by row, never as a whole (but a .json
list, which can't be); `datasets` folders and hub datasets are memory-mapped.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from data.rows import KEYS, SourceError, content
from speculator.errors import UserError, first_line
from speculator.files import parse_json

SPLITS = {"train": range(0, 90), "validation": range(90, 95), "held-out": range(95, 100)}
"""Share of each split, as ranges of a document's SHA-256 modulo 100."""

PYTHON_SOURCES = "python-sources"
_TEST_PARTS = re.compile(r"^(tests?|testing|.*_tests?)$")
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}
_SUFFIXES = {".jsonl", ".json", ".parquet", *_TEXT_SUFFIXES}
_PIECE_CHARACTERS = 10_000
_FILE_BYTES = range(1_000, 200_000)
_MAX_DIGIT_SHARE = 0.10
_HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(/(?P<config>[\w.,-]+))?(:(?P<split>[^/]+))?")

Document = dict[str, Any]


def read(location: str, max_package_bytes: int) -> Iterator[Document]:
    """The documents of a source.

    Args:
        location: "python-sources"; a local file or folder; or a hub dataset, "org/name", "org/name/config", with
            ":split" after it where it is not "train". What exists here is not looked for on the hub.
        max_package_bytes: "python-sources" only: at most this much of each top-level package.

    Raises:
        SourceError: no such source, or a row that can't be read.
    """
    path = Path(location)
    if location == PYTHON_SOURCES:
        return python_sources(max_package_bytes)
    if not path.exists():
        name, config, split = hub_id(location)
        rows = hub_dataset(name, config, split)
        return _dataset_rows(rows, f"{name}:{config or ''}:{split}", location)
    if (path / "manifest.json").is_file() and _is_datasets_folder(path / "rows"):
        path = path / "rows"  # the target's own text, as `python -m data generate` leaves it
    return _datasets_folder(path) if _is_datasets_folder(path) else local_files(path)


def fingerprint(location: str) -> str:
    """Changes whenever the content of a source does: names, sizes and modification times, not the bytes."""
    path = Path(location)
    if location == PYTHON_SOURCES:
        files = _python_files()
    elif path.exists():
        files = {p.as_posix(): p for p in _files_in(path)}
    else:
        return hub_dataset(*hub_id(location))._fingerprint
    stats = ((name, path.stat()) for name, path in sorted(files.items()))
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


# Python sources


def _python_files() -> dict[str, Path]:
    """Module path -> file, over the standard library and installed packages, tests left out."""
    files: dict[str, Path] = {}
    for root in sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}):
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if "site-packages" not in relative.parts and not any(map(_TEST_PARTS.match, relative.parts)):
                files.setdefault(relative.as_posix(), path)
    return files


def python_sources(max_package_bytes: int) -> Iterator[Document]:
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
            yield {"id": name, "where": str(files[name]), "text": text}


# Local files


def _files_in(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _suffix(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).suffix


def local_files(path: Path) -> Iterator[Document]:
    """Documents of a local file or folder: row by row, text files in pieces of some 10 kB."""
    files = [file for file in _files_in(path) if _suffix(file) in _SUFFIXES]
    if not files:
        here = f"in {path} is no file" if path.is_dir() else f"{path}: not a file"
        raise SourceError(f"{here} that can be read: .jsonl, .json, .parquet or .txt, .gz of any but .parquet")
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        try:
            yield from _local_file(file, name)
        except (OSError, UnicodeDecodeError, EOFError, zlib.error, pyarrow.ArrowException) as error:
            raise SourceError(f"{file}: {error}") from None


def _local_file(file: Path, name: str) -> Iterator[Document]:
    suffix = _suffix(file)
    if suffix == ".parquet":
        yield from _numbered(_parquet(file), name, str(file))
    elif suffix == ".jsonl" or (suffix == ".json" and not _holds_a_list(file)):
        yield from _numbered(_json_lines(file), name, str(file))
    elif suffix == ".json":
        with _open(file) as stream:
            try:
                rows = json.load(stream)
            except json.JSONDecodeError as error:
                raise SourceError(f"{file}:{error.lineno}: not JSON: {error.msg}") from None
            except RecursionError as error:
                raise SourceError(f"{file}: JSON that can't be read: {error}") from None
        yield from _numbered(enumerate(rows, start=1), name, str(file))
    else:
        with _open(file) as stream:
            yield from _pieces(stream, name, str(file))


def _open(file: Path) -> IO[str]:
    opener = gzip.open if file.suffix == ".gz" else open
    return opener(file, "rt", encoding="utf-8")


def _numbered(rows: Iterable[tuple[int, Any]], name: str, place: str) -> Iterator[Document]:
    for number, row in rows:
        where = f"{place}:{number}"
        yield {"id": f"{name}:{number}", "where": where, **content(row, where)}


def _json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    row = parse_json(line, f"{file}:{number}")
                except UserError as error:
                    raise SourceError(str(error)) from None
                yield number, row


def _holds_a_list(file: Path) -> bool:
    with _open(file) as stream:
        while (character := stream.read(1)).isspace():
            pass
        return character == "["


def _parquet(file: Path) -> Iterator[tuple[int, Any]]:
    table = pyarrow.parquet.ParquetFile(file)
    columns = [name for name in table.schema_arrow.names if name in KEYS]
    batches = table.iter_batches(columns=columns, batch_size=1024)
    return enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _pieces(lines: Iterable[str], name: str, where: str) -> Iterator[Document]:
    """Cut a text at line ends, so that one long file has a share in every split."""
    piece: list[str] = []
    count = size = 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= _PIECE_CHARACTERS:
            yield {"id": f"{name}:{count}", "where": where, "text": "".join(piece)}
            piece, size, count = [], 0, count + 1
    if piece:
        yield {"id": f"{name}:{count}", "where": where, "text": "".join(piece)}


# `datasets`: folders that it saved, and the hub


def _is_datasets_folder(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _datasets_folder(path: Path) -> Iterator[Document]:
    """Rows of a saved dataset; one with our three splits, as `python -m data prepare` leaves it, keeps them."""
    try:
        saved = load_from_disk(str(path))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise SourceError(f"{path}: can't be loaded: {first_line(error)}") from None
    if isinstance(saved, Dataset):
        yield from _dataset_rows(saved, path.name, str(path))
        return
    foreign = [name for name in saved if name not in SPLITS]
    if foreign:
        raise SourceError(f"{path} holds the splits {', '.join(saved)}: name one, as {path / foreign[0]}")
    assert isinstance(saved, DatasetDict)
    for split, rows in saved.items():
        for document in _dataset_rows(rows, f"{path.name}:{split}", str(path / split)):
            yield {**document, "split": split}


def _dataset_rows(rows: Dataset, name: str, place: str) -> Iterator[Document]:
    known = rows.select_columns([column for column in rows.column_names if column in KEYS])
    return _numbered(enumerate(known, start=1), name, place)


def raw_rows(location: str) -> Iterator[tuple[str, Any]]:
    """The rows of a .jsonl file (.gz too) or of a hub dataset as they stand, each with its place.

    Raises:
        SourceError: it can't be read.
    """
    file = Path(location)
    if not file.exists():
        for number, row in enumerate(hub_dataset(*hub_id(location)), start=1):
            yield f"{location}:{number}", row
        return
    try:
        for number, row in _json_lines(file):
            yield f"{file}:{number}", row
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise SourceError(f"{file}: {error}") from None


def hub_id(location: str) -> tuple[str, str | None, str]:
    """Name, config and split of a hub dataset.

    Raises:
        SourceError: it does not read as one.
    """
    match = _HUB_ID.fullmatch(location)
    if match is None or _suffix(Path(location)) in _SUFFIXES:
        raise SourceError(
            f"no such source: {location} (a local file or folder, {PYTHON_SOURCES!r}, or a hub dataset as org/name)"
        )
    return match["name"], match["config"], match["split"] or "train"


def hub_dataset(name: str, config: str | None, split: str) -> Dataset:
    """A dataset as the hub's library loads it: downloaded once, then memory-mapped.

    Raises:
        SourceError: it can't be loaded.
    """
    try:
        return load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise SourceError(f"{name}: not here, and not to be had from the hub: {first_line(error)}") from None
