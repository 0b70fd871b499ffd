"""Read documents: Python sources of this machine, local files and folders, `datasets` folders and hub datasets.

A document is {"id", "where", ...}. `id` is its place in its source, `where` its place for error messages, and the rest
is the content that `data.rows` finds in the row, or "fault": the `RowError` of a bad row. A "name" stands for the
content when documents are split. Files are read row by row, except .json lists; `datasets` folders and hub datasets
are memory-mapped.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet
from datasets import Dataset, DatasetDict, Features, load_dataset, load_from_disk

from data import python_sources
from data.documents import Document, RowError, digest_of
from data.mixture import PYTHON_SOURCES, SourceError
from data.rows import KEYS, content, is_read
from speculator.chat import from_json
from speculator.errors import first_line
from speculator.files import check_input, open_binary, parse_rows, read_json
from speculator.prompts import KEYS as PROMPT_KEYS
from speculator.terminal import loading, log

SPLITS = {"train": range(0, 90), "validation": range(90, 95), "held-out": range(95, 100)}
"""Each split as a range of the documents' SHA-256 modulo 100."""

ENOUGH_RECORDED = 200
"""Different recorded answers from which on enough are held out to compare two heads."""
_LEAST_HELD_OUT, _MOST_HELD_OUT = 64, 500
_SHORTEST_PROMPT = 8  # tokens, from which on texts that begin alike are one chat

_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}
_SUFFIXES = {".jsonl", ".json", ".parquet", *_TEXT_SUFFIXES}
_UNTYPED = {".csv", ".tsv"}
"""Tables that are not read: their cells are texts, so a list or `false` can't be told from its spelling."""
_CARDS = re.compile(
    r"(readme|licen[cs]e|notice|copying|changelog|contributing|citation|code_of_conduct)\b.*\.(txt|md|rst)$"
    r"|readme_.*\.(txt|md|rst)$|(config|dataset_infos?|dataset_dict|state|package(-lock)?)\.json$"
)
"""Matches the names, in lower case, of files that describe a dataset; those in JSON are what `datasets` leaves out."""
_PIECE_BYTES = 10_000
_LINE_BYTES = 100_000
_BESIDE_A_PROMPT = ("category", "completion", "chosen", "history", "system", "tools")
_ROWS_AT_ONCE = 128  # which may have images
_HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(/(?P<config>[\w.,-]+))?(:(?P<split>[^/]+))?")


def read(location: str) -> Iterator[Document]:
    """Yield the documents of a source.

    Args:
        location: "python-sources"; a local file or folder; or a hub dataset: "org/name" or "org/name/config", with
            ":split" unless the split is "train". Local files take precedence.

    Raises:
        SourceError: the source does not exist or can't be read.
    """
    path = Path(location)
    if location == PYTHON_SOURCES:
        return python_sources.documents()
    if not path.exists():
        name, config, split = hub_id(location)
        return _dataset_rows(hub_dataset(name, config, split), f"{name}:{config or ''}:{split}", location)
    if is_recorded(path):
        return _recorded(path / "rows")
    path = _rows_folder(path)
    return _datasets_folder(path) if _is_datasets_folder(path) else local_files(path)


def fingerprint(location: str) -> str:
    """Return a hash that changes with a source's files (names, sizes, times); of a hub dataset, its own fingerprint."""
    path = Path(location)
    if location == PYTHON_SOURCES:
        files = python_sources.files()
    elif path.exists():
        files = {p.as_posix(): p for p in source_files(path)}
    else:
        return hub_dataset(*hub_id(location))._fingerprint
    stats = ((name, path.stat()) for name, path in sorted(files.items()))
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    if location == PYTHON_SOURCES:
        facts.append(("limit", python_sources.MAX_PACKAGE_BYTES, 0))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def source_files(path: Path) -> list[Path]:
    """Return the files of a local source that are read, sorted; of a folder that `datasets` saved, all."""
    folder = _rows_folder(path)
    return _visible_files(folder) if _is_datasets_folder(folder) else _readable_files(folder)


def _rows_folder(path: Path) -> Path:
    """Return the subfolder `rows` of a folder written by `data generate` or `serve --record`; any other path itself."""
    rows = path / "rows"
    return rows if (path / "manifest.json").is_file() and rows.is_dir() else path


# Local files


def _visible_files(path: Path) -> list[Path]:
    """Return all files in a folder and its subfolders, sorted; [path] for a file.

    As in `datasets`, names that begin with a dot and folders that begin with "__" are left out.
    """
    if not path.is_dir():
        return [path]
    inside = ((file, file.relative_to(path).parts) for file in path.rglob("*"))
    hidden = (".", "__")
    return sorted(
        file
        for file, parts in inside
        if not parts[-1].startswith(".") and not any(part.startswith(hidden) for part in parts[:-1]) and file.is_file()
    )


def _readable_files(path: Path) -> list[Path]:
    """Return the files of a location in a format that we read, sorted, of a folder without the cards of datasets."""
    if not path.is_dir():
        return [path] if _suffix(path) in _SUFFIXES else []
    files = [file for file in _visible_files(path) if _suffix(file) in _SUFFIXES | _UNTYPED]
    texts = {file for file in files if _suffix(file) in _TEXT_SUFFIXES}
    cards = {file for file in files if _is_card(file)}
    # A text may be named like a card where there are no rows.
    left_out = cards if set(files) - texts - cards else cards - texts
    return [file for file in files if _suffix(file) in _SUFFIXES and file not in left_out]


def _is_card(file: Path) -> bool:
    return _CARDS.match(file.name.lower()) is not None


def is_recorded(path: Path) -> bool:
    """Return whether a server recorded this folder, see `serve --record`."""
    manifest = path / "manifest.json"
    return manifest.is_file() and bool(read_json(manifest).get("recorded"))


def _recorded(folder: Path) -> Iterator[Document]:
    """Yield the rows that a server recorded, the oldest first; the validation and held-out splits are the newest.

    Each of the two has a twentieth of the rows, but at least 64 and about 500 at most, if there are 200 or more. A chat
    whose turns were recorded one by one is in one split, that of its newest turn, if it is no larger than a split.
    """
    files = _readable_files(folder)  # listed once, because the server may be adding shards
    chats: dict[bytes, int] = {}  # of different rows: copies and bad rows, which are dropped, fill no split alone
    begun: dict[int, int] = {}
    for file in files:
        for document in _local_file(file, file.name):
            if "fault" not in document:
                chats.setdefault(digest_of(document), _chat_of(document, begun))
    held = len(chats) // 20
    if len(chats) >= ENOUGH_RECORDED:
        held = max(_LEAST_HELD_OUT, min(held, _MOST_HELD_OUT))
    sizes: Counter[int | bytes] = Counter(chats.values())
    # A chat beyond a whole split is many chats with one opening, as "Hi": their rows are split one by one.
    groups = {row: chat if sizes[chat] <= held else row for row, chat in chats.items()}
    sizes = Counter(groups.values())
    splits: dict[int | bytes, str] = {}
    taken = 0
    for chat in dict.fromkeys(reversed(groups.values())):
        splits[chat] = "held-out" if taken < held else "validation" if taken < 2 * held else "train"
        taken += sizes[chat]
    split = "train"
    for document in chain.from_iterable(_local_file(file, file.name) for file in files):
        if "fault" not in document:  # a bad row goes with the one before it
            split = splits[groups[digest_of(document)]]
        yield {**document, "split": split}


def _chat_of(document: Document, begun: dict[int, int]) -> int:
    """Return the number of a recorded answer's chat: that of an earlier row whose whole prompt begins this one's.

    `begun` has the numbers of chats by the hash of a prompt; this one's is added.
    """
    if "input_ids" in document:
        mask = document["loss_mask"]
        prompt: Sequence[Any] = document["input_ids"][: mask.index(1) if 1 in mask else None]
        shortest = _SHORTEST_PROMPT
    elif "messages" in document:
        opening = takewhile(lambda message: message["role"] != "assistant", document["messages"])
        prompt, shortest = [json.dumps(list(opening), sort_keys=True)], 1
    else:
        prompt, shortest = [digest_of(document)], 1
    state, chat = 0, None
    for size, piece in enumerate(prompt, start=1):
        state = hash((state, piece))
        if chat is None and size >= shortest:
            chat = begun.get(state)
    number = len(begun) if chat is None else chat
    begun[state if len(prompt) >= shortest else hash((len(begun), "short"))] = number
    return number


def _suffix(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix


def local_files(path: Path) -> Iterator[Document]:
    """Yield the documents of a local file or folder; text files are cut into pieces of about 10 kB."""
    files = _readable_files(path)
    if files and path.is_dir():
        _log_unread(path)
    if not files:
        fault = "holds no readable file" if path.is_dir() else "is not a readable file"
        table = next(
            (f"; write {file.name} as .jsonl" for file in _visible_files(path) if _suffix(file) in _UNTYPED), ""
        )
        raise SourceError(f"{path} {fault}: .jsonl, .json, .parquet or .txt; all but .parquet also as .gz{table}")
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        check_input(file)
        try:
            yield from _local_file(file, name)
        except (OSError, pyarrow.ArrowException) as error:
            raise SourceError(f"{file}: {first_line(error)}") from None


@cache  # the splits are read one by one
def _log_unread(folder: Path) -> None:
    """Print how many files of a folder are not read, by suffix, but for hidden files and cards of text."""
    files = [file for file in _visible_files(folder) if not (_is_card(file) and _suffix(file) in _TEXT_SUFFIXES)]
    left_out = Counter(file.name if _is_card(file) else _suffix(file) or "without a suffix" for file in files)
    for file in _readable_files(folder):
        del left_out[file.name if _is_card(file) else _suffix(file)]
    if left_out:
        log(f"{folder}: not read: {', '.join(f'{count} {suffix}' for suffix, count in left_out.most_common(5))}")


def _local_file(file: Path, name: str) -> Iterator[Document]:
    if _suffix(file) not in _TEXT_SUFFIXES:
        yield from _documents(_rows_in(file), name, str(file))
        return
    with open_binary(file) as stream:
        yield from _pieces(stream, name, str(file))


def _rows_in(file: Path, also: Sequence[str] = ()) -> Iterator[tuple[int, Any, str | None]]:
    """Yield (number, row, error or None) of a file of rows; of a table the columns that we read, and `also` these."""
    if _suffix(file) == ".parquet":
        return _enumerate(_parquet(file, also))
    if _suffix(file) == ".json" and _is_one_value(file):
        return _enumerate(_list_of(file))
    return parse_rows(file)


def _enumerate(rows: Iterable[Any]) -> Iterator[tuple[int, Any, None]]:
    """Yield (number from 1 on, row, None), in the form of `parse_rows`: none of the rows has an error."""
    return ((number, row, None) for number, row in enumerate(rows, start=1))


def _documents(rows: Iterable[tuple[int, Any, str | None]], name: str, place: str) -> Iterator[Document]:
    """Yield a document for each (number, parsed row, error or None); a row with an error has "fault" but no content.

    Ids begin with the file's `name` in its source, and messages with its path, `place`.
    """
    for number, row, error in rows:
        where = f"{place}:{number}"
        try:
            if error:
                raise RowError(where, error)
            yield {"id": f"{name}:{number}", "where": where, **content(row, where)}
        except RowError as fault:
            yield {"id": f"{name}:{number}", "where": where, "fault": fault}


def _is_one_value(file: Path) -> bool:
    """Return whether a .json file is one list or one indented object, not a JSON object per line."""
    with open_binary(file) as stream:
        start = stream.read(_LINE_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    first, newline, _ = start.partition(b"\n")  # without a newline the bytes end anywhere in a row
    return start.startswith(b"[") or (bool(newline) and first.rstrip()[-1:] in (b"{", b"[", b",", b":"))


def _list_of(file: Path) -> list[Any]:
    """Return the rows of a JSON file, a list or one row; a SourceError is raised if it is not JSON."""
    with open_binary(file) as stream:
        try:
            rows = json.load(stream)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{file}: not JSON: {first_line(error)}") from None
    return rows if isinstance(rows, list) else [rows]


def _parquet(file: Path, also: Sequence[str]) -> Iterator[Any]:
    """Return the rows of a Parquet file, with the columns that we read; a SourceError is raised if there are none."""
    table = pyarrow.parquet.ParquetFile(file)
    columns = _readable(table.schema_arrow.names, str(file), also)
    try:
        features = Features.from_arrow_schema(pyarrow.schema([table.schema_arrow.field(name) for name in columns]))
    except (ValueError, TypeError, NotImplementedError) as error:  # such as Spark's maps
        raise SourceError(f"{file}: a column among {', '.join(columns)} can't be read: {first_line(error)}") from None
    return _rows_of(table.iter_batches(columns=columns, batch_size=_ROWS_AT_ONCE), features)


def _pieces(stream: IO[bytes], name: str, where: str) -> Iterator[Document]:
    """Cut a text file at line ends into documents of about 10 kB, so that a long file has a share in every split.

    A piece that is not UTF-8 text gets "fault". Ids begin with the file's `name` in its source; `where` is its path.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    count = 0
    while True:
        # The last round reads nothing: it only asks the decoder whether the file ended inside a character.
        piece: list[bytes] = []
        size = 0
        # A line longer than _LINE_BYTES comes in parts, which may end inside a character: the decoder keeps its bytes.
        while size < _PIECE_BYTES and (line := stream.readline(_LINE_BYTES)):
            piece.append(line)
            size += len(line)
        document: Document = {"id": f"{name}:{count}", "where": where}
        try:
            text = decoder.decode(b"".join(piece), final=not piece)
            document["text"] = text.replace("\r\n", "\n").replace("\r", "\n")
            if "\0" in text:
                document["fault"] = RowError(where, "not text: it has NUL characters")
        except UnicodeDecodeError as error:
            decoder.reset()
            document["fault"] = RowError(where, f"not UTF-8 text: {error.reason}")
        if piece or document.get("text") or "fault" in document:
            yield document
        if not piece:
            return
        count += 1


# `datasets` folders and the hub


def _is_datasets_folder(path: Path) -> bool:
    names = ("state.json", "dataset_info.json")
    return all((path / name).is_file() for name in names) or (path / "dataset_dict.json").is_file()


def _datasets_folder(path: Path) -> Iterator[Document]:
    """Yield the rows of a saved dataset; one with the splits train, validation and held-out keeps them."""
    try:
        saved = load_from_disk(str(path))
    except Exception as error:  # the library raises many types for damaged files
        raise SourceError(f"{path}: can't be loaded: {first_line(error)}") from None
    # "train" alone is the library's name for data without splits: it is split by us.
    if isinstance(saved, DatasetDict) and list(saved) == ["train"]:
        saved = saved["train"]
    if isinstance(saved, Dataset):
        yield from _dataset_rows(saved, path.name, str(path))
        return
    foreign = [name for name in saved if name not in SPLITS]
    if foreign:
        raise SourceError(f"{path} holds the splits {', '.join(saved)}: name one, such as {path / foreign[0]}")
    assert isinstance(saved, DatasetDict)
    for split, rows in saved.items():
        for document in _dataset_rows(rows, f"{path.name}:{split}", str(path / split)):
            yield {**document, "split": split}


def _dataset_rows(rows: Dataset, name: str, place: str) -> Iterator[Document]:
    readable = rows.select_columns(_readable(rows.column_names, place))
    try:
        yield from _documents(_enumerate(_objects(readable)), name, place)
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(f"{place}: {first_line(error)}") from None


def _objects(rows: Dataset) -> Iterator[Any]:
    """Yield the rows of a dataset as they were before Arrow stored them; images and sounds are not decoded."""
    return _rows_of(rows.with_format("arrow").iter(_ROWS_AT_ONCE), rows.features)


def _rows_of(batches: Iterable[Any], features: Features) -> Iterator[Any]:
    return (_without_nulls(row, features) for batch in batches for row in batch.to_pylist())


def _without_nulls(value: Any, feature: Any) -> Any:
    """Return a table's value without the nulls that Arrow adds: it gives every object the keys of all others.

    A `Json` column stores objects as they are; a null in it was written by somebody.
    """
    if type(feature).__name__ == "Json":
        return from_json(value)
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: _without_nulls(each, feature[key]) for key, each in value.items() if each is not None}
    inner = getattr(feature, "feature", None)
    if isinstance(inner, dict) or hasattr(inner, "feature") or type(inner).__name__ == "Json":
        return [_without_nulls(each, inner) for each in value] if isinstance(value, list) else value
    return value


def _readable(columns: list[str], place: str, also: Sequence[str] = ()) -> list[str]:
    """Return the columns that we read, or that `also` names; a SourceError names `place` if there are none."""
    readable = [name for name in columns if is_read(name) or name in also]
    if not any(name in KEYS or name in also for name in readable):
        raise SourceError(f"{place}: none of its columns can be read: {', '.join(columns)[:200] or 'there are none'}")
    return readable


def raw_rows(location: str) -> Iterator[tuple[str, Any, str | None]]:
    """Yield (place, row as its source has it, error or None) of each row of a local file of rows, or a hub dataset."""
    path = Path(location)
    try:
        if path.exists():
            rows = _rows_in(check_input(path), (*PROMPT_KEYS, *_BESIDE_A_PROMPT))
        else:
            rows = _enumerate(_objects(hub_dataset(*hub_id(location))))
        yield from ((f"{location}:{number}", row, error) for number, row, error in rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(f"{location}: {first_line(error)}") from None


def hub_id(location: str) -> tuple[str, str | None, str]:
    """Return name, config (None: the default) and split of "org/name[/config][:split]".

    Raises a SourceError for a location of another form.
    """
    match = _HUB_ID.fullmatch(location)
    if match is None or _suffix(Path(location)) in _SUFFIXES:
        raise SourceError(
            f"no such source: {location} (a local file or folder, {PYTHON_SOURCES!r}, or a hub dataset org/name)"
        )
    return match["name"], match["config"], match["split"] or "train"


def hub_dataset(name: str, config: str | None, split: str) -> Dataset:
    """Load a dataset with the `datasets` library: downloaded once, then memory-mapped. Any error is a SourceError."""
    try:
        with loading(name):
            return load_dataset(name, config, split=split)
    except Exception as error:  # the network, the hub, damaged files
        raise SourceError(f"{name}: not found here or on the hub: {first_line(error)}") from None
