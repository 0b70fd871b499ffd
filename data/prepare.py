"""Prepared rows: made once, kept in a cache folder, shared by every process of a run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from data.packing import pack
from data.sources import SPLITS, SourceError, fingerprint, parse, token_documents

_FEATURES = Features({name: List(Value("int32")) for name in ("input_ids", "document_ids", "loss_mask")})
_CODE = sorted(Path(__file__).parent.glob("*.py"))
_COUNTS = "counts.json"


class TooLittleTextError(SourceError):
    """A split that does not fill one row."""


def cache_folder() -> Path:
    """$SPECULATOR_CACHE, or `speculator` under the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(os.environ.get("SPECULATOR_CACHE", Path(home) / "speculator"))


def token_rows(
    sources: Sequence[str],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    max_tokens: int | None = None,
    max_package_bytes: int = 2_000_000,
) -> Dataset:
    """Packed rows of one split of some sources, as `data.packing.pack` makes them.

    The cache key covers the sources (names, weights, sizes, modification times), every argument, the tokenizer with
    its chat template and this package's code, none of which the library's own fingerprint follows. The first process
    to come makes the rows under a file lock; the others wait there, outside any collective, so a long preparation
    can't run into a time-out.

    Raises:
        SourceError: a source that can't be read, too little text for a single row, or a tokenizer without EOS.
    """
    folder = _made(sources, split, tokenizer, length, max_tokens, max_package_bytes)
    return Dataset.load_from_disk(str(folder))


def save_rows(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    output: Path,
    *,
    max_tokens: int | None = None,
    max_package_bytes: int = 2_000_000,
) -> dict[str, dict[str, int]]:
    """Write the rows of every split that fills one into a new `datasets` folder, which is a source like any other.

    Args:
        sources, tokenizer, length, max_package_bytes: as for `token_rows`.
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
            folder = _made(sources, split, tokenizer, length, max_tokens, max_package_bytes)
        except TooLittleTextError:
            if split == "train":
                raise
            continue
        rows[split] = Dataset.load_from_disk(str(folder))
        counts[split] = json.loads((folder / _COUNTS).read_text())
    scratch = output.with_name(f"{output.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    DatasetDict(rows).save_to_disk(str(scratch))
    scratch.rename(output)
    return counts


def _made(
    sources: Sequence[str],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    max_tokens: int | None,
    max_package_bytes: int,
) -> Path:
    """The cache folder of these rows, made if it is not there."""
    identity = {
        "sources": [[fingerprint(source.location), source.weight] for source in parse(sources)],
        "arguments": [split, length, max_tokens, max_package_bytes],
        "special_tokens": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in _CODE],
    }
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    folder = cache_folder() / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            documents = token_documents(sources, split, tokenizer, max_package_bytes=max_package_bytes)
            _make(folder, documents, length, max_tokens, f"the {split} split of {', '.join(sources)}")
    return folder


def _make(folder: Path, documents: Iterator[dict[str, Any]], length: int, max_tokens: int | None, what: str) -> None:
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
        if not counts["rows"]:
            raise TooLittleTextError(f"{what} does not fill one row of {length} tokens")
        if not counts["tokens_with_loss"]:
            raise SourceError(f"{what}: the loss masks leave no token to learn")

    # Written row by row: a corpus need not fit in memory. The work folder holds the only other copy.
    work, scratch = folder.with_suffix(".work"), folder.with_suffix(".partial")
    for leftover in (work, scratch):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        made = Dataset.from_generator(rows, features=_FEATURES, cache_dir=str(work), fingerprint=folder.name)
        made.save_to_disk(str(scratch))
        (scratch / _COUNTS).write_text(json.dumps(counts))
        scratch.rename(folder)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
