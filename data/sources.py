"""Read sources without duplicates, split them, and mix them by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain, islice, zip_longest
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from data.documents import Document, TokenDocument, digest_of
from data.mixture import Mixture, SourceError
from data.readers import SPLITS, fingerprint, read
from data.rendering import render
from data.tally import COPY, EMPTY, Tally

_FEW = 200
"""Documents below which a source may have an empty split by chance."""
Item = TypeVar("Item")


def name_of(row: Document) -> str:
    """Return a document's name, which decides its split and cuts: from its source, or else a hash of its content."""
    return row.get("name") or digest_of(row).hex()


def split_of(name: str) -> str:
    """Return the split of a document, a key of `SPLITS`: by a hash of its name, so it is the same in every run."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    return next(split for split, buckets in SPLITS.items() if bucket in buckets)


def _splits_of_few(rows: list[Document]) -> dict[str, str]:
    """Return the split of each document of a small source by its name, so that no split is empty.

    Validation and held-out get a twentieth of the documents each, at least one. {}: `split_of` leaves no split empty,
    or there are too few documents.
    """
    names = {name_of(row) for row in rows if "split" not in row and "fault" not in row}
    if len(names) < len(SPLITS) or {split_of(each) for each in names} == set(SPLITS):
        return {}
    # By the hash's rank, not its value: 30 documents may all hash to "train", but one of 30 is the first.
    ranked = sorted(names, key=lambda each: hashlib.sha256(each.encode()).digest())
    count = max(1, len(ranked) // 20)
    splits = ["validation"] * count + ["held-out"] * count + ["train"] * (len(ranked) - 2 * count)
    return dict(zip(ranked, splits, strict=True))


def documents(
    location: str,
    split: str | None,
    *,
    tally: Tally | None = None,
    elsewhere: Callable[[bytes], bool] = lambda digest: False,
) -> Iterator[Document]:
    """Yield the documents of one split of a source, without exact duplicates.

    Args:
        location: see `data.readers.read`.
        split: "train", "validation" or "held-out"; None: all three.
        tally: counts the rows of the split, and skips unusable ones (default: the first one raises).
        elsewhere: whether another source keeps the document with this digest; it is left out here.
    """
    if split is not None and split not in SPLITS:
        raise SourceError(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
    tally, seen, rows = tally or Tally(), set[bytes](), read(location)
    # A source that ends within `_FEW` rows is a small one, whose splits are balanced; a larger one is only streamed.
    first = list(islice(rows, _FEW))
    few = _splits_of_few(first) if len(first) < _FEW else {}
    for row in chain(first, rows):
        digest = b"" if "fault" in row else digest_of(row)
        name = row.get("name") or digest.hex() or row["id"]  # a bad row has no content
        in_split = split is None or (row.get("split") or few.get(name) or split_of(name)) == split
        tally.rows += in_split
        if "fault" in row:
            if in_split or not tally.max_share:
                tally.add(row["fault"])
            continue
        if not row.get("text", "x").strip():
            tally.skipped[EMPTY] += in_split
            continue
        # Duplicates are dropped before splitting, or two splits or sources could each have a copy.
        if digest in seen or elsewhere(digest):
            tally.skipped[COPY] += in_split
            continue
        seen.add(digest)
        if in_split:
            tally.unread.update(row.get("unread", ()))
            yield row


@lru_cache(1)  # of the sources of a run, whose splits and prompts are read one by one
def _first_sources(locations: tuple[str, ...], fingerprints: tuple[str, ...]) -> dict[bytes, int]:
    """Return {digest: first source that has it}, but for the last source; cached while the `fingerprints` are equal."""
    first: dict[bytes, int] = {}
    for source, location in enumerate(locations[:-1]):
        for row in read(location):
            if "fault" not in row:
                first.setdefault(digest_of(row), source)
    return first


def token_documents(
    mixture: Mixture,
    split: str | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tally: Tally | None = None,
    processes: int = 1,
) -> Iterator[TokenDocument]:
    """Yield the documents of one split, rendered by `data.rendering.render`; `split` and `tally` are as in `documents`.

    Sources without weights take turns, document by document, until all have ended. With weights, each source has its
    share of the tokens at every point, up to one document, until the first source ends. The documents do not depend on
    the number of `processes` that render.
    """
    parts = streams(mixture, split, tally)
    if not mixture.weights:
        return render(interleave(parts, (), len), tokenizer, tally, processes)
    # The streams are read in turn, each by processes of its own.
    each = max(1, processes // len(parts))
    rendered = [render(stream, tokenizer, tally, each) for stream in parts]
    return interleave(rendered, mixture.weights, lambda document: len(document["input_ids"]))


def streams(mixture: Mixture, split: str | None, tally: Tally | None) -> list[Iterator[Document]]:
    """Return a stream of the documents of one split for each source; `split` and `tally` are as in `documents`.

    Of equal documents in several sources, only the first source's is kept. The streams are read in turn, so to find
    duplicates all sources but the last are read twice.
    """
    locations = mixture.locations
    first = cache(lambda: _first_sources(tuple(locations), tuple(map(fingerprint, locations[:-1]))))

    def stream(source: int) -> Iterator[Document]:
        # The first source keeps all its documents, so a single source is read once.
        earlier = (lambda digest: first().get(digest, source) < source) if source else (lambda digest: False)
        return documents(locations[source], split, tally=tally, elsewhere=earlier)

    return [stream(source) for source in range(len(locations))]


def interleave(
    streams: Sequence[Iterator[Item]], weights: Sequence[float], size: Callable[[Item], int]
) -> Iterator[Item]:
    """Yield items, each from the stream that is furthest below its share, until that stream has none left.

    Args:
        weights: the streams' shares; they need not add up to 1. []: the streams take turns until all have ended.
        size: how much an item counts, such as its tokens.
    """
    if not weights:
        yield from (item for item in chain.from_iterable(zip_longest(*streams)) if item is not None)
        return
    drawn = [0] * len(streams)
    while True:
        # With weights 3 and 1 and items of size 1: streams 0, 1, 0, 0, 0, 1, 0, 0, ... After 4 items 3 and 1 are drawn.
        index = min(range(len(streams)), key=lambda i: drawn[i] / weights[i])
        item = next(streams[index], None)
        if item is None:
            return
        drawn[index] += size(item)
        yield item
