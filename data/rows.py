"""Read the rows of a source. The keys of a row determine its format (`FORMATS`); the first match wins.

{"input_ids": [...], "loss_mask": [...]}    tokens; the default mask is all ones, without the tokens whose "labels" are
                                            -100; "source_ids" are what an encoder reads
{"messages": [{"role", "content"}, ...]}    a chat; "tools" are passed to the chat template, "system" comes first
{"conversations": [{"from", "value"}, ...]} a chat in ShareGPT's format; also "conversation", as in WildChat
{"prompt": "...", "completion": "..."}      texts; or two lists of messages, TRL's conversational form of a chat
{"prompt", "chosen", "rejected"}            preferences, texts or messages: "chosen" is the completion
{"instruction", "input", "output"}          a chat in Alpaca's format; "input" and "system" may be missing. Dolly calls
                                            them "context" and "response"; a list as "input" is messages
{"text": "..."}

A message with "weight": 0 or "train": false, and a completion with "label": false, is context and has no loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NamedTuple

from data.documents import Content
from data.mixture import SourceError
from speculator.chat import THOUGHTS, Message, clean_messages, clean_tools, from_json, with_system
from speculator.errors import UserError, check_text, first_line
from speculator.files import Json

_TOKENS = ("input_ids", "loss_mask", "document_ids", "source_ids")
_SYNONYMS = {"conversation": "conversations", "chosen": "completion", "context": "input", "response": "output"}
"""Other names of keys, by which some public datasets call them; a row's own key counts first."""
_ALPACA = ("system", "instruction", "input", "output")
_NO_LOSS = -100
"""The label of transformers for a token without loss."""

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
_MARKS = ("weight", "train")
"""Keys of a message that say whether it is trained on."""


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


class NothingToLearnError(RowError):
    """A row whose own marks, as "weight": 0, leave nothing to train on. It is skipped and not counted as a bad row."""

    def __reduce__(self) -> tuple[Any, ...]:
        return NothingToLearnError, self._arguments


@contextmanager
def errors_of_row(where: str) -> Iterator[None]:
    """Turn unforeseen errors of a row's content into a RowError, since libraries raise many types for odd content.

    UserError (which includes RowError), OSError and MemoryError pass through.
    """
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        kind = f"can't be read: {type(error).__name__}"
        raise RowError(where, f"{kind}: {first_line(error)}", kind) from error


def content(row: Any, where: str) -> Content:
    """Return the content of a row by its format: `text`; `prompt` and `completion`; `messages` and maybe `tools`; or
    `input_ids`, `loss_mask` and maybe `document_ids` and `source_ids`.

    Args:
        row: the parsed row; a key whose value is null counts as missing.
        where: file and line, for errors.

    Raises:
        RowError: the row has no supported format, or a value that its format does not allow.
    """
    with errors_of_row(where):
        return _content(row, where)


def _content(row: Any, where: str) -> Content:
    """Do the work of `content`, whose unforeseen errors are not RowErrors here."""
    own = {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else {}
    given = {_SYNONYMS[key]: value for key, value in own.items() if key in _SYNONYMS} | own
    for known in FORMATS:
        if known.fits(given):
            return known.read(given, where)
    *names, last = (known.name for known in reversed(FORMATS))
    needs = f"not a row in a supported format: it needs {', '.join(names)}, or {last}"
    near = [(key, *get_close_matches(str(key).lower(), KEYS, n=1)) for key in own if key not in KEYS]
    guesses = [f'"{pair[0]!s:.40}" is near "{pair[1]}"' for pair in near if pair[1:]][:3]
    listed = f"its keys are {', '.join(map(str, own)) or 'none':.200}"
    raise RowError(where, "; ".join([needs, *guesses, listed]), needs)


def has_loss(message: Message) -> bool:
    """Return whether an assistant's message is trained on: OpenAI's "weight" is not 0, and "train" is not false."""
    return message.get("weight") != 0 and message.get("train") is not False


def _text(value: Any, where: str, what: str) -> str:
    """Return a value that must be a valid text; else raise a RowError that calls it `what`."""
    if not isinstance(value, str):
        raise RowError(where, f"{what} is not a text")
    try:
        check_text(what, value)
    except UserError as error:
        raise RowError(where, str(error), "half of a surrogate pair") from None
    return value


def _check_size(where: str, characters: int) -> None:
    """Raise a RowError if a row is longer than `MAX_CHARACTERS`."""
    if characters > MAX_CHARACTERS:
        kind = f"longer than {MAX_CHARACTERS:,} characters: cut it"
        raise RowError(where, f"{characters:,} characters, {kind}", kind)


def _chat(messages: Any, given: dict[str, Json], where: str) -> Content:
    """Return a checked chat from its first message that is not the assistant's; "dropped" counts those before it.

    `messages` may be JSON text. The row, `given`, gives "tools", and the "system" message of a chat that has none.
    """
    messages, tools = with_system(from_json(messages), given.get("system")), given.get("tools")
    if isinstance(messages, list) and len(messages) > _MAX_MESSAGES:
        raise RowError(where, f"a chat of {len(messages)} messages", f"a chat of more than {_MAX_MESSAGES} messages")
    try:
        chat, tools = clean_messages(messages), clean_tools(tools)
    except UserError as error:
        raise RowError(where, str(error), re.sub(r"message \d+", "a message", str(error))) from None
    texts = [
        _text(value, where, f'the "{key}" of message {number}')
        for number, message in enumerate(chat, start=1)
        for key, value in message.items()
        if key in ("role", "content", *THOUGHTS)
    ]
    _check_size(where, sum(map(len, texts)))
    # An assistant that speaks first, as in a greeting, wrote that in no context of its own.
    dropped = next((number for number, message in enumerate(chat) if message["role"] != "assistant"), len(chat))
    if dropped == len(chat):
        raise RowError(where, "a chat of the assistant alone")
    return {
        "messages": chat[dropped:],
        **({"tools": tools} if tools else {}),
        **({"dropped": dropped} if dropped else {}),
    }


def _messages(given: dict[str, Json], where: str) -> Content:
    return _chat(given["messages"], given, where)


def _from_sharegpt(given: dict[str, Json], where: str) -> Content:
    """Return the chat of "conversations", with the keys "from" and "value" (ShareGPT), or those of "messages"."""
    conversations = from_json(given["conversations"])
    if not isinstance(conversations, list) or not all(isinstance(turn, dict) for turn in conversations):
        raise RowError(where, '"conversations" is not a list of objects')
    for turn in conversations:
        speaker = turn.get("from")
        if "role" not in turn and (not isinstance(speaker, str) or speaker not in _ROLES):
            kind = f"not one of {', '.join(_ROLES)}"
            raise RowError(where, f'"from" is {speaker!r:.40}, {kind}', f'"from" is {kind}')
    # Some datasets use this key with the keys of "messages".
    messages = [
        turn
        if "role" in turn
        else {"role": _ROLES[turn["from"]], "content": turn.get("value"), **{k: turn[k] for k in _MARKS if k in turn}}
        for turn in conversations
    ]
    return _chat(messages, given, where)


def _has_chat_completion(given: dict[str, Json]) -> bool:
    """Return whether the "completion" consists of messages."""
    completion = given.get("completion")
    return isinstance(completion, list) and all(isinstance(each, dict) for each in completion)


def _from_chat_pair(given: dict[str, Json], where: str) -> Content:
    """Return the chat of a prompt, messages or text, and its completion in messages, which may repeat the prompt."""
    prompt: Any = given.get("prompt") or []
    completion: Any = given["completion"]
    if completion and completion[0].get("role") in ("system", "user"):
        prompt = []
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise RowError(where, '"prompt" is no text and no list of objects')
    marks = {"weight": 0} if given.get("label") is False else {}
    return _chat([*prompt, *({**each, **marks} for each in completion)], given, where)


def _is_alpaca(given: dict[str, Json]) -> bool:
    return "output" in given and ("instruction" in given or isinstance(given.get("input"), list))


def _from_alpaca(given: dict[str, Json], where: str) -> Content:
    """Return the chat of "instruction", "input" and "output" (Alpaca), or of messages in "input" and "output".

    Raises a RowError with the place `where` for a malformed row.
    """
    if isinstance(asked := given.get("input"), list):
        output = given["output"]
        answer = output if isinstance(output, list) else [{"role": "assistant", "content": output}]
        return _chat([*asked, *answer], given, where)
    _, instruction, context, output = (_text(given.get(key, ""), where, f'"{key}"') for key in _ALPACA)
    user = "\n\n".join(filter(None, (instruction, context)))
    return _chat([{"role": "user", "content": user}, {"role": "assistant", "content": output}], given, where)


def _from_pair(given: dict[str, Json], where: str) -> Content:
    prompt, completion = _texts(given, where, "prompt", "completion")
    pair: Content = {"prompt": prompt, "completion": completion}
    return {**pair, "label": False} if given.get("label") is False else pair


def _from_text(given: dict[str, Json], where: str) -> Content:
    return {"text": _texts(given, where, "text")[0]}


def _texts(given: dict[str, Json], where: str, *keys: str) -> list[str]:
    """Return the values of some keys, which must exist.

    Raises a RowError with the place `where` unless all are valid texts, of at most `MAX_CHARACTERS` together.
    """
    texts = [_text(given[key], where, f'"{key}"') for key in keys]
    _check_size(where, sum(map(len, texts)))
    return texts


def _tokens(given: dict[str, Json], where: str) -> Content:
    """Return the columns of a row of tokens after checks.

    Without "loss_mask" the tokens have loss whose "labels" are not -100, or all without "labels".
    """
    ids: Any = given["input_ids"]
    if isinstance(labels := given.get("labels"), list):
        mask: Any = {"loss_mask": [int(label != _NO_LOSS) for label in labels]}
    else:
        mask = {"loss_mask": [1] * len(ids) if isinstance(ids, list) else None}
    columns: Any = {name: (mask | given)[name] for name in _TOKENS if name in mask | given}
    for name, column in columns.items():
        invalid = not isinstance(column, list) or not all(isinstance(value, int) and value >= 0 for value in column)
        if invalid or (name == "input_ids" and any(isinstance(value, bool) for value in column)):
            raise RowError(where, f'"{name}" is not a list of integers >= 0')
        if (len(column) != len(ids) and name != "source_ids") or not column:
            many = f'values of "{name}" for'
            raise RowError(where, f"{len(column)} {many} {len(ids)} tokens", f"another number of {many} the tokens")
    if not set(columns["loss_mask"]) <= {0, 1}:
        raise RowError(where, '"loss_mask" must contain only 0 and 1')
    read: Any = {name: [int(value) for value in column] for name, column in columns.items()}
    return read


class Format(NamedTuple):
    """A format of rows.

    Attributes:
        name: the keys that a row of this format needs, for an error.
        keys: all keys that it reads.
        fits: return whether a row (its keys and values without nulls) is in this format.
        read: return the content of a row, given the row without nulls and its place for errors.
    """

    name: str
    keys: tuple[str, ...]
    fits: Callable[[dict[str, Json]], bool]
    read: Callable[[dict[str, Json], str], Content]


FORMATS = [
    Format(name='"input_ids"', keys=(*_TOKENS, "labels"), fits=lambda given: "input_ids" in given, read=_tokens),
    Format(
        name='"messages"', keys=("messages", "tools", "system"), fits=lambda given: "messages" in given, read=_messages
    ),
    Format(
        name='"conversations"',
        keys=("conversations", "tools", "system"),
        fits=lambda given: "conversations" in given,
        read=_from_sharegpt,
    ),
    Format(
        name='"completion" as messages',
        keys=("prompt", "completion", "label", "tools", "system"),
        fits=_has_chat_completion,
        read=_from_chat_pair,
    ),
    Format(name='"instruction" and "output"', keys=(*_ALPACA, "tools"), fits=_is_alpaca, read=_from_alpaca),
    Format(
        name='"prompt" and "completion"',
        keys=("prompt", "completion", "label"),
        fits=lambda given: "prompt" in given and "completion" in given,
        read=_from_pair,
    ),
    Format(name='"text"', keys=("text",), fits=lambda given: "text" in given, read=_from_text),
]
"""The formats, in the order in which they are tried."""
KEYS = tuple(dict.fromkeys((*(key for known in FORMATS for key in known.keys), *_SYNONYMS)))
"""All keys that are read; other keys are ignored."""
