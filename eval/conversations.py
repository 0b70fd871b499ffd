"""What a row of a suite asks, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.cli.prompts import encode
from speculator.errors import UserError, check_text

_BETWEEN = "\n\n"  # what parts the turns of a raw conversation


@dataclass
class Conversation:
    """What is asked, first and later.

    Attributes:
        opening: the messages before the first answer; the last is what is asked.
        later: the questions after the first answer, each asked behind the answers so far.
        category: as the row has it, or "".
        tools: as the row has them, for the chat template.
        chat: messages go through the chat template; else their texts are continued raw, blank lines between them.
        where: the row, for complaints.
    """

    opening: list[dict[str, str]]
    later: list[str] = field(default_factory=list)
    category: str = ""
    chat: bool = False
    where: str = ""
    tools: Any = None

    def first(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The first turn's prompt."""
        if self.chat:
            return self._encoded(tokenizer, self.opening)
        return tokenizer(_BETWEEN.join(message["content"] for message in self.opening), verbose=False)["input_ids"]

    def following(
        self, tokenizer: PreTrainedTokenizerBase, turn: int, prompt: list[int], answers: list[list[int]]
    ) -> list[int]:
        """The prompt of `turn` (1 for the second): the prompt before it, its answer, and the next question.

        Args:
            answers: token ids of the answers to all turns before; the end-of-text token left out.
        """
        if not self.chat:
            question = tokenizer(_BETWEEN + self.later[turn - 1], add_special_tokens=False, verbose=False)["input_ids"]
            return [*prompt, *answers[-1], *question]
        messages = list(self.opening)
        for answer, question in zip(answers, self.later[:turn], strict=True):
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
            messages.append({"role": "user", "content": question})
        return self._encoded(tokenizer, messages)

    def _encoded(self, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
        try:
            return list(encode(tokenizer, {"messages": messages, "tools": self.tools}, chat=True))
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from None


def conversation_of(where: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, raw: bool) -> Conversation:
    """What a row asks: its `turns`, the `messages` up to the last of the user's, its `prompt`, or its `question`.

    A `prompt` is a text to continue; the others are chats where the tokenizer has a chat template, unless `raw`.

    Raises:
        UserError: it has none of these, or not in the right shape.
    """
    category = row.get("category") or ""
    if not isinstance(category, str):
        raise UserError(f'{where}: "category" is not text')
    chat = not raw and tokenizer.chat_template is not None
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise UserError(f'{where}: "turns" is not a list of texts')
        first, *later = [text_of(where, "turns", turn) for turn in turns]
        return Conversation([_user(first)], later, category, chat, where)
    if "messages" in row:
        return Conversation(_asked(where, row["messages"]), [], category, chat, where, row.get("tools"))
    for key in ("prompt", "question"):
        if key in row:
            asked = [_user(text_of(where, key, row[key]))]
            return Conversation(asked, [], category, chat and key == "question", where)
    if "text" in row:
        raise UserError(f'{where}: "text" to cut a prompt from, among rows that are prompts')
    has = f"its keys are {', '.join(map(str, row)) or 'none'}"
    raise UserError(f'{where}: a row needs "turns", "messages", "prompt", "question" or "text"; {has}')


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def text_of(where: str, key: str, value: Any) -> str:
    """The text of a row's key.

    Raises:
        UserError: it is none, or empty.
    """
    if not isinstance(value, str) or not value.strip():
        raise UserError(f'{where}: "{key}" is not text, or empty')
    check_text(where, value)
    return value


def _asked(where: str, messages: Any) -> list[dict[str, str]]:
    """The messages up to the last of the user's: what comes after it is the answer of some other model."""
    shaped = isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1) if shaped else -1
    if last < 0:
        raise UserError(
            f'{where}: "messages" is not a list of {{"role", "content"}} with one of the user\'s among them'
        )
    return [{"role": str(m["role"]), "content": text_of(where, "messages", m["content"])} for m in messages[: last + 1]]
