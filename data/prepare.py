"""Prepared rows: made once, kept in a cache folder, shared by every process of a run."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from data.packing import pack
from data.sources import SPLITS, SourceError, fingerprint, parse, token_documents
from data.tally import Tally, tell
from data.workers import default_processes
from speculator import chat
from speculator.files import cache_folder, make_folder, new_folder, sha256, write_text

_FEATURES = Features({name: List(Value("int32")) for name in ("input_ids", "document_ids", "loss_mask")})
_CODE = [*sorted(Path(__file__).parent.glob("*.py")), Path(chat.__file__)]
_MANIFEST = "manifest.json"


class TooLittleTextError(SourceError):
    """A split that does not fill one row."""


def token_rows(
    sources: Sequence[str],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    max_tokens: int | None = None,
    max_package_bytes: int = 2_000_000,
    max_bad_rows: float = 0.0,
    first_rows: int | None = None,
    num_proc: int | None = None,
) -> Dataset:
    """Packed rows of one split of some sources, as `data.packing.pack` makes them.

    The cache key covers the sources (names, weights, sizes, modification times), every argument, the tokenizer with
    its chat template and this package's code, none of which the library's own fingerprint follows. The first process
    to come makes the rows under a file lock; the others wait there, outside any collective, so a long preparation
    can't run into a time-out. What does not match its checksums is made again.

    Args:
        max_bad_rows: of the training split; rows that can't be used are passed over and shown on stderr, also by those
            who find the rows made. A larger share of them is an error; other splits are small, so they take any.
        first_rows: make no more than so many, or than it takes to have a token to learn among them.
        num_proc: processes that render and tokenize; the rows do not depend on it.

    Raises:
        SourceError: a source that can't be read, too many bad rows, too little text for a single row, or a tokenizer
            without EOS.
    """
    few = max_tokens, first_rows
    folder, manifest = _made(sources, split, tokenizer, length, few, max_package_bytes, max_bad_rows, num_proc)
    Tally.of(manifest["bad_rows"], 0.0).show(_name(sources, split))
    return Dataset.load_from_disk(str(folder))


def save_rows(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    output: Path,
    *,
    max_tokens: int | None = None,
    max_package_bytes: int = 2_000_000,
    max_bad_rows: float = 0.0,
    num_proc: int | None = None,
) -> dict[str, dict[str, int]]:
    """Write the rows of every split that fills one into a new `datasets` folder, which is a source like any other.

    Args:
        sources, tokenizer, length, max_package_bytes, max_bad_rows, num_proc: as for `token_rows`.
        output: the folder; written aside, then renamed.
        max_tokens: of each split at most this many.

    Returns:
        For each split the numbers of `documents`, `rows`, `tokens` and `tokens_with_loss`.

    Raises:
        SourceError: as `token_rows`, the training split being too small among it.
        UserError: the folder is there already.
    """
    if output.exists():
        raise SourceError(f"{output} is there already; choose another --output")
    rows: dict[str, Dataset] = {}
    counts: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        try:
            few = max_tokens, None
            folder, manifest = _made(sources, split, tokenizer, length, few, max_package_bytes, max_bad_rows, num_proc)
        except TooLittleTextError:
            if split == "train":
                raise
            continue
        rows[split] = Dataset.load_from_disk(str(folder))
        counts[split] = manifest["counts"]
        Tally.of(manifest["bad_rows"], 0.0).show(_name(sources, split))
    with new_folder(output) as scratch:
        DatasetDict(rows).save_to_disk(str(scratch))
    return counts


def _name(sources: Sequence[str], split: str) -> str:
    return f"the {split} split of {', '.join(sources)}"


def _made(
    sources: Sequence[str],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    few: tuple[int | None, int | None],
    max_package_bytes: int,
    max_bad_rows: float,
    num_proc: int | None,
) -> tuple[Path, dict[str, Any]]:
    """The cache folder of these rows, made if it is not there or damaged, and what its manifest says."""
    identity = {
        "sources": [[fingerprint(source.location), source.weight] for source in parse(sources)],
        "arguments": [split, length, *few, max_package_bytes],
        "special_tokens": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in _CODE],
    }
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    folder = cache_folder() / key
    most = max_bad_rows if split == "train" or not max_bad_rows else 1.0
    make_folder(folder.parent)
    manifest = _whole(folder)  # without the lock: of many processes each reads all of it
    if manifest is None:
        with ExitStack() as held:
            with suppress(OSError, NotImplementedError):  # a file system without locks
                held.enter_context(FileLock(f"{folder}.lock"))
            manifest = _whole(folder)
            if manifest is None:
                if folder.exists():
                    tell(f"{folder}: prepared rows that do not match their checksums; they are made anew")
                    shutil.rmtree(folder)
                tally = Tally(most)
                documents = token_documents(
                    sources,
                    split,
                    tokenizer,
                    max_package_bytes=max_package_bytes,
                    tally=tally,
                    processes=num_proc or default_processes(),
                )
                manifest = _make(folder, documents, length, *few, _name(sources, split), tally)
    Tally.of(manifest["bad_rows"], most).judge(_name(sources, split))
    return folder, manifest


def _whole(folder: Path) -> dict[str, Any] | None:
    """What the manifest of a folder says; None where its files are not as they were written."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        return manifest if manifest["sha256"] == _checksums(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksums(folder: Path) -> dict[str, str]:
    return {file.name: sha256(file) for file in sorted(folder.iterdir()) if file.name != _MANIFEST}


def _make(
    folder: Path,
    documents: Iterator[dict[str, Any]],
    length: int,
    max_tokens: int | None,
    first_rows: int | None,
    what: str,
    tally: Tally,
) -> dict[str, Any]:
    counts = dict.fromkeys(("documents", "rows", "tokens", "tokens_with_loss"), 0)

    def counted() -> Iterator[dict[str, Any]]:
        for document in documents:
            counts["documents"] += 1
            yield document

    def rows() -> Iterator[dict[str, list[int]]]:
        for row in pack(counted(), length, max_tokens):
            counts["rows"] += 1
            counts["tokens"] += length
            counts["tokens_with_loss"] += sum(row["loss_mask"])
            yield row
            if first_rows and counts["rows"] >= first_rows and counts["tokens_with_loss"]:
                break
        tally.judge(what)
        if not counts["rows"]:
            raise TooLittleTextError(f"{what} does not fill one row of {length} tokens")
        if not counts["tokens_with_loss"]:
            raise SourceError(f"{what}: the loss masks leave no token to learn")

    # Written row by row: a corpus need not fit in memory. The work folder holds the only other copy.
    work = folder.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)
    try:
        with new_folder(folder) as scratch:
            try:
                made = Dataset.from_generator(rows, features=_FEATURES, cache_dir=str(work), fingerprint=folder.name)
            except DatasetGenerationError as error:
                raise error.__cause__ or error from None
            made.save_to_disk(str(scratch))
            manifest = {"counts": counts, "bad_rows": tally.record(), "sha256": _checksums(scratch)}
            write_text(scratch / _MANIFEST, json.dumps(manifest, indent=1))
        return manifest
    finally:
        shutil.rmtree(work, ignore_errors=True)
