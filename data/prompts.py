"""Prompts out of sources: cuts of texts, openings of chats, what comes before the tokens to be learnt."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from data.rendering import check_tokens, document_text, text_tokens
from data.rows import RowError, SourceError
from data.sources import interleave, streams
from data.tally import Tally, log
from speculator.chat import chat_tokens

_PACKED_HEAD = 256
Item = TypeVar("Item")


@dataclass(frozen=True)
class Room:
    """What a prompt has to fit with its answer.

    Attributes:
        name: of the model.
        context: its length.
        new_tokens: the most of an answer.
        seq_length: the most of a prompt, where what is made is trained on.
    """

    name: str
    context: int
    new_tokens: int
    seq_length: int = sys.maxsize

    def take(
        self, what: str, prompts: Iterable[tuple[list[int], Item]], count: int | None
    ) -> tuple[list[tuple[list[int], Item]], int]:
        """The first `count` prompts that fit, each with what it came with, and how many were left out before that.

        Raises:
            SourceError: all of them.
        """
        found: list[tuple[list[int], Item]] = []
        left_out = 0
        for ids, item in prompts:
            if len(ids) > min(self.seq_length, self.context - self.new_tokens):
                left_out += 1
                continue
            found.append((ids, item))
            if len(found) == count:
                break
        self._say(what, len(found), left_out)
        return found, left_out

    def _say(self, what: str, found: int, left_out: int) -> None:
        here = f"{self.name}, which has a context of {self.context}, with {self.new_tokens} new tokens"
        if self.seq_length < self.context - self.new_tokens:
            here = f"data.seq_length {self.seq_length}"
        if left_out and not found:
            raise SourceError(f"{what}: none of its {left_out} prompts fits {here}")
        if left_out:
            log(f"{what}: {left_out} prompts are left out: they do not fit {here}")


class TokenPrompts(list[list[int]]):
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
) -> TokenPrompts:
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
    parts, weights = streams(sources, split, max_package_bytes, tally)
    cut = [_prompts(stream, tokenizer, prompt_tokens, per_text, last_turn, tally or Tally()) for stream in parts]
    mixed, left_out = interleave(cut, weights, lambda prompt: 1), 0
    if room is None:
        taken = list(islice(mixed, count))
    else:
        taken, left_out = room.take(", ".join(sources) + (f" ({split})" if split else ""), mixed, count)
    found = TokenPrompts(ids for ids, _ in taken)
    found.left_out, found.ends = left_out, any(ends for _, ends in taken)
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
        if "input_ids" in row:
            try:
                check_tokens(row, tokenizer)
            except RowError as error:
                tally.add(error)
                continue
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
