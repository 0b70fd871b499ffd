"""Prepared rows: made once, kept in a cache folder, shared by every process of a run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, Features, Sequence, Value
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from data.packing import pack
from data.sources import SourceError, documents, fingerprint

_FEATURES = Features({"input_ids": Sequence(Value("int32")), "document_ids": Sequence(Value("int32"))})
_CODE = sorted(Path(__file__).parent.glob("*.py"))


def cache_folder() -> Path:
    """$SPECULATOR_CACHE, or `speculator` under the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(os.environ.get("SPECULATOR_CACHE", Path(home) / "speculator"))


def token_rows(
    sources: list[str],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    max_tokens: int | None = None,
    max_package_bytes: int = 2_000_000,
) -> Dataset:
    """Packed rows of one split of some sources, as `data.packing.pack` makes them.

    The cache key covers the sources (names, sizes, modification times), every argument, the tokenizer and this
    package's code, none of which the library's own fingerprint follows. The first process to come makes the rows
    under a file lock; the others wait there, outside any collective, so a long preparation can't run into a time-out.

    Raises:
        SourceError: a source that can't be read, too little text for a single row, or a tokenizer without EOS.
    """
    if tokenizer.eos_token_id is None:
        raise SourceError(f"the tokenizer {tokenizer.name_or_path} has no EOS token to end documents with")
    identity = {
        "sources": [fingerprint(source) for source in sources],
        "arguments": [split, length, max_tokens, max_package_bytes],
        "special_tokens": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in _CODE],
    }
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    folder = cache_folder() / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            _make(folder, sources, split, tokenizer, length, max_tokens, max_package_bytes)
    return Dataset.load_from_disk(str(folder))


def _make(
    folder: Path,
    sources: list[str],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    max_tokens: int | None,
    max_package_bytes: int,
) -> None:
    def rows() -> Iterator[dict[str, list[int]]]:
        texts = documents(sources, split, max_package_bytes=max_package_bytes)
        empty = True
        for row in pack(texts, tokenizer, length, max_tokens):
            empty = False
            yield row
        if empty:
            raise SourceError(f"the {split} split of {', '.join(sources)} does not fill one row of {length} tokens")

    # Written row by row: a corpus need not fit in memory. The work folder holds the only other copy.
    work, scratch = folder.with_suffix(".work"), folder.with_suffix(".partial")
    for leftover in (work, scratch):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        made = Dataset.from_generator(rows, features=_FEATURES, cache_dir=str(work), fingerprint=folder.name)
        made.save_to_disk(str(scratch))
        scratch.rename(folder)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
