"""Conversations whose assistant turns the target writes again, each after the turns that it wrote before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from speculator.chat import RefusedError
from speculator.prompts import Conversation
from speculator.target.text import source_of


@dataclass
class Row:
    """Tokens of a row, loss mask, and source."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    source: Sequence[int] = ()

    def add(self, ids: Sequence[int], has_loss: int) -> None:
        """Append tokens; `has_loss` (0 or 1) is the loss mask of all of them."""
        self.ids += ids
        self.mask += [has_loss] * len(ids)

    def columns(self) -> dict[str, list[int]]:
        columns = {"input_ids": self.ids, "loss_mask": self.mask}
        return columns | ({"source_ids": list(self.source)} if self.source else {})

    def end_with_answer(self) -> None:
        """Drop the tokens after the last answer, which ask for another one; without an answer the row is empty."""
        end = len(self.mask) - self.mask[::-1].index(1) if 1 in self.mask else 0
        self.ids, self.mask = self.ids[:end], self.mask[:end]


class Answering:
    """A conversation while the target answers it.

    Every answer follows exactly the tokens that a server would read: the chat so far, rendered by the template. While
    these tokens continue the last row, that row grows. If the template changes earlier turns (Qwen 3 drops their
    thinking), the next answer begins a row of its own, in which only this answer has loss.

    Args:
        tokenizer: the target's; only chats need one.
        longest: largest number of tokens before an answer; a chat that becomes longer ends.
        row: number of the conversation among all prompts.

    Attributes:
        prompt: the conversation up to the next answer; None: it has ended.
        cut: number of answers that should have ended by themselves, and reached their limit.
        fault: why an answer failed; "" if none did.
    """

    def __init__(
        self, conversation: Conversation, tokenizer: PreTrainedTokenizerBase | None, longest: int, row: int = 0
    ):
        self._tokenizer, self._longest, self.row, self.fault = tokenizer, longest, row, ""
        self.answers = self.cut = 0
        self.prompt: Conversation | None = conversation
        self.rows = [Row(source=source_of(conversation.ids))]
        self.rows[0].add(conversation.ids, 0)

    def add(self, tokens: list[int], ended: bool) -> None:
        """Append an answer to the last row, and set `prompt` to the tokens before the next answer, or to None.

        An answer that has not `ended` by itself, as at its length limit, ends the conversation.
        """
        row = self.rows[-1]
        row.add(tokens, 1)
        self.answers += 1
        chat, self.prompt = self.prompt, None
        assert chat is not None  # it has not ended
        self.cut += chat.ends and not ended
        if not ended or not chat.later:
            return
        assert self._tokenizer is not None
        try:
            chat = chat.after(self._tokenizer, tokens)
        except RefusedError:  # the template accepts no such answer
            return
        ids = chat.ids
        if len(ids) > self._longest:
            return
        self.prompt = chat
        # The row grows if the template repeats its tokens, the answer's included, and only adds to them.
        if ids[: len(row.ids)] == row.ids:
            row.add(ids[len(row.ids) :], 0)
        else:
            self.rows.append(Row())
            self.rows[-1].add(ids, 0)

    def stop(self, fault: str) -> None:
        """End the conversation before an answer that failed, and drop the tokens that ask for it."""
        self.prompt, self.fault = None, fault
        self.rows[-1].end_with_answer()
        if not self.rows[-1].ids:
            self.rows.pop()
