"""Conversations: prompts with the turns that follow, and rows of a JSON lines file, in one of four formats.

{"prompt": "..."}                           text to continue; with a "completion" or "chosen", one user turn
{"messages": [{"role", "content"}, ...]}    chat; optional "tools" go to the chat template
{"turns": ["...", ...]}                     user turns of a conversation, each asked after the answers so far
{"question": "..."}                         one user turn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.chat import (
    Message,
    RefusedError,
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
from speculator.target.text import source_of
from speculator.terminal import log

KEYS = {
    "turns": "a list of texts",
    "messages": "a list of objects",
    "prompt": "text",
    "question": "text",
}
"""Keys of a row that hold a prompt, in order of precedence, with the type of their value."""
_BETWEEN = "\n\n"  # between the turns without a chat template


@dataclass(frozen=True)
class Conversation:
    """A text to continue or a chat, up to where the next answer begins, and what follows that answer.

    Attributes:
        ids: token ids up to the next answer, once they are known; a `Text` also has a source.
        messages: messages up to the next answer; for text to continue, a single one; [] if only the tokens are known.
        later: messages after each answer. If the first of them is the assistant's, with tool calls, it replaces the
            answer in the history, because the tool results after it belong to it.
        chat: apply the chat template; otherwise the texts are joined by blank lines and continued.
        completion: without a template too the answer ends by itself, as a completion; a part of a text just continues.
        category: the row's category, or "".
        where: name of the row, such as "FILE:LINE", with which error messages begin.
        today: date for the chat template; None: now.
    """

    ids: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    later: Sequence[list[Message]] = ()
    tools: list[Tool] | None = None
    chat: bool = False
    completion: bool = False
    category: str = ""
    where: str = "the prompt"
    today: datetime | None = None
    variables: dict[str, Json] | None = None

    @property
    def ends(self) -> bool:
        """Whether the answer ends by itself."""
        return self.chat or self.completion

    @property
    def size(self) -> int:
        """Rough number of tokens without the answers, by which conversations are sorted."""
        return len(source_of(self.ids)) + len(self.ids) + sum(map(len, _texts(self.later))) // 4

    @property
    def text(self) -> str:
        """Text before the answer, without a chat template."""
        return _BETWEEN.join(_texts([self.messages]))

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

    def after(
        self, tokenizer: PreTrainedTokenizerBase, answer: list[int], asked: list[Message] | None = None
    ) -> Conversation:
        """Return the conversation after an answer, with token ids up to where the next answer begins.

        Args:
            answer: token ids of the answer; of a text to continue, without the EOS token.
            asked: messages that follow the answer (default: the first of `later`).

        Raises:
            RefusedError: the chat template does not accept the messages.
        """
        asked, later = (asked, self.later) if asked else (self.later[0], self.later[1:])
        if not self.chat:
            text = _BETWEEN + _BETWEEN.join(_texts([asked]))
            question = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return replace(self, ids=[*self.ids, *answer, *question], later=later)
        replaced = asked[0]["role"] == "assistant"
        said = [] if replaced else [answer_message(tokenizer, self.ids, answer, self.tools)]
        # Rendered again from the start: a template may write earlier turns differently once others follow.
        messages = [*self.messages, *said, *asked]
        return replace(self, ids=self._rendered(tokenizer, messages), messages=messages, later=later)

    def _rendered(self, tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
        """Return the token ids of messages in the chat template, up to where the next answer begins."""
        try:
            text = chat_text(tokenizer, messages, self.tools, True, self.today, self.variables)
            return chat_tokens(text, tokenizer)
        except RefusedError as error:
            raise RefusedError(f"{self.where}: {error}") from None


def _texts(turns: Sequence[list[Message]]) -> list[str]:
    return [message.get("content") or "" for turn in turns for message in turn]


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


def up_to_question(messages: list[Message]) -> list[Message]:
    """Return messages up to and with the user's last one; [] without one."""
    # Of user, assistant, user, assistant the first three.
    last = max((number for number, message in enumerate(messages, 1) if message.get("role") == "user"), default=0)
    return messages[:last]


def continued(text: str, chat: bool = False, where: str = "the prompt") -> Conversation:
    """Create a prompt from text to continue, or with `chat` from a user message; errors about it call it `where`."""
    return Conversation(messages=[_user(text)], chat=chat, where=where)


def read_prompts(file: Path) -> list[tuple[dict, Conversation]]:
    """Read the rows of a .jsonl file; return each with its prompt.

    Raises a UserError for a row without one, for a chat that ends with an answer, and for a file without rows.
    """
    rows = [(row, prompt_of(where, row)) for where, row in read_rows(file)]
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


def for_template(
    prompts: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, without: str
) -> list[Conversation]:
    """Return prompts as a tokenizer takes them: without a chat template, a prompt with its completion is a text.

    Raises a UserError, which begins with `without`, for other chats without a chat template.
    """
    if tokenizer.chat_template is not None:
        return list(prompts)
    texts = [replace(prompt, chat=prompt.chat and not prompt.completion) for prompt in prompts]
    refuse((any(prompt.chat for prompt in texts), f"{without}, which chats need"))
    return texts


def log_first_turns(name: str, conversations: Sequence[Conversation]) -> None:
    """Print how many later turns of some conversations a command does not ask."""
    if later := sum(len(conversation.later) for conversation in conversations):
        log(f"{name}: first turns only, {later} later turns are not asked (speculator eval asks them)")


def prompt_of(where: str, row: Any) -> Conversation:
    """Create a prompt from a row by its first non-null key of `KEYS`; raise a UserError that begins with `where`."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    key = next((key for key in KEYS if row.get(key) is not None), None)
    if key is None:
        needed = " or ".join(f'"{name}" ({KEYS[name]})' for name in KEYS)
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
            tools = clean_tools(row.get("tools"))
            return Conversation(messages=messages, tools=tools, chat=True, category=category, where=where)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    texts = value if key == "turns" else [value]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f'{where}: "{key}" must be {KEYS[key]}')
    completion = key == "prompt" and any(row.get(name) is not None for name in ("completion", "chosen"))
    chat = completion or key != "prompt"
    first, *later = [[_user(text)] for text in texts]
    return Conversation(messages=first, later=later, chat=chat, completion=completion, category=category, where=where)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
