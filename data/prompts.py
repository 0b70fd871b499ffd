"""Take prompts from sources: parts of texts, chats up to an answer or whole, tokens before the first one with loss."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice

from transformers import PreTrainedTokenizerBase

from data.documents import Document, RowError
from data.mixture import Mixture, SourceError
from data.rendering import as_chat, check_tokens, text_tokens
from data.rows import errors_of_row
from data.sources import interleave, name_of, streams
from data.tally import TOO_LONG, Tally, log
from speculator.chat import DATA_DAY, RefusedError, chat_text, chat_tokens
from speculator.prompts import Conversation, split_at_answers, up_to_question
from speculator.target.base import PromptTarget

_PACKED_HEAD = 256


@dataclass(frozen=True)
class PromptLimits:
    """Limits on the length of prompts.

    Attributes:
        new_tokens: largest length of an answer.
        seq_length: largest length of a prompt whose answer is trained on.
    """

    name: str
    context: int
    new_tokens: int
    seq_length: int = sys.maxsize

    @classmethod
    def of(cls, target: PromptTarget, new_tokens: int, seq_length: int = sys.maxsize) -> PromptLimits:
        return cls(target.name, *target.room(new_tokens), seq_length)

    def fits(self, ids: list[int]) -> bool:
        """Return whether a prompt leaves room for its answer, and has at most `seq_length` tokens."""
        return len(ids) <= min(self.seq_length, self.context - self.new_tokens)

    def take(self, source: str, prompts: Iterable[Conversation], count: int | None) -> tuple[list[Conversation], int]:
        """Return the first `count` prompts that fit (None: all), and the number of prompts skipped before.

        Raises a SourceError, which names the `source`, if there are prompts and none fits.
        """
        found: list[Conversation] = []
        skipped = 0
        for prompt in prompts:
            if not self.fits(prompt.ids):
                skipped += 1
                continue
            found.append(prompt)
            if len(found) == count:
                break
        limit = f"the context of {self.name} ({self.context}) with {self.new_tokens} new tokens"
        if self.seq_length < self.context - self.new_tokens:
            limit = f"data.seq_length {self.seq_length}"
        if skipped and not found:
            raise SourceError(f"{source}: none of its {skipped} prompts fits {limit}")
        if skipped:
            log(f"{source}: {skipped} prompts are skipped: they do not fit {limit}")
        return found, skipped


@dataclass(frozen=True)
class Cut:
    """How documents are cut into prompts.

    Attributes:
        prompt_tokens: length of the prompts of a text.
        per_text: largest number of prompts of a text.
        last_turn: cut chats after the user's last turn, not before the first answer.
        turns: number of answers that the target writes in a chat, whose later messages are dropped; None: all.
    """

    prompt_tokens: int
    per_text: int = 1
    last_turn: bool = False
    turns: int | None = None


@dataclass(frozen=True)
class _Cutter:
    """Cuts documents into prompts.

    Attributes:
        limits: a row none of whose prompts fits is counted as too long.
        tally: counts the rows that are used, bad, or too long or short.
    """

    tokenizer: PreTrainedTokenizerBase
    cut: Cut
    limits: PromptLimits
    tally: Tally

    def prompts(self, documents: Iterator[Document]) -> Iterator[Conversation]:
        for _, same in groupby(documents, lambda row: "document_ids" in row and row["where"].rpartition(":")[0]):
            # In packed texts every token has loss; in packed chats one of the first rows has a token without.
            first = list(islice(same, _PACKED_HEAD))
            packed_text = all(all(row.get("loss_mask", [1])) for row in first)
            for row in (as_chat(row, self.tokenizer) for row in chain(first, same)):
                yield from self._of_row(row, packed_text)

    def _of_row(self, row: Document, packed_text: bool) -> list[Conversation]:
        """Return the prompts of one document, and count it; [] for a bad one."""
        try:
            with errors_of_row(row["where"]):
                if "input_ids" in row:
                    check_tokens(row, self.tokenizer)
                found = list(self._of(row, packed_text))
        except RowError as error:
            self.tally.add(error)
            return []
        if any(self.limits.fits(prompt.ids) for prompt in found):
            self.tally.used += 1
        else:
            too_short = f"too short for {self.cut.prompt_tokens} tokens of a prompt"
            self.tally.skipped[TOO_LONG if found else too_short] += 1
        return found

    def _of(self, row: Document, packed_text: bool) -> Iterator[Conversation]:
        """Yield the prompts of one document: of a packed row one per document, but only one with `packed_text`."""
        if "text" in row:
            yield from map(Conversation, self._of_lines(row))
        elif "messages" in row:
            yield self._of_chat(row)
        elif "prompt" in row:
            if ids := text_tokens([row["prompt"]], self.tokenizer)[0]:
                yield Conversation(ids, completion=True)
        elif "source_ids" in row:
            yield Conversation(row["source_ids"], completion=True)
        elif "document_ids" in row and not packed_text:
            # A first id of 2 means that the first two documents began in other rows, see `data.packing`.
            parts = groupby(zip(row["document_ids"], row["input_ids"], row["loss_mask"], strict=True), lambda c: c[0])
            whole = [list(zip(*part, strict=True)) for _, part in parts]
            for _, tokens, mask in whole[row["document_ids"][0] :]:
                if 1 in mask:  # otherwise the row ends before the first token with loss
                    yield from self._of_tokens(list(tokens), list(mask))
        else:
            yield from self._of_tokens(row["input_ids"], row["loss_mask"])

    def _of_lines(self, row: Document) -> Iterator[list[int]]:
        """Yield the tokens of up to `per_text` different prompts of a text, each from the beginning of some line on."""
        lines, made, name = row["text"].splitlines(keepends=True), set(), name_of(row)
        for k in range(self.cut.per_text):
            # The line depends on the document's name alone, so every run takes the same prompt.
            digest = hashlib.sha256(f"start of {name}{f', {k}' if k else ''}".encode()).digest()
            start = int.from_bytes(digest[:8], "big") % len(lines)
            # Cut before it is tokenised: a megabyte is not read for 64 tokens.
            text = "".join(lines[start:])[: self.cut.prompt_tokens * 16]
            ids = text_tokens([text], self.tokenizer)[0][: self.cut.prompt_tokens]
            if len(ids) == self.cut.prompt_tokens and tuple(ids) not in made:
                made.add(tuple(ids))
                yield ids

    def _of_chat(self, row: Document) -> Conversation:
        """Return the conversation of a chat: its messages before the first answer, and those between the answers.

        With `cut.last_turn` it has one prompt, which ends with the user's last message. A RowError is raised for a chat
        without a user turn before the answer.
        """
        opening, later = split_at_answers(row["messages"], self.cut.turns)
        if self.cut.last_turn and (asked := up_to_question(row["messages"])):
            opening, later = asked, []
        if "user" not in (message["role"] for message in opening):
            raise RowError(row["where"], "a chat without a user turn before the answer")
        where, tokenizer, tools = row["where"], self.tokenizer, row.get("tools")
        if not tokenizer.chat_template:
            raise RowError(where, f"a chat, but the tokenizer {tokenizer.name_or_path} has no chat template")
        try:
            text = chat_text(tokenizer, opening, tools, True, DATA_DAY)
        except RefusedError as error:
            raise RowError(where, str(error)) from None
        return Conversation(
            ids=chat_tokens(text, tokenizer),
            messages=opening,
            later=later,
            tools=tools,
            chat=True,
            where=where,
            today=DATA_DAY,
        )

    def _of_tokens(self, ids: list[int], mask: list[int]) -> Iterator[Conversation]:
        """Yield one prompt or none: the tokens before the first with loss; without such, the first `prompt_tokens`."""
        if 1 in mask and not mask[0]:
            yield Conversation(ids[: mask.index(1)], completion=True)
        elif len(ids) >= self.cut.prompt_tokens:
            yield Conversation(ids[: self.cut.prompt_tokens])


def conversations(
    mixture: Mixture,
    split: str | None,
    tokenizer: PreTrainedTokenizerBase,
    cut: Cut,
    count: int | None,
    *,
    limits: PromptLimits | None = None,
    tally: Tally | None = None,
) -> tuple[list[Conversation], int]:
    """Return up to `count` prompts, at most `cut.per_text` different ones of each text, and how many did not fit.

    - text: `cut.prompt_tokens` tokens from the beginning of a line, including BOS; shorter texts are skipped
    - chat: the chat up to the first answer and the generation prompt, with what follows its first `cut.turns`
      answers (default: all); with `cut.last_turn` the chat up to the user's last turn
    - prompt and completion: the prompt; a chat if the tokenizer has a template
    - tokens: those before the first token with loss, or `cut.prompt_tokens` of them if the first token has loss
    - packed tokens: the same for each document that begins in the row
    - tokens of an encoder-decoder target: the "source_ids"

    Weights of sources are shares of the prompts. Sources without weights take turns.

    Args:
        count: None: all.
        limits: prompts that do not fit are skipped and counted.
        tally: counts unusable rows (default: the first one raises).

    Raises:
        SourceError: an unreadable source or row, or there are prompts and none fits.
    """
    limits = limits or PromptLimits("the target", sys.maxsize, 0)
    cutter = _Cutter(tokenizer=tokenizer, cut=cut, limits=limits, tally=tally or Tally())
    parts = streams(mixture, split, tally)
    mixed = interleave([cutter.prompts(part) for part in parts], mixture.weights, lambda prompt: 1)
    name = str(mixture) + (f" ({split})" if split else "")
    return limits.take(name, mixed, count)
