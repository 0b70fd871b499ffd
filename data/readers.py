"""From where a source lies to its documents: this machine's Python sources, local files and folders, the hub.

A document is {"id", "where", ...}: `id` names it wherever the source is read, `where` is the place on this machine
for errors, and the rest is what `data.rows` makes of the row, or a "fault", the `RowError`, where it makes nothing of
it. Files are read row by row, never as a whole (but a .json list, which can't be); `datasets` folders and hub datasets
are memory-mapped.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from data import python_sources
from data.rows import KEYS, RowError, SourceError, content
from speculator.errors import first_line
from speculator.files import check_input, open_binary, parse_rows, read_rows

SPLITS = {"train": range(0, 90), "validation": range(90, 95), "held-out": range(95, 100)}
"""Share of each split, as ranges of a document's SHA-256 modulo 100."""

PYTHON_SOURCES = "python-sources"
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}
_SUFFIXES = {".jsonl", ".json", ".parquet", *_TEXT_SUFFIXES}
_PIECE_BYTES = 10_000
_LINE_BYTES = 100_000
_MOST_OF_A_LIST = 1 << 30
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
        return python_sources.documents(max_package_bytes)
    if not path.exists():
        name, config, split = hub_id(location)
        rows = hub_dataset(name, config, split)
        return _dataset_rows(rows, f"{name}:{config or ''}:{split}", location)
    path = _read_of(path)
    return _datasets_folder(path) if _is_datasets_folder(path) else local_files(path)


def fingerprint(location: str) -> str:
    """Changes whenever the content of a source does: names, sizes and modification times, not the bytes."""
    path = Path(location)
    if location == PYTHON_SOURCES:
        files = python_sources.files()
    elif path.exists():
        files = {p.as_posix(): p for p in _files_in(_read_of(path))}
    else:
        return hub_dataset(*hub_id(location))._fingerprint
    stats = ((name, path.stat()) for name, path in sorted(files.items()))
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read_of(path: Path) -> Path:
    """The part that is read: of the target's own text, as `python -m data generate` leaves it, the rows."""
    rows = path / "rows"
    return rows if (path / "manifest.json").is_file() and _is_datasets_folder(rows) else path


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
        check_input(file)
        try:
            yield from _local_file(file, name)
        except (OSError, pyarrow.ArrowException) as error:
            raise SourceError(f"{file}: {first_line(error)}") from None


def _local_file(file: Path, name: str) -> Iterator[Document]:
    suffix = _suffix(file)
    if suffix == ".parquet":
        yield from _numbered(_parquet(file), name, str(file))
    elif suffix == ".jsonl" or (suffix == ".json" and not _holds_a_list(file)):
        yield from _numbered(parse_rows(file), name, str(file))
    elif suffix == ".json":
        yield from _numbered(_good(_listed(file)), name, str(file))
    else:
        with open_binary(file) as stream:
            yield from _pieces(stream, name, str(file))


def _good(rows: Iterable[Any]) -> Iterator[tuple[int, Any, None]]:
    return ((number, row, None) for number, row in enumerate(rows, start=1))


def _numbered(rows: Iterable[tuple[int, Any, str | None]], name: str, place: str) -> Iterator[Document]:
    """Documents of rows, each with its number and what is wrong with it."""
    for number, row, fault in rows:
        where = f"{place}:{number}"
        try:
            if fault:
                raise RowError(where, fault)
            found = content(row, where)
        except RowError as error:
            found = {"fault": error}
        yield {"id": f"{name}:{number}", "where": where, **found}


def _holds_a_list(file: Path) -> bool:
    with open_binary(file) as stream:
        start = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8).lstrip()
        while not start and (character := stream.read(1)):
            start = character.strip()
        return start.startswith(b"[")


def _listed(file: Path) -> Iterator[Any]:
    """The rows of a .json list."""
    text = bytearray()
    with open_binary(file) as stream:  # `read` takes memory for all that it is asked for, however short the file
        while len(text) <= _MOST_OF_A_LIST and (piece := stream.read(1 << 20)):
            text += piece
    if len(text) > _MOST_OF_A_LIST:
        raise SourceError(f"{file}: a list of more than {_MOST_OF_A_LIST:,} bytes: as .jsonl it is read row by row")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SourceError(f"{file}:{error.lineno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise SourceError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file}: JSON that can't be read: {first_line(error)}") from None


def _parquet(file: Path) -> Iterator[tuple[int, Any, None]]:
    table = pyarrow.parquet.ParquetFile(file)
    columns = _known(table.schema_arrow.names, str(file))
    batches = table.iter_batches(columns=columns, batch_size=1024)
    return _good(row for batch in batches for row in batch.to_pylist())


def _pieces(stream: IO[bytes], name: str, where: str) -> Iterator[Document]:
    """Cut a text at line ends, so that one long file has a share in every split; a long line anywhere."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    count = 0
    while True:
        piece: list[bytes] = []
        size = 0
        while size < _PIECE_BYTES and (line := stream.readline(_LINE_BYTES)):
            piece.append(line)
            size += len(line)
        document: Document = {"id": f"{name}:{count}", "where": where}
        try:
            text = decoder.decode(b"".join(piece), final=not piece)
            if "\0" in text:
                raise RowError(where, "not text: it has NUL characters")
            document["text"] = text.replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            decoder.reset()
            document["fault"] = RowError(where, f"not UTF-8 text: {error.reason}")
        except RowError as error:
            document["fault"] = error
        if piece or document.get("text") or "fault" in document:
            yield document
        if not piece:
            return
        count += 1


# `datasets`: folders that it saved, and the hub


def _is_datasets_folder(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _datasets_folder(path: Path) -> Iterator[Document]:
    """Rows of a saved dataset; one with our splits, as `python -m data prepare` leaves it, keeps them."""
    try:
        saved = load_from_disk(str(path))
    except Exception as error:  # whatever the library stumbles over in files that someone else wrote
        raise SourceError(f"{path}: can't be loaded: {first_line(error)}") from None
    if isinstance(saved, DatasetDict) and list(saved) == ["train"]:  # so the library calls what nobody has split
        saved = saved["train"]
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
    known = rows.select_columns(_known(rows.column_names, place))
    try:
        yield from _numbered(_good(known), name, place)
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(f"{place}: {first_line(error)}") from None


def _known(columns: list[str], place: str) -> list[str]:
    known = [name for name in columns if name in KEYS]
    if not known:
        raise SourceError(f"{place}: its columns are {', '.join(columns)[:200] or 'none'}; none of them can be read")
    return known


def raw_rows(location: str) -> Iterator[tuple[str, Any]]:
    """The rows of a .jsonl file (.gz too) or of a hub dataset as they stand, each with its place.

    Raises:
        UserError: it can't be read, or a line of it can't.
    """
    if Path(location).exists():
        return read_rows(Path(location))
    return ((f"{location}:{number}", row) for number, row in enumerate(hub_dataset(*hub_id(location)), start=1))


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
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, DatasetsError, pyarrow.ArrowException) as error:
        raise SourceError(f"{name}: not here, and not to be had from the hub: {first_line(error)}") from None
