"""What a run reads: sources with their weights, without duplicates, split and mixed.

A source is spelled as `data.readers.read` takes it, with its weight after an @ where sources are mixed:

    python-sources
    chats.jsonl@0.7   org/name:train_sft@0.3

Weights are shares of tokens; they need not add up to 1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from data.readers import PYTHON_SOURCES, SPLITS, fingerprint, read
from data.rendering import render
from data.rows import SourceError
from data.tally import Tally

__all__ = [
    "PYTHON_SOURCES",
    "SPLITS",
    "Source",
    "SourceError",
    "documents",
    "fingerprint",
    "parse",
    "token_documents",
]

_CONTENT = ("text", "prompt", "completion", "messages", "tools", "input_ids", "loss_mask")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Source:
    """Where text lies, and its weight among others; None where sources are not mixed."""

    location: str
    weight: float | None


def parse(sources: Sequence[str]) -> list[Source]:
    """Split sources into location and weight.

    Raises:
        SourceError: a weight is not above 0, or only some sources have one.
    """
    if not sources or not all(sources):
        raise SourceError("no source is given")
    parsed = [_parse(source) for source in sources]
    weighted = [source for source in parsed if source.weight is not None]
    if weighted and len(weighted) < len(parsed):
        missing = next(source.location for source in parsed if source.weight is None)
        raise SourceError(f"{missing} has no weight, but {weighted[0].location} has one: weight all sources, or none")
    return parsed


def _parse(source: str) -> Source:
    # The name of an existing file may end like a weight.
    match = None if Path(source).exists() else re.fullmatch(r"(.+)@([+-]?(?:\d+\.?\d*|\.\d+))", source, re.DOTALL)
    if match is None:
        return Source(source, None)
    if float(match[2]) <= 0:
        raise SourceError(f"{source}: a weight must be above 0")
    return Source(match[1], float(match[2]))


def split_of(document_id: str) -> str:
    """The split of a document: a function of its id alone."""
    bucket = int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def documents(
    sources: Sequence[str],
    split: str | None,
    *,
    max_package_bytes: int = 2_000_000,
    tally: Tally | None = None,
) -> Iterator[dict[str, Any]]:
    """The documents of one split of some sources, one source after the other, without exact duplicates among all.

    Args:
        sources: as spelled above.
        split: "train", "validation" or "held-out"; None for all three.
        max_package_bytes: "python-sources" only: at most this much of each top-level package.
        tally: counts the rows of the split, and passes over those that can't be read; without it the first is raised.

    Raises:
        SourceError: no such source, or an unreadable row.
    """
    seen: set[bytes] = set()
    for source in parse(sources):
        yield from _documents(read(source.location, max_package_bytes), split, tally or Tally(), seen)


def _documents(
    rows: Iterator[dict[str, Any]],
    split: str | None,
    tally: Tally,
    seen: set[bytes],
    elsewhere: Callable[[bytes], bool] = lambda digest: False,
) -> Iterator[dict[str, Any]]:
    """The documents of one source.

    Args:
        seen: of those that came before, which this adds to.
        elsewhere: tells of a digest whether it is another source's.
    """
    if split is not None and split not in SPLITS:
        raise SourceError(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
    for row in rows:
        own = split is None or row.get("split", split_of(row["id"])) == split
        tally.rows += own
        if "fault" in row:
            if own or not tally.max_share:
                tally.add(row["fault"])
            continue
        # Duplicates are dropped before the split, or a copy could sit on both sides of it. A row with a split of
        # its own was cut out of documents that were compared.
        digest = _digest(row)
        if digest is None or ("split" not in row and (digest in seen or elsewhere(digest))):
            continue
        seen.add(digest)
        if own:
            yield row


def _digest(row: dict[str, Any]) -> bytes | None:
    """Of what a document holds; None where that is nothing."""
    return hashlib.sha256(_identity(row)).digest()[:16] if row.get("text", "x").strip() else None


def _first_places(locations: Sequence[str], max_package_bytes: int) -> dict[bytes, int]:
    """Of all documents of these sources but the last the number of the first that has it."""
    places: dict[bytes, int] = {}
    for place, location in enumerate(locations[:-1]):
        for row in read(location, max_package_bytes):
            digest = None if "fault" in row else _digest(row)
            if digest is not None:
                places.setdefault(digest, place)
    return places


def _identity(row: dict[str, Any]) -> bytes:
    if "text" in row:
        return row["text"].encode()
    content = {key: row[key] for key in _CONTENT if key in row}
    try:
        return json.dumps(content, sort_keys=True, default=str).encode()
    except (RecursionError, TypeError):  # deeply nested; keys of several types
        return repr(content).encode("utf-8", "surrogatepass")


def token_documents(
    sources: Sequence[str],
    split: str | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_package_bytes: int = 2_000_000,
    tally: Tally | None = None,
    processes: int = 1,
) -> Iterator[dict[str, Any]]:
    """The documents of one split as `data.rendering.render` gives them.

    Sources without weights come one after the other, to their ends. With weights each has its share of the tokens at
    every point, up to one document, until the first of them ends.

    Raises:
        SourceError: no such source, or a row that can't be read or rendered, unless a `tally` counts these.
    """
    parts, weights = streams(sources, split, max_package_bytes, tally)
    each = max(1, processes // len(parts))
    rendered = [render(stream, tokenizer, tally, each) for stream in parts]
    return interleave(rendered, weights, lambda document: len(document["input_ids"]))


def streams(
    sources: Sequence[str], split: str | None, max_package_bytes: int, tally: Tally | None
) -> tuple[list[Iterator[dict[str, Any]]], list[float]]:
    """One stream of documents, or one per source where they have weights; and the weights.

    However many are mixed, a source is read once for its documents, and all but the last once more before that: which
    copy of a document stays, the first source's, must not depend on how they are mixed, which differs by the split.
    """
    parsed = parse(sources)
    weights = [source.weight for source in parsed if source.weight is not None]
    if not weights:
        return [documents(sources, split, max_package_bytes=max_package_bytes, tally=tally)], [1.0]
    locations = [source.location for source in parsed]
    places = cache(lambda: _first_places(locations, max_package_bytes))

    def stream(place: int) -> Iterator[dict[str, Any]]:
        rows = read(locations[place], max_package_bytes)
        # The first needs to know nothing of the others, so that one source alone is read once.
        earlier = (lambda digest: places().get(digest, place) < place) if place else (lambda digest: False)
        return _documents(rows, split, tally or Tally(), set(), earlier)

    return [stream(place) for place in range(len(parsed))], weights


def interleave(streams: list[Iterator[Item]], weights: list[float], size: Callable[[Item], int]) -> Iterator[Item]:
    """Always from the stream that is furthest behind its share, until that one has ended."""
    drawn = [0] * len(streams)
    while True:
        index = min(range(len(streams)), key=lambda i: drawn[i] / weights[i])
        item = next(streams[index], None)
        if item is None:
            return
        drawn[index] += size(item)
        yield item
