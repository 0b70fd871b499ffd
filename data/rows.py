"""What a row of a source may look like, by its keys; the first that fits counts.

{"input_ids": [...], "loss_mask": [...]}    tokens; the mask may be left out: all ones
{"messages": [{"role", "content"}, ...]}    a chat; "tools" beside it go to the chat template
{"conversations": [{"from", "value"}, ...]} the same as ShareGPT writes it
{"prompt": "...", "completion": "..."}
{"text": "..."}
"""

from __future__ import annotations

from typing import Any

from speculator.errors import UserError, check_text

KEYS = ("input_ids", "loss_mask", "document_ids", "messages", "tools", "conversations", "prompt", "completion", "text")
"""Every key that is read; all others are ignored."""

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


class SourceError(UserError):
    """A source that can't be read, or that holds nothing to train on."""


def content(row: Any, where: str) -> dict[str, Any]:
    """What a row holds, under the keys of its shape: `text`; `prompt` and `completion`; `messages` and perhaps `tools`;
    `input_ids`, `loss_mask` and perhaps `document_ids`.

    Args:
        row: as a file gives it; a key whose value is null counts as absent.
        where: the file and line, for errors.

    Raises:
        SourceError: a row of another shape.
    """
    given = {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else {}
    if "input_ids" in given:
        return _tokens(given, where)
    if "messages" in given:
        return _chat(given["messages"], given.get("tools"), where)
    if "conversations" in given:
        return _chat(_from_sharegpt(given["conversations"], where), given.get("tools"), where)
    for keys in (("prompt", "completion"), ("text",)):
        if all(key in given for key in keys):
            return {key: _text(given[key], f'{where}: "{key}"') for key in keys}
    raise SourceError(
        f'{where}: not a row that can be read: it needs "text", "prompt" and "completion", "messages", '
        '"conversations" or "input_ids"'
    )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise SourceError(f"{what} is not a text")
    check_text(what, value)
    return value


def _chat(messages: Any, tools: Any, where: str) -> dict[str, Any]:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise SourceError(f'{where}: "messages" is not a list of objects')
    # A table of messages gives every one of them every key; templates ask which are there.
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for number, message in enumerate(chat, start=1):
        _text(message.get("role"), f'{where}: the "role" of message {number}')
        if "content" in message or "tool_calls" not in message:
            _text(message.get("content"), f'{where}: the "content" of message {number}')
    return {"messages": chat, "tools": tools} if tools else {"messages": chat}


def _from_sharegpt(conversations: Any, where: str) -> Any:
    if not isinstance(conversations, list) or not all(isinstance(turn, dict) for turn in conversations):
        raise SourceError(f'{where}: "conversations" is not a list of objects')
    for turn in conversations:
        if "role" not in turn and turn.get("from") not in _ROLES:
            raise SourceError(f'{where}: "from" is {turn.get("from")!r}, not one of {", ".join(_ROLES)}')
    # Some sets have the name of this key and the keys of "messages".
    return [
        turn if "role" in turn else {"role": _ROLES[turn["from"]], "content": turn.get("value")}
        for turn in conversations
    ]


def _tokens(given: dict[str, Any], where: str) -> dict[str, Any]:
    ids = given["input_ids"]
    columns = {
        "input_ids": ids,
        "loss_mask": given.get("loss_mask", [1] * len(ids) if isinstance(ids, list) else None),
        "document_ids": given.get("document_ids"),
    }
    for name, column in columns.items():
        if column is None and name == "document_ids":
            continue
        if not isinstance(column, list) or not all(isinstance(value, int) and value >= 0 for value in column):
            raise SourceError(f'{where}: "{name}" is not a list of numbers from 0 up')
        if len(column) != len(ids) or not column:
            raise SourceError(f'{where}: {len(column)} values of "{name}" for {len(ids)} tokens')
    if not set(columns["loss_mask"]) <= {0, 1}:
        raise SourceError(f'{where}: "loss_mask" holds something else than 0 and 1')
    return {name: [int(value) for value in column] for name, column in columns.items() if column is not None}
