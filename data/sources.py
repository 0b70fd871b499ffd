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
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from data.readers import PYTHON_SOURCES, SPLITS, fingerprint, read
from data.rendering import document_text, render, text_tokens
from data.rows import RowError, SourceError
from data.tally import Tally, tell
from speculator.chat import chat_tokens

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

_PACKED_HEAD = 256
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
    if not sources or not all(sources):
        raise SourceError("no source")
    parsed = [_parse(source) for source in sources]
    weighted = [source for source in parsed if source.weight is not None]
    if any(source.weight == 0 for source in weighted):
        raise SourceError("the weight of a source must be above 0")
    if weighted and len(weighted) < len(parsed):
        raise SourceError(f"{weighted[0].location} has a weight, others have not: give one to each source, or to none")
    return parsed


def _parse(source: str) -> Source:
    # A name that ends in what looks like a weight, and is there, is a name.
    match = None if Path(source).exists() else re.fullmatch(r"(.+)@(\d+\.?\d*|\.\d+)", source, re.DOTALL)
    return Source(match[1], float(match[2])) if match else Source(source, None)


def split_of(document_id: str) -> str:
    """The split of a document: a function of its id alone."""
    bucket = int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def documents(
    sources: Sequence[str],
    split: str | None,
    *,
    max_package_bytes: int = 2_000_000,
    only: int | None = None,
    tally: Tally | None = None,
) -> Iterator[dict[str, Any]]:
    """The documents of one split of some sources, one source after the other, without exact duplicates among all.

    Args:
        sources: as spelled above.
        split: "train", "validation" or "held-out"; None for all three.
        max_package_bytes: "python-sources" only: at most this much of each top-level package.
        only: leave out the documents of all sources but this one.
        tally: counts the rows of the split, and passes over those that can't be read; without it the first is raised.

    Raises:
        SourceError: no such source, or an unreadable row.
    """
    if split is not None and split not in SPLITS:
        raise SourceError(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
    tally = tally or Tally()
    seen: set[bytes] = set()
    for index, source in enumerate(parse(sources)[: None if only is None else only + 1]):
        for row in read(source.location, max_package_bytes):
            own = only in (None, index) and (split is None or row.get("split", split_of(row["id"])) == split)
            tally.rows += own
            if "fault" in row:
                if own or not tally.most:
                    tally.add(row["fault"])
                continue
            # Duplicates are dropped before the split, or a copy could sit on both sides of it. A row with a split of
            # its own was cut out of documents that were compared.
            digest = hashlib.sha256(_identity(row)).digest()
            if ("split" not in row and digest in seen) or not row.get("text", "x").strip():
                continue
            seen.add(digest)
            if own:
                yield row


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
) -> Iterator[dict[str, Any]]:
    """The documents of one split as `data.rendering.render` gives them.

    Sources without weights come one after the other, to their ends. With weights each has its share of the tokens at
    every point, up to one document, until the first of them ends.

    Raises:
        SourceError: no such source, or a row that can't be read or rendered, unless a `tally` counts these.
    """
    streams, weights = _streams(sources, split, max_package_bytes, tally)
    rendered = [render(stream, tokenizer, tally) for stream in streams]
    return _interleave(rendered, weights, lambda document: len(document["input_ids"]))


def _streams(
    sources: Sequence[str], split: str | None, max_package_bytes: int, tally: Tally | None
) -> tuple[list[Iterator[dict[str, Any]]], list[float]]:
    """One stream of documents, or one per source where they have weights; and the weights."""
    weights = [source.weight for source in parse(sources) if source.weight is not None]
    # Which copy of a document stays must not depend on how sources are mixed: that differs from split to split.
    places = range(len(weights)) if weights else [None]
    return [
        documents(sources, split, max_package_bytes=max_package_bytes, only=place, tally=tally) for place in places
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


@dataclass(frozen=True)
class Room:
    """What a prompt has to fit with its answer.

    Attributes:
        name: of the model.
        context: its length.
        new_tokens: the most of an answer.
    """

    name: str
    context: int
    new_tokens: int

    def fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) + self.new_tokens <= self.context

    def check(self, what: str, found: int, left_out: int) -> None:
        """Say on stderr how many prompts were left out.

        Raises:
            SourceError: all of them.
        """
        here = f"{self.name}, which has a context of {self.context}, with {self.new_tokens} new tokens"
        if left_out and not found:
            raise SourceError(f"{what}: none of its {left_out} prompts fits {here}")
        if left_out:
            tell(f"{what}: {left_out} prompts are left out: they do not fit {here}")


class Prompts(list[list[int]]):
    """Token ids to continue.

    Attributes:
        ends: of some the answer has an end of its own, as in a chat; a cut of a text just goes on.
        left_out: how many did not fit.
    """

    ends = False
    left_out = 0


def prompts(
    sources: Sequence[str],
    split: str | None,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    count: int,
    *,
    per_text: int = 1,
    last_turn: bool = False,
    room: Room | None = None,
    max_package_bytes: int = 2_000_000,
    tally: Tally | None = None,
) -> Prompts:
    """Up to `count` prompts; at most `per_text` of a text, no two of them the same, and one of any other document.

    Of a text `prompt_tokens` tokens from the beginning of some line, what the tokenizer puts in front included; shorter
    ones are passed over. Of a chat all up to the assistant's first turn, or the user's `last_turn`, with the template's
    generation prompt. Of a prompt with its completion the prompt. Of tokens all that come before the first to be
    learnt; where that is the first of all, `prompt_tokens` of them. Of packed tokens the same for each document that
    begins in the row: a row's first may have begun before it. Weights of sources are shares of prompts.

    Args:
        room: prompts that it does not have are left out, and counted.
        tally: counts rows that can't be used; without it the first is raised.

    Raises:
        SourceError: no such source, a row that can't be read or rendered, or no prompt fits.
    """
    streams, weights = _streams(sources, split, max_package_bytes, tally)
    cut = [_prompts(stream, tokenizer, prompt_tokens, per_text, last_turn, tally or Tally()) for stream in streams]
    found = Prompts()
    for ids, ends in _interleave(cut, weights, lambda prompt: 1):
        if room is not None and not room.fits(ids):
            found.left_out += 1
            continue
        found.append(ids)
        found.ends |= ends
        if len(found) == count:
            break
    if room is not None:
        room.check(", ".join(sources) + (f" ({split})" if split else ""), len(found), found.left_out)
    return found


def _prompts(
    rows: Iterator[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    per_text: int,
    last_turn: bool,
    tally: Tally,
) -> Iterator[tuple[list[int], bool]]:
    first = list(islice(rows, 1))
    if first and "document_ids" in first[0]:
        first += islice(rows, _PACKED_HEAD)
    # Of packed text all is learnt; of packed chats some row soon has context.
    packed_text = all(all(row.get("loss_mask", [1])) for row in first)
    for row in chain(first, rows):
        if "text" in row:
            yield from ((ids, False) for ids in _cuts(row, tokenizer, prompt_tokens, per_text))
        elif "messages" in row:
            try:
                yield chat_tokens(_opening(row, tokenizer, last_turn), tokenizer), True
            except RowError as error:
                tally.add(error)
        elif "prompt" in row:
            if ids := text_tokens([row["prompt"]], tokenizer)[0]:
                yield ids, True
        elif "document_ids" in row and not packed_text:
            parts = groupby(zip(row["document_ids"], row["input_ids"], row["loss_mask"], strict=True), lambda c: c[0])
            for _, ids, mask in [list(zip(*part, strict=True)) for _, part in parts][1:]:
                if 1 in mask:  # else the row ends before what is learnt begins
                    yield from _before_learnt(list(ids), list(mask), prompt_tokens)
        else:
            yield from _before_learnt(row["input_ids"], row["loss_mask"], prompt_tokens)


def _cuts(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, per_text: int
) -> Iterator[list[int]]:
    """From the beginnings of `per_text` lines of a text."""
    lines, made = row["text"].splitlines(keepends=True), set()
    for k in range(per_text):
        # Where in the document: a function of its id, so the same prompt everywhere.
        digest = hashlib.sha256(f"start of {row['id']}{f', {k}' if k else ''}".encode()).digest()
        start = int.from_bytes(digest[:8], "big") % len(lines)
        text = "".join(lines[start:])[: prompt_tokens * 16]
        ids = text_tokens([text], tokenizer)[0][:prompt_tokens]
        if len(ids) == prompt_tokens and tuple(ids) not in made:
            made.add(tuple(ids))
            yield ids


def _opening(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, last_turn: bool) -> str:
    """A chat up to where the assistant first answers, or answers the user's last turn."""
    roles = [message["role"] for message in row["messages"]]
    if last_turn and "user" in roles:
        count = len(roles) - roles[::-1].index("user")
    else:
        count = roles.index("assistant") if "assistant" in roles else len(roles)
    if "user" not in roles[:count]:
        raise RowError(row["where"], "a chat in which the user asks nothing")
    return document_text(row, tokenizer, count, ask=True)


def _before_learnt(ids: list[int], mask: list[int], prompt_tokens: int) -> Iterator[tuple[list[int], bool]]:
    """What of a document's tokens comes before the first to be learnt; a cut where that is the first of all."""
    if 1 in mask and not mask[0]:
        yield ids[: mask.index(1)], True
    elif len(ids) >= prompt_tokens:
        yield ids[:prompt_tokens], False
