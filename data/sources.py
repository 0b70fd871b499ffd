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
from itertools import islice
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from data.readers import PYTHON_SOURCES, SPLITS, fingerprint, read
from data.rendering import chat_text, chat_tokens, render
from data.rows import SourceError

__all__ = [
    "PYTHON_SOURCES",
    "SPLITS",
    "Source",
    "SourceError",
    "documents",
    "fingerprint",
    "parse",
    "prompts",
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
    """Sources as they are spelled.

    Raises:
        SourceError: none, a weight that is not above 0, or weights of some only.
    """
    matches = [re.fullmatch(r"(.+?)(?:@(\d+\.?\d*|\.\d+))?", source) for source in sources]
    parsed = [Source(m[1], float(m[2]) if m[2] else None) for m in matches if m]
    if len(parsed) < len(sources) or not parsed:
        raise SourceError("no source")
    weighted = [source for source in parsed if source.weight is not None]
    if any(source.weight == 0 for source in weighted):
        raise SourceError("the weight of a source must be above 0")
    if weighted and len(weighted) < len(parsed):
        raise SourceError(f"{weighted[0].location} has a weight, others have not: give one to each source, or to none")
    return parsed


def split_of(document_id: str) -> str:
    """The split of a document: a function of its id alone."""
    bucket = int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def documents(
    sources: Sequence[str], split: str | None, *, max_package_bytes: int = 2_000_000, only: int | None = None
) -> Iterator[dict[str, Any]]:
    """The documents of one split of some sources, one source after the other, without exact duplicates among all.

    Args:
        sources: as spelled above.
        split: "train", "validation" or "held-out"; None for all three.
        max_package_bytes: "python-sources" only: at most this much of each top-level package.
        only: leave out the documents of all sources but this one.

    Raises:
        SourceError: no such source, or an unreadable row.
    """
    if split is not None and split not in SPLITS:
        raise SourceError(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
    seen: set[bytes] = set()
    for index, source in enumerate(parse(sources)[: None if only is None else only + 1]):
        for row in read(source.location, max_package_bytes):
            # Duplicates are dropped before the split, or a copy could sit on both sides of it. A row with a split of
            # its own was cut out of documents that were compared.
            digest = hashlib.sha256(_identity(row)).digest()
            if ("split" not in row and digest in seen) or not row.get("text", "x").strip():
                continue
            seen.add(digest)
            own = split is None or row.get("split", split_of(row["id"])) == split
            if own and only in (None, index):
                yield row


def _identity(row: dict[str, Any]) -> bytes:
    if "text" in row:
        return row["text"].encode()
    return json.dumps({key: row[key] for key in _CONTENT if key in row}, sort_keys=True, default=str).encode()


def token_documents(
    sources: Sequence[str], split: str | None, tokenizer: PreTrainedTokenizerBase, *, max_package_bytes: int = 2_000_000
) -> Iterator[dict[str, Any]]:
    """The documents of one split as `data.rendering.render` gives them.

    Sources without weights come one after the other, to their ends. With weights each has its share of the tokens at
    every point, up to one document, until the first of them ends.

    Raises:
        SourceError: no such source, or a row that can't be read or rendered.
    """
    streams, weights = _streams(sources, split, max_package_bytes)
    rendered = [render(stream, tokenizer) for stream in streams]
    return _interleave(rendered, weights, lambda document: len(document["input_ids"]))


def _streams(
    sources: Sequence[str], split: str | None, max_package_bytes: int
) -> tuple[list[Iterator[dict[str, Any]]], list[float]]:
    """One stream of documents, or one per source where they have weights; and the weights."""
    weights = [source.weight for source in parse(sources) if source.weight is not None]
    # Which copy of a document stays must not depend on how sources are mixed: that differs from split to split.
    places = range(len(weights)) if weights else [None]
    return [
        documents(sources, split, max_package_bytes=max_package_bytes, only=place) for place in places
    ], weights or [1.0]


def _interleave(streams: list[Iterator[Item]], weights: list[float], size: Callable[[Item], int]) -> Iterator[Item]:
    """Always from the stream that is furthest behind its share, until that one has ended."""
    drawn = [0] * len(streams)
    while True:
        index = min(range(len(streams)), key=lambda i: drawn[i] / weights[i])
        item = next(streams[index], None)
        if item is None:
            return
        drawn[index] += size(item)
        yield item


def prompts(
    sources: Sequence[str],
    split: str | None,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    count: int,
    *,
    per_text: int = 1,
    max_package_bytes: int = 2_000_000,
) -> list[list[int]]:
    """Up to `count` prompts, as tokens; at most `per_text` of a text and one of any other document.

    Of a text `prompt_tokens` tokens from the beginning of some line, what the tokenizer puts in front included; shorter
    ones are passed over. Of a chat all up to the assistant's first turn, with the template's generation prompt. Of a
    prompt with its completion the prompt. Of tokens all that come before the first to be learnt; where that is the
    first of all, `prompt_tokens` of them. Weights of sources are shares of prompts.

    Raises:
        SourceError: no such source, or a row that can't be read or rendered.
    """
    streams, weights = _streams(sources, split, max_package_bytes)
    cut = [_prompts(stream, tokenizer, prompt_tokens, per_text) for stream in streams]
    return list(islice(_interleave(cut, weights, lambda prompt: 1), count))


def _prompts(
    rows: Iterator[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, per_text: int
) -> Iterator[list[int]]:
    for row in rows:
        if "text" in row:
            lines = row["text"].splitlines(keepends=True)
            for k in range(per_text):
                # Where in the document: a function of its id, so the same prompt everywhere.
                digest = hashlib.sha256(f"start of {row['id']}{f', {k}' if k else ''}".encode()).digest()
                start = int.from_bytes(digest[:8], "big") % len(lines)
                text = "".join(lines[start:])[: prompt_tokens * 16]
                ids = tokenizer(text, verbose=False)["input_ids"][:prompt_tokens]
                if len(ids) == prompt_tokens:
                    yield ids
            continue
        least = 1
        if "messages" in row:
            roles = [message["role"] for message in row["messages"]]
            first = roles.index("assistant") if "assistant" in roles else None
            ids = chat_tokens(chat_text(row, tokenizer, first, ask=True), tokenizer)
        elif "prompt" in row:
            ids = tokenizer(row["prompt"], verbose=False)["input_ids"]
        elif 1 in row["loss_mask"][1:] and not row["loss_mask"][0]:
            ids = row["input_ids"][: row["loss_mask"].index(1)]
        else:
            ids, least = row["input_ids"][:prompt_tokens], prompt_tokens
        if len(ids) >= least:
            yield ids
