"""Prompts: rows of a JSON lines file, in one of four formats.

{"prompt": "..."}                           text to continue; with a "completion" or "chosen", one user turn
{"messages": [{"role", "content"}, ...]}    chat; optional "tools" go to the chat template
{"turns": ["...", ...]}                     user turns of a conversation, each asked after the answers so far
{"question": "..."}                         one user turn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.chat import (
    Message,
    Tool,
    answer_message,
    chat_text,
    chat_tokens,
    clean_messages,
    clean_tools,
    from_json,
    media_of,
    with_history,
    with_system,
    writes_calls,
)
from speculator.errors import UserError, check_text, refuse
from speculator.files import Json, read_rows

KEYS = {
    "turns": "a list of texts",
    "messages": "a list of objects",
    "prompt": "text",
    "question": "text",
}
"""Keys of a row that hold a prompt, in order of precedence, with the type of their value."""
_BETWEEN = "\n\n"  # between the turns without a chat template


@dataclass
class Prompt:
    """A first question, and the questions that follow its answer.

    Attributes:
        messages: messages up to the first answer; for text to continue, a single one.
        later: questions after the first answer.
        chat: apply the chat template; otherwise the texts are joined by blank lines and continued.
        tools: tools for the chat template.
        category: the row's category, or "".
        where: name of the row, such as "FILE:LINE", with which error messages begin.
        today: date for the chat template; None: now.
        variables: variables of the chat template.
    """

    messages: list[Message]
    later: list[str] = field(default_factory=list)
    chat: bool = False
    tools: list[Tool] | None = None
    category: str = ""
    where: str = "the prompt"
    today: datetime | None = None
    variables: dict[str, Json] | None = None

    @property
    def text(self) -> str:
        """Text before the answer, without a chat template."""
        return _BETWEEN.join(message["content"] or "" for message in self.messages)

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the token ids of the first turn, up to where the answer begins; raise a UserError if it has no text.

        Special tokens that the text spells out count as such, as in transformers and servers.
        """
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, str):
                check_text(self.where, content)
            elif not self.chat:
                raise UserError(f"{self.where}: a message without text needs a chat template")
        if self.chat:
            ids = self._rendered(tokenizer, self.messages)
            called = any("tool_calls" in message for message in self.messages)
            fault = f"{self.where}: the chat template leaves out tool calls"
            refuse((called and not writes_calls(tokenizer, self.tools), fault))
            return ids
        return tokenizer(self.text, verbose=False)["input_ids"]

    def following(
        self, tokenizer: PreTrainedTokenizerBase, turn: int, prompt: list[int], answers: list[list[int]]
    ) -> list[int]:
        """Return the token ids of a later turn: the conversation so far, with the next question at its end.

        Args:
            tokenizer: the target's tokenizer.
            turn: 1 for the second turn, which asks `later[0]`.
            prompt: token ids of the turn before.
            answers: token ids of all earlier answers, without the EOS token.
        """
        if not self.chat:
            question = tokenizer(_BETWEEN + self.later[turn - 1], add_special_tokens=False, verbose=False)["input_ids"]
            return [*prompt, *answers[-1], *question]
        # Rendered again from the start: a template may write earlier turns differently once others follow.
        messages = list(self.messages)
        for answer, question in zip(answers, self.later[:turn], strict=True):
            messages.append(answer_message(tokenizer, self._rendered(tokenizer, messages), answer, self.tools))
            messages.append(_user(question))
        return self._rendered(tokenizer, messages)

    def _rendered(self, tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
        """Return the token ids of messages in the chat template, up to where the next answer begins."""
        try:
            text = chat_text(tokenizer, messages, self.tools, True, self.today, self.variables)
            return chat_tokens(text, tokenizer)
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from None


def continued(text: str, chat: bool = False, where: str = "the prompt") -> Prompt:
    """Create a prompt from text to continue, or with `chat` from a user message; errors about it call it `where`."""
    return Prompt([_user(text)], chat=chat, where=where)


def read_prompts(file: Path) -> list[tuple[dict, Prompt]]:
    """Read rows with "prompt" or "messages" from a .jsonl file; return each row with its prompt.

    Raises a UserError for a row that has neither, for a chat that ends with an answer, and for a file without rows.
    """
    rows = [(row, prompt_of(where, row, ("prompt", "messages"))) for where, row in read_rows(file)]
    if not rows:
        raise UserError(f"--prompts {file}: no rows in it")
    answered = next((prompt.where for _, prompt in rows if prompt.messages[-1]["role"] == "assistant"), None)
    refuse(
        (
            answered,
            f"{answered}: the chat ends with an answer, and a prompt with the user's message; the target answers whole "
            "chats again by speculator data generate --sources",
        )
    )
    return rows


def prompt_of(where: str, row: Any, keys: Sequence[str] = tuple(KEYS)) -> Prompt:
    """Create a prompt from a row, by the first of `keys` (see `KEYS`) whose value is not null.

    Raises a UserError, which begins with `where`, if the row has none of them or a malformed value.
    """
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    key = next((key for key in keys if row.get(key) is not None), None)
    if key is None:
        needed = " or ".join(f'"{name}" ({KEYS[name]})' for name in keys)
        raise UserError(f"{where}: needs {needed}; its keys are {', '.join(map(str, row)) or 'none':.200}")
    media = media_of(row)
    refuse((media, f'{where}: "{media}" beside the text; only text is supported'))
    value, category = row[key], row.get("category")
    category = str(category) if isinstance(category, str | int | float) else ""  # any other value groups nothing
    if key == "prompt" and isinstance(value, list):  # MT-Bench's user turns, or TRL's messages
        key = "turns" if value and all(isinstance(text, str) for text in value) else "messages"
    if isinstance(value, str) and row.get("history"):
        key, value = "messages", [_user(value)]
    if key == "messages":
        try:
            messages = from_json(value)
            if isinstance(messages, list):
                messages = with_system(with_history(row.get("history"), messages), row.get("system"))
            messages = clean_messages(messages)
            return Prompt(messages, chat=True, tools=clean_tools(row.get("tools")), category=category, where=where)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    texts = value if key == "turns" else [value]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f'{where}: "{key}" must be {KEYS[key]}')
    chat = key != "prompt" or any(row.get(name) is not None for name in ("completion", "chosen"))
    return Prompt([_user(texts[0])], texts[1:], chat=chat, category=category, where=where)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
