"""Read the rows of a source. The keys of a row determine its format; the first match wins.

{"input_ids": [...], "loss_mask": [...]}    tokens; the default mask is all ones; "rejected" marks tokens that
                                            replaced a rejected draft token; "source_ids" are what an encoder reads
{"messages": [{"role", "content"}, ...]}    a chat; "tools" are passed to the chat template
{"conversations": [{"from", "value"}, ...]} a chat in ShareGPT's format
{"prompt": "...", "completion": "..."}      texts; or two lists of messages, TRL's conversational form of a chat
{"instruction", "input", "output"}          a chat in Alpaca's format; "input" and "system" may be missing
{"text": "..."}
"""

from __future__ import annotations

import re
from typing import Any

from speculator.chat import clean_messages, clean_tools, from_json
from speculator.errors import UserError, check_text

_TOKENS = ("input_ids", "loss_mask", "document_ids", "rejected", "source_ids")
_ALPACA = ("system", "instruction", "input", "output")
KEYS = (*_TOKENS, "messages", "tools", "conversations", "prompt", "completion", *_ALPACA, "text")
"""All keys that are read; other keys are ignored."""

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}


MAX_CHARACTERS = 2_000_000
"""Largest length of a row; its tokens need about a hundred times the memory."""
_MAX_MESSAGES = 1000


class SourceError(UserError):
    """A source that can't be read or has nothing to train on."""


class RowError(SourceError):
    """A bad row in a source whose other rows may be good.

    Args:
        where: file and line.
        fault: what is wrong with the row.
        kind: the fault without this row's own values, for counting (default: `fault`).
    """

    def __init__(self, where: str, fault: str, kind: str | None = None):
        super().__init__(f"{where}: {fault}")
        self.kind = kind or fault
        self._arguments = where, fault, kind

    def __reduce__(self) -> tuple[Any, ...]:
        return RowError, self._arguments


def content(row: Any, where: str) -> dict[str, Any]:
    """Return the content of a row by its format: `text`; `prompt` and `completion`; `messages` and maybe `tools`; or
    `input_ids`, `loss_mask` and maybe `document_ids`, `rejected` and `source_ids`.

    Args:
        row: the parsed row; a key whose value is null counts as missing.
        where: file and line, for errors.
    """
    given = {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else {}
    if "input_ids" in given:
        return _tokens(given, where)
    if "messages" in given:
        return _chat(given["messages"], given.get("tools"), where)
    if "conversations" in given:
        return _chat(_from_sharegpt(given["conversations"], where), given.get("tools"), where)
    if all(isinstance(given.get(key), list) for key in ("prompt", "completion")):
        return _chat(given["prompt"] + given["completion"], given.get("tools"), where)
    if "instruction" in given and "output" in given:
        return _chat(_from_alpaca(given, where), None, where)
    for keys in (("prompt", "completion"), ("text",)):
        if all(key in given for key in keys):
            texts = {key: _text(given[key], where, f'"{key}"') for key in keys}
            _check_size(where, sum(map(len, texts.values())))
            return texts
    raise RowError(
        where,
        'not a row in a supported format: it needs "text", "prompt" and "completion", "messages", "conversations", '
        '"instruction" and "output", or "input_ids"',
    )


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(where, f"{what} is not a text")
    try:
        check_text(what, value)
    except UserError as error:
        raise RowError(where, str(error), "half of a surrogate pair") from None
    return value


def _check_size(where: str, characters: int) -> None:
    if characters > MAX_CHARACTERS:
        kind = f"longer than {MAX_CHARACTERS:,} characters: cut it"
        raise RowError(where, f"{characters:,} characters, {kind}", kind)


def _chat(messages: Any, tools: Any, where: str) -> dict[str, Any]:
    messages = from_json(messages)
    if not isinstance(messages, list) or not messages:
        raise RowError(where, "a chat without messages" if messages == [] else '"messages" is not a list of objects')
    if len(messages) > _MAX_MESSAGES:
        raise RowError(where, f"a chat of {len(messages)} messages", f"a chat of more than {_MAX_MESSAGES} messages")
    try:
        chat = clean_messages(messages)
    except UserError as error:
        raise RowError(where, str(error), re.sub(r"message \d+", "a message", str(error))) from None
    texts = [
        _text(message[key], where, f'the "{key}" of message {number}')
        for number, message in enumerate(chat, start=1)
        for key in ("role", "content")
        if key in message
    ]
    _check_size(where, sum(map(len, texts)))
    # An assistant that speaks first, as in a greeting, wrote that in no context of its own.
    dropped = next((number for number, message in enumerate(chat) if message["role"] != "assistant"), len(chat))
    if dropped == len(chat):
        raise RowError(where, "a chat of the assistant alone")
    tools = clean_tools(tools)
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        raise RowError(where, '"tools" is not a list of objects')
    return {
        "messages": chat[dropped:],
        **({"tools": tools} if tools else {}),
        **({"dropped": dropped} if dropped else {}),
    }


def _from_sharegpt(conversations: Any, where: str) -> Any:
    conversations = from_json(conversations)
    if not isinstance(conversations, list) or not all(isinstance(turn, dict) for turn in conversations):
        raise RowError(where, '"conversations" is not a list of objects')
    for turn in conversations:
        speaker = turn.get("from")
        if "role" not in turn and (not isinstance(speaker, str) or speaker not in _ROLES):
            kind = f"not one of {', '.join(_ROLES)}"
            raise RowError(where, f'"from" is {speaker!r:.40}, {kind}', f'"from" is {kind}')
    # Some datasets use this key with the keys of "messages".
    return [
        turn if "role" in turn else {"role": _ROLES[turn["from"]], "content": turn.get("value")}
        for turn in conversations
    ]


def _from_alpaca(given: dict[str, Any], where: str) -> list[dict[str, str]]:
    system, instruction, context, output = (_text(given.get(key, ""), where, f'"{key}"') for key in _ALPACA)
    user = "\n\n".join(filter(None, (instruction, context)))
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": user}, {"role": "assistant", "content": output}]


def _tokens(given: dict[str, Any], where: str) -> dict[str, Any]:
    ids = given["input_ids"]
    columns: dict[str, Any] = {
        "input_ids": ids,
        "loss_mask": given.get("loss_mask", [1] * len(ids) if isinstance(ids, list) else None),
        **{name: given[name] for name in _TOKENS[2:] if name in given},
    }
    for name, column in columns.items():
        invalid = not isinstance(column, list) or not all(isinstance(value, int) and value >= 0 for value in column)
        if invalid or (name == "input_ids" and any(isinstance(value, bool) for value in column)):
            raise RowError(where, f'"{name}" is not a list of integers >= 0')
        if (len(column) != len(ids) and name != "source_ids") or not column:
            many = f'values of "{name}" for'
            raise RowError(where, f"{len(column)} {many} {len(ids)} tokens", f"another number of {many} the tokens")
    for name in ("loss_mask", "rejected"):
        if not set(columns.get(name, [])) <= {0, 1}:
            raise RowError(where, f'"{name}" must contain only 0 and 1')
    return {name: [int(value) for value in column] for name, column in columns.items()}
