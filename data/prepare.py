"""Prepare packed rows once, in a cache folder that all processes of a run share."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset, DatasetDict, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from data.mixture import Mixture, SourceError
from data.packing import COLUMNS, pack
from data.readers import SPLITS, fingerprint
from data.sources import token_documents
from data.tally import Tally
from data.workers import default_processes
from speculator import chat
from speculator.files import cache_folder, locked, make_cache_folder, new_folder, read_json, write_text
from speculator.terminal import Progress, log

_CODE = [*sorted(Path(__file__).parent.glob("*.py")), Path(chat.__file__)]
_LIBRARIES = ("transformers", "tokenizers", "jinja2")  # render and tokenise
_MANIFEST = "manifest.json"


class TooLittleTextError(SourceError):
    """Raised for a split that has no text because the source has too few documents."""


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """A request for the rows of one split of some sources, packed.

    Attributes:
        length: number of tokens in a row.
        split: "train", "validation" or "held-out".
        max_tokens: largest number of tokens of all rows; None: no limit.
        first_rows: stop after this many rows, as soon as one token among them has loss; None: all rows.
        max_bad_rows: largest share of unusable rows in the training split; they are skipped with a warning. Other
            splits are small, so any share is accepted once it is above 0.
        num_proc: processes that render and tokenize; the rows do not depend on it.
    """

    mixture: Mixture
    split: str
    tokenizer: PreTrainedTokenizerBase
    length: int
    max_tokens: int | None = None
    first_rows: int | None = None
    max_bad_rows: float = 0.0
    num_proc: int | None = None

    @property
    def name(self) -> str:
        """Name of the rows in messages."""
        return f"the {self.split} split of {self.mixture}"

    @property
    def max_share(self) -> float:
        """Largest accepted share of bad rows. Splits other than train are small: if some may be bad, all may."""
        return self.max_bad_rows if self.split == "train" or not self.max_bad_rows else 1.0

    def key(self) -> str:
        """Return the name of the rows' cache folder: a hash of everything that they depend on."""
        identity = {
            "sources": [[fingerprint(source.location), source.weight] for source in self.mixture.sources],
            "arguments": [self.split, self.length, self.max_tokens, self.first_rows],
            "special_tokens": [self.tokenizer.bos_token_id, self.tokenizer.eos_token_id],
            "tokenizer": hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            "chat_template": self.tokenizer.chat_template,
            "versions": {name: version(name) for name in _LIBRARIES},
            "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in _CODE],
        }
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]


def token_rows(request: RowRequest, report: bool = True) -> Dataset:
    """Return the rows of a request, which are prepared once.

    The cache key covers the sources (names, weights, sizes, modification times), the request, the tokenizer with its
    chat template, the code of this package, and the versions of the libraries that render and tokenise. One process
    prepares the rows under a file lock; the others wait for the lock, outside of any collective, so that a long
    preparation does not time out. With `report`, it prints what became of the rows that were read.

    Raises:
        SourceError: an unreadable source, too many bad rows, or a split without text.
    """
    rows, _ = _cached(request, report)
    return rows


def save_rows(wanted: RowRequest, output: Path) -> dict[str, dict[str, int]]:
    """Write the rows of every split that has text into a new `datasets` folder, which is a valid source.

    Args:
        wanted: a request for the rows of any split; `max_tokens` limits each.
        output: folder, which must not exist.

    Returns:
        The numbers of `documents`, `rows`, `tokens` and `tokens_with_loss` of each split.

    Raises:
        SourceError: an unreadable source, too many bad rows, or no text to train on. Validation and held-out split may
            be empty.
    """
    if output.exists():
        raise SourceError(f"{output} already exists: choose another --output")
    rows: dict[str, Dataset] = {}
    counts: dict[str, dict[str, int]] = {}
    with new_folder(output) as scratch:  # first: a second command of the same output ends at once
        for split in SPLITS:
            request = replace(wanted, split=split)
            try:
                rows[split], counts[split] = _cached(request)
            except TooLittleTextError:
                if split == "train":
                    raise
                log(f"{request.name} has no text, so it is left out")
        DatasetDict(rows).save_to_disk(str(scratch))
    return counts


def _cached(request: RowRequest, report: bool = True) -> tuple[Dataset, dict[str, int]]:
    """Return the rows from the cache, and their counts (see `save_rows`); prepare the rows if they are missing."""
    folder = cache_folder() / request.key()
    manifest = folder / _MANIFEST
    if not manifest.exists():
        make_cache_folder()
        busy = "waiting for another process that prepares the same rows"
        with locked(Path(f"{folder}.lock"), busy, wait=True):
            # Again, under the lock: another process may have prepared the rows while this one waited.
            if not manifest.exists():
                _prepare(folder, request)
    content = read_json(manifest)
    Tally.from_record(content["bad_rows"], request.max_share).check(request.name)
    rows = Dataset.load_from_disk(str(folder))
    if report:
        Tally.from_record(content["bad_rows"], 0.0).warn(request.name)
    return rows, content["counts"]


def _prepare(folder: Path, request: RowRequest) -> None:
    """Write the rows of a request, and a manifest with counts and bad rows, into a new folder."""
    counts = dict.fromkeys(("documents", "rows", "tokens", "tokens_with_loss"), 0)
    tally, name = Tally(request.max_share), request.name
    processes = request.num_proc or default_processes()
    documents = token_documents(request.mixture, request.split, request.tokenizer, tally=tally, processes=processes)
    features = Features({column: List(Value("int32")) for column in COLUMNS})
    bar = Progress(title=f"tokenising {name}", unit="tokens", unit_scale=True, total=request.max_tokens)

    def rows() -> Iterator[dict[str, list[int]]]:
        for row in pack(documents, request.length, request.max_tokens):
            counts["rows"] += 1
            counts["tokens"] += len(row["input_ids"])
            counts["tokens_with_loss"] += sum(row["loss_mask"])
            bar.update(len(row["input_ids"]))
            yield row
            # Not before a token has loss: rows without labels would measure nothing.
            if request.first_rows and counts["rows"] >= request.first_rows and counts["tokens_with_loss"]:
                break
        counts["documents"] = tally.used
        tally.check(name)
        if not counts["rows"]:
            copies = f": {tally.counted_copies()}" if tally.copies else ""
            raise TooLittleTextError(f"{name} has no text: give more documents, at least 20{copies}")
        if tally.copies and counts["tokens"] <= request.length:
            log(f"{name} has little text: {tally.counted_copies()}")
        if not counts["tokens_with_loss"]:
            raise SourceError(f"{name}: no token has loss: the loss masks are all 0")

    # `datasets` streams the rows into the work folder, so the corpus need not fit in memory.
    work = folder.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)
    try:
        with new_folder(folder) as scratch:
            try:
                dataset = Dataset.from_generator(rows, features=features, cache_dir=str(work), fingerprint=folder.name)
            except DatasetGenerationError as error:
                raise error.__cause__ or error from None
            dataset.save_to_disk(str(scratch))
            write_text(scratch / _MANIFEST, json.dumps({"counts": counts, "bad_rows": tally.record()}, indent=1))
    finally:
        bar.close()
        shutil.rmtree(work, ignore_errors=True)
