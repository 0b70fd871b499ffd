"""Rows that ask something of a target, by their keys.

{"prompt": "..."}                           a text to continue
{"messages": [{"role", "content"}, ...]}    a chat; "tools" beside it go to the chat template
{"turns": ["...", ...]}                     the user's turns of a conversation, each asked behind the answers so far
{"question": "..."}                         the same with one turn
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.chat import chat_text, chat_tokens
from speculator.errors import UserError, check_text
from speculator.files import read_rows

KEYS = {
    "turns": "a list of texts",
    "messages": "a list of objects",
    "prompt": "text",
    "question": "text",
}
_BETWEEN = "\n\n"  # what parts the turns of a raw conversation


@dataclass
class Prompt:
    """What is asked, first and later.

    Attributes:
        messages: up to what is asked; of a text to continue it alone.
        later: the questions after the first answer, each asked behind the answers so far.
        chat: messages go through the chat template; else their texts are continued, blank lines between them.
        tools: as the row has them, for the chat template.
        category: as the row has it, or "".
        where: the row, for complaints.
        today: to a template that writes the date; None: by the clock.
    """

    messages: list[dict[str, Any]]
    later: list[str] = field(default_factory=list)
    chat: bool = False
    tools: Any = None
    category: str = ""
    where: str = "the prompt"
    today: datetime | None = None

    @property
    def text(self) -> str:
        """What stands before the answer where the texts are continued."""
        return _BETWEEN.join(message["content"] for message in self.messages)

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The first turn's tokens.

        Special tokens that a prompt or a message spells are special, as they are to transformers and to servers: what
        is asked may be a template written by hand.

        Raises:
            UserError: half of a surrogate pair, a message that is no text where there is no template, or the template
                refuses the messages.
        """
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, str):
                check_text(self.where, content)
            elif not self.chat:
                raise UserError(f"{self.where}: a message without text, which only a chat template can write")
        if self.chat:
            return self._rendered(tokenizer, self.messages)
        return tokenizer(self.text, verbose=False)["input_ids"]

    def following(
        self, tokenizer: PreTrainedTokenizerBase, turn: int, prompt: list[int], answers: list[list[int]]
    ) -> list[int]:
        """The tokens of `turn` (1 for the second): the prompt before it, its answer, and the next question.

        Args:
            answers: token ids of the answers to all turns before; the end-of-text token left out.
        """
        if not self.chat:
            question = tokenizer(_BETWEEN + self.later[turn - 1], add_special_tokens=False, verbose=False)["input_ids"]
            return [*prompt, *answers[-1], *question]
        messages = list(self.messages)
        for answer, question in zip(answers, self.later[:turn], strict=True):
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
            messages.append(_user(question))
        return self._rendered(tokenizer, messages)

    def _rendered(self, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
        try:
            return chat_tokens(chat_text(tokenizer, messages, self.tools, True, self.today), tokenizer)
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from None


def continued(text: str, chat: bool = False, where: str = "the prompt") -> Prompt:
    """A text to continue, or with `chat` to answer."""
    return Prompt([_user(text)], chat=chat, where=where)


def read_prompts(file: Path) -> list[tuple[dict, Prompt]]:
    """The rows of a .jsonl file, each with the "prompt" or the "messages" that it holds.

    Raises:
        UserError: the file can't be read, a line is no such row, or there is none.
    """
    rows = [(row, prompt_of(where, row, ("prompt", "messages"))) for where, row in read_rows(file)]
    if not rows:
        raise UserError(f"--prompts {file}: no rows in it")
    return rows


def prompt_of(where: str, row: Any, keys: Sequence[str] = tuple(KEYS)) -> Prompt:
    """What a row asks, by the first of `keys` that it has; a null counts as absent.

    Raises:
        UserError: it has none of them, or not in the right shape.
    """
    given = {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else {}
    key = next((key for key in keys if key in given), None)
    if key is None:
        needed = _listed(f'"{name}" ({KEYS[name]})' for name in keys)
        has = f"its keys are {', '.join(map(str, row)) or 'none'}" if isinstance(row, dict) else "it is no object"
        raise UserError(f"{where}: a row needs {needed}; {has:.200}")
    value, category = given[key], given.get("category", "")
    texts = value if key == "turns" else [value]
    if key == "messages":
        shaped = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    else:
        shaped = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not shaped or value == []:
        raise UserError(f'{where}: "{key}" is not {KEYS[key]}')
    if not isinstance(category, str):
        raise UserError(f'{where}: "category" is not text')
    if key == "messages":
        for message in value:  # an assistant that calls tools has no content
            content, role = message.get("content"), message.get("role")
            if not isinstance(content, str | list) and (content is not None or role == "user"):
                raise UserError(f'{where}: "content" of a message is not text')
        return Prompt(value, [], True, given.get("tools"), category, where)
    return Prompt([_user(texts[0])], texts[1:], key != "prompt", None, category, where)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
