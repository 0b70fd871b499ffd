"""Conversations whose assistant turns the target writes again, each after the turns that it wrote before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from speculator.chat import DATA_DAY, Message, RefusedError, Tool, answer_message, chat_text, chat_tokens
from speculator.target.encoder.encoder import source_of


@dataclass(frozen=True)
class Conversation:
    """A prompt for the target, and for a chat whose answers it writes one by one the messages between the answers.

    Attributes:
        ids: token ids before the first answer; a `Text` also has what an encoder reads for it.
        messages: of a chat, the messages that `ids` were rendered from.
        later: messages after each answer. If the first of them is the assistant's, with tool calls, it replaces the
            answer in the history, because the tool results after it belong to it.
        tools: tools for the chat template.
        ends: the answer ends by itself, as in a chat; a part of a text just continues.
    """

    ids: list[int]
    messages: list[Message] | None = None
    later: Sequence[list[Message]] = ()
    tools: list[Tool] | None = None
    ends: bool = False

    @property
    def size(self) -> int:
        """Rough number of tokens without the answers, by which conversations are sorted."""
        characters = sum(len(message.get("content") or "") for turn in self.later for message in turn)
        return len(source_of(self.ids)) + len(self.ids) + characters // 4


def split_at_answers(messages: list[Message], answers: int | None) -> tuple[list[Message], list[list[Message]]]:
    """Return a chat's messages before the first answer, and for each answer but the last the messages that follow it.

    Only the first `answers` answers count (None: all), and none after two that follow each other directly. A greeting
    before the user's first message is no answer. An answer with tool calls is the first of the messages that follow it.
    """
    # user a, assistant b, user c, assistant d gives [a] and [[c]]: what follows d asks for no further answer.
    opening: list[Message] = []
    later: list[list[Message]] = []
    for message in messages:
        if message["role"] == "assistant" and any(each["role"] == "user" for each in opening):
            later.append([message] if message.get("tool_calls") else [])
        else:
            (later[-1] if later else opening).append(message)
    asking = []
    for turn in later[: None if answers is None else answers - 1]:
        if not turn or turn[-1]["role"] == "assistant":
            break  # nobody speaks before the next answer
        asking.append(turn)
    return opening, asking


@dataclass
class Row:
    """Tokens of a row, loss mask, and what an encoder reads."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    source: Sequence[int] = ()

    def add(self, ids: Sequence[int], has_loss: int) -> None:
        """Append tokens; `has_loss` (0 or 1) is the loss mask of all of them."""
        self.ids += ids
        self.mask += [has_loss] * len(ids)

    def columns(self) -> dict[str, list[int]]:
        """Return "input_ids", "loss_mask", and "source_ids" if there is a source."""
        columns = {"input_ids": self.ids, "loss_mask": self.mask}
        return columns | ({"source_ids": list(self.source)} if self.source else {})


class Answering:
    """A conversation while the target answers it.

    Every answer follows exactly the tokens that a server would read: the chat so far, rendered by the template. While
    these tokens continue the last row, that row grows. If the template changes earlier turns (Qwen 3 drops their
    thinking), the next answer begins a row of its own, in which only this answer has loss.

    Args:
        conversation: what to answer.
        tokenizer: the target's; only chats need one.
        longest: largest number of tokens before an answer; a chat that becomes longer ends.

    Attributes:
        prompt: tokens before the next answer; None: the conversation has ended.
        answers: number of answers so far.
        cut: number of answers that should have ended by themselves, and reached their limit.
        rows: rows so far.
    """

    def __init__(self, conversation: Conversation, tokenizer: PreTrainedTokenizerBase | None, longest: int):
        self._tokenizer, self._tools, self._longest = tokenizer, conversation.tools, longest
        self._messages = list(conversation.messages or [])
        self._later, self._ends = deque(conversation.later), conversation.ends
        self.answers = self.cut = 0
        self.prompt: list[int] | None = conversation.ids
        self.rows = [Row(source=source_of(conversation.ids))]
        self.rows[0].add(conversation.ids, 0)

    def add(self, tokens: list[int], ended: bool) -> None:
        """Append an answer to the last row, and set `prompt` to the tokens before the next answer, or to None.

        An answer that has not `ended` by itself, as at its length limit, ends the conversation.
        """
        row = self.rows[-1]
        row.add(tokens, 1)
        self.answers += 1
        self.cut += self._ends and not ended
        prompt, self.prompt = self.prompt or [], None
        if not ended or not self._later:
            return
        assert self._tokenizer is not None
        following = self._later.popleft()
        if following[0]["role"] != "assistant":
            self._messages.append(answer_message(self._tokenizer, prompt, tokens, self._tools))
        self._messages += following
        try:
            text = chat_text(self._tokenizer, self._messages, self._tools, ask=True, today=DATA_DAY)
        except RefusedError:  # the template accepts no such answer
            return
        ids = chat_tokens(text, self._tokenizer)
        if len(ids) > self._longest:
            return
        self.prompt = ids
        # The row grows if the template repeats its tokens, the answer's included, and only adds to them.
        if ids[: len(row.ids)] == row.ids:
            row.add(ids[len(row.ids) :], 0)
        else:
            self.rows.append(Row())
            self.rows[-1].add(ids, 0)

    def stop(self) -> None:
        """End the conversation after its last answer, and drop the tokens that ask for another one."""
        self.prompt = None
        row = self.rows[-1]
        if 1 not in row.mask:
            self.rows.pop()
            return
        end = len(row.mask) - row.mask[::-1].index(1)
        row.ids, row.mask = row.ids[:end], row.mask[:end]
