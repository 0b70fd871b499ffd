"""Read the rows of a source. The keys of a row determine its format (`FORMATS`); the first match wins.

{"input_ids": [...], "loss_mask": [...]}    tokens; the default mask is all ones, without the tokens whose "labels" are
                                            -100; "source_ids" are what an encoder reads
{"messages": [{"role", "content"}, ...]}    a chat; "tools" are passed to the chat template, "system" comes first
{"conversations": [{"from", "value"}, ...]} a chat in ShareGPT's format; also "conversation", as in WildChat
{"prompt": "...", "completion": "..."}      texts; or messages, TRL's conversational form of a chat
{"prompt", "chosen", "rejected"}            preferences, texts or messages: "chosen" is the completion
{"instruction", "input", "output"}          a chat in Alpaca's format; "input" may be missing.
                                            Dolly calls them "context" and "response"; a list as "input" is messages
{"text": "..."}

A "completion" also answers "messages", "conversations" and "instruction" that end with a question. Answers that a mark
(`_MARKS`) of the row, of the message or of a part of it calls unwanted are context and have no loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import accumulate, chain, compress
from typing import Any, NamedTuple

from data.documents import Content, NothingToLearnError, RowError
from speculator.chat import (
    THOUGHTS,
    Message,
    clean_messages,
    clean_tools,
    from_json,
    media_of,
    with_history,
    with_system,
)
from speculator.errors import UserError, check_text, first_line
from speculator.files import Json

_TOKENS = ("input_ids", "loss_mask", "document_ids", "source_ids")
_SYNONYMS = {
    "conversation": "conversations",
    "chosen_messages": "messages",
    "chosen": "completion",
    "chosen_response": "completion",
    "context": "input",
    "query": "instruction",
    "response": "output",
}
"""Other names of keys, by which some public datasets call them; a row's own key counts first."""
_WEIGHTS = ("weight", "train", "training", "loss", "loss_weight", "loss_scale")
_MARKS = (*_WEIGHTS, "label", "kto_tag", "loss_mask", "step_loss_mask", "masked", "rejected", "mask")
"""Keys of a row, a message or a part of a message that say whether it is trained on: false and numbers up to 0 say no;
of "masked" and "rejected" true does. NeMo's "mask" names the role without loss."""
_OFTEN_FIGURES = ("label", "loss", "rejected")
"""Marks that in a row may be a class or a measured figure, so that there only booleans are followed."""
_LIKE_MARKS = re.compile(
    r"(?<![a-z])(loss|mask(ed)?|train(ing)?|weights?|labels?|tag|images?|audios?|videos?|history|attention)(?![a-z])",
    re.IGNORECASE,
)
"""Matches keys by which a trainer may choose what is trained on, or what else a model sees."""
_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns of tokens that mark those with loss; TRL writes the last two."""
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
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}


MAX_CHARACTERS = 2_000_000
"""Largest length of a row; its tokens need about a hundred times the memory."""
_MAX_MESSAGES = 1000


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
    """Return the content of a parsed row by its format, see `Content`; a key whose value is null counts as missing.

    Raises a RowError, with the place `where`, if the row has no supported format, or a value that it does not allow.
    """
    with errors_of_row(where):
        return _content(row, where)


def _content(row: Any, where: str) -> Content:
    """Do the work of `content`, whose unforeseen errors are not RowErrors here."""
    own = {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else {}
    named = {_SYNONYMS[key]: value for key, value in own.items() if key in _SYNONYMS}
    given = named | {key: value for key, value in own.items() if key not in _SYNONYMS}
    for known in FORMATS:
        if known.fits(given):
            wanted, unread = _marks(given, known.keys, "")
            found = known.read(given, where)
            if not wanted:
                _drop_loss(found, where)
            if every := {*unread, *found.get("unread", ())}:
                found["unread"] = sorted(every)
            return found
    *names, last = (known.name for known in reversed(FORMATS))
    needs = f"not a row in a supported format: it needs {', '.join(names)}, or {last}"
    near = [(key, *get_close_matches(str(key).lower(), KEYS, n=1)) for key in own if key not in KEYS]
    guesses = [f'"{pair[0]!s:.40}" is near "{pair[1]}"' for pair in near if pair[1:]][:3]
    listed = f"its keys are {', '.join(map(str, own)) or 'none':.200}"
    raise RowError(where, "; ".join([needs, *guesses, listed]), needs)


def has_loss(message: Message) -> bool:
    """Return whether an assistant's message, from `content`, is trained on."""
    return message.get("weight") != 0


def is_read(key: str) -> bool:
    """Return whether a row's key is read, or named because it looks like a mark."""
    return key in KEYS or _LIKE_MARKS.search(key) is not None


def _marks(holder: dict[str, Json], read: Sequence[str], of: str) -> tuple[bool, list[str]]:
    """Return whether a row, a message or a part is trained on, and the names of its marks that we do not follow.

    `read` are the keys that are read. `of` says for the names what has them, such as " of a message"; "" for a row.
    """
    wanted, unread = True, []
    for key, value in holder.items():
        name = f'"{key}"{of}'
        if value in (None, "", [], {}):
            continue
        if key not in read:
            unread += [name] if _LIKE_MARKS.search(str(key)) else []
        elif key == "mask" and isinstance(value, str):
            wanted &= _ROLES.get(value.lower()) != "assistant"
        elif not of and key in _OFTEN_FIGURES and type(value) in (int, float):
            unread.append(name)
        elif key in _MARKS and key != "mask" and isinstance(value, int | float):
            wanted &= not value if key in ("masked", "rejected") else value > 0
            unread += [f"{name} other than 0 and 1"] if value not in (0, 1) else []
        elif key in _MARKS and key != "rejected" and "input_ids" not in holder:
            unread.append(name)
    return wanted, unread


def _drop_loss(found: Content, where: str) -> None:
    """Mark the answers of a row as not to be trained on; a text or a row of tokens raises a NothingToLearnError."""
    if "messages" in found:
        for message in found["messages"]:
            if message["role"] == "assistant":
                message["weight"] = 0
    elif "completion" in found:
        found["label"] = False
    else:
        raise NothingToLearnError(where, "rows that are marked as not to be learnt")


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
    if characters > MAX_CHARACTERS:
        kind = f"longer than {MAX_CHARACTERS:,} characters: cut it"
        raise RowError(where, f"{characters:,} characters, {kind}", kind)


def _chat(turns: list[Any], given: dict[str, Json], where: str) -> Content:
    """Return a checked chat from its first message that is not the assistant's; "dropped" counts those before it.

    The row, `given`, gives "tools", and the "system" message of a chat that has none. The keys of `turns` are OpenAI's
    or ShareGPT's.
    """
    if media := media_of(given):
        raise RowError(where, f'"{media}" beside the text; only text is supported')
    if len(turns) > _MAX_MESSAGES:
        raise RowError(where, f"a chat of {len(turns)} messages", f"a chat of more than {_MAX_MESSAGES} messages")
    turns = [from_json(turn) for turn in turns]
    try:
        messages: Any = with_system([_message(turn, where) for turn in turns], given.get("system"))
        chat, tools = clean_messages(messages), clean_tools(given.get("tools"))
    except RowError:
        raise
    except UserError as error:
        raise RowError(where, str(error), re.sub(r"message \d+", "a message", str(error))) from None
    texts = [
        _text(value, where, f'the "{key}" of message {number}')
        for number, message in enumerate(chat, start=1)
        for key, value in message.items()
        if key in ("role", "content", *THOUGHTS)
    ]
    _check_size(where, sum(map(len, texts)))
    unread: list[str] = []
    for turn, message in zip(turns, chat[-len(turns) :], strict=True):
        if message["role"] != "assistant":
            continue
        lists = (turn.get(key) for key in ("content", "value", "train_detail"))
        parts = (part for each in lists if isinstance(each, list) for part in each if isinstance(part, dict))
        judged = [_marks(turn, (*_MARKS, "train_detail"), " of a message")]
        judged += [_marks(part, _MARKS, " of a part") for part in parts]
        unread += chain.from_iterable(names for _, names in judged)
        if not all(wanted for wanted, _ in judged):
            message["weight"] = 0
    # An assistant that speaks first, as in a greeting, wrote that in no context of its own.
    dropped = next((number for number, message in enumerate(chat) if message["role"] != "assistant"), len(chat))
    if dropped == len(chat):
        raise RowError(where, "a chat of the assistant alone")
    return {
        "messages": chat[dropped:],
        **({"tools": tools} if tools else {}),
        **({"dropped": dropped} if dropped else {}),
        **({"unread": unread} if unread else {}),
    }


def _message(turn: Any, where: str) -> Any:
    """Return a turn in OpenAI's keys; one with the keys of ShareGPT becomes a new message."""
    if not isinstance(turn, dict) or "from" not in turn or "role" in turn:
        return turn
    speaker = turn["from"]
    role = _ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        kind = f"not one of {', '.join(_ROLES)}"
        raise RowError(where, f'"from" is {speaker!r:.40}, {kind}', f'"from" is {kind}')
    if speaker.lower() == "function_call":  # LLaMA-Factory's: one call or a list of them
        calls = from_json(turn.get("value"))
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": role, "tool_calls": [{"type": "function", "function": call} for call in calls]}
    return {"role": role, "content": turn.get("value")}


def _turns(value: Json, where: str, key: str, role: str = "user") -> list[Any]:
    """Return the messages of a row's `key`: a text, which `role` says, one message or a list of messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns: Any = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not all(isinstance(from_json(turn), dict) for turn in turns):
        raise RowError(where, f'"{key}" is no text and no list of objects')
    return turns


def _speaker(turn: Any) -> Any:
    name = (turn.get("role") or turn.get("from")) if isinstance(turn, dict) else None
    return _ROLES.get(name.lower(), name) if isinstance(name, str) else None


def _answered(asked: list[Any], given: dict[str, Json], where: str, key: str = "completion") -> Content:
    """Return the chat of some turns and the row's answer to them, `key`, if it has one.

    An answer that begins with a question or a system message repeats the turns. One beside turns that end with an
    answer is not read.
    """
    answer = _turns(given[key], where, key, "assistant") if isinstance(given.get(key), str | list | dict) else []
    if answer and _speaker(answer[0]) in ("system", "user"):
        asked, answer = answer, []
    if not answer or not asked or _speaker(asked[-1]) != "assistant":
        return _chat([*asked, *answer], given, where)
    found = _chat(asked, given, where)
    return {**found, "unread": [*found.get("unread", ()), "a second answer beside that of the chat"]}


def _messages(given: dict[str, Json], where: str) -> Content:
    """Return the chat of "messages" or "conversations", in OpenAI's or ShareGPT's keys, and maybe of a "completion"."""
    key = "messages" if "messages" in given else "conversations"
    turns: Any = from_json(given[key])
    if turns == []:
        raise RowError(where, "a chat without messages")
    if not isinstance(turns, list) or not all(isinstance(from_json(turn), dict) for turn in turns):
        raise RowError(where, f'"{key}" is not a list of objects')
    return _answered(_after_history([*map(from_json, turns)], given, where), given, where)


def _is_chat_pair(given: dict[str, Json]) -> bool:
    """Return whether a completion answers a chat: one of its messages, a history or a prompt of messages."""
    whole = isinstance(given.get("prompt"), list) or bool("prompt" in given and given.get("history"))
    return isinstance(given.get("completion"), list | dict) or ("completion" in given and whole)


def _from_chat_pair(given: dict[str, Json], where: str) -> Content:
    asked = _turns(given.get("prompt") or [], where, "prompt")
    return _answered(_after_history(asked, given, where), given, where)


def _is_alpaca(given: dict[str, Json]) -> bool:
    asked = "instruction" in given or isinstance(given.get("input"), list)
    return asked and ("output" in given or ("completion" in given and "prompt" not in given))


def _from_alpaca(given: dict[str, Json], where: str) -> Content:
    """Return the chat of "instruction", "input" and "output" (Alpaca), or of messages in "input" and "output"."""
    key = "output" if "output" in given else "completion"
    if isinstance(asked := given.get("input"), list):
        return _answered(asked, given, where, key)
    instruction, context = (_text(given.get(name, ""), where, f'"{name}"') for name in ("instruction", "input"))
    if not isinstance(given[key], list | dict):
        _text(given[key], where, f'"{key}"')
    asked = [{"role": "user", "content": "\n\n".join(filter(None, (instruction, context)))}]
    return _answered(_after_history(asked, given, where), given, where, key)


def _after_history(turns: list[Any], given: dict[str, Json], where: str) -> list[Any]:
    try:
        return with_history(given.get("history"), turns)
    except UserError as error:
        raise RowError(where, str(error)) from None


def _from_pair(given: dict[str, Json], where: str) -> Content:
    prompt, completion = _texts(given, where, "prompt", "completion")
    if media := media_of(given):
        raise RowError(where, f'"{media}" beside the text; only text is supported')
    return {"prompt": prompt, "completion": completion}


def _texts(given: dict[str, Json], where: str, *keys: str) -> list[str]:
    """Return the values of keys that must exist; raise a RowError if one is no valid text, or all are too long."""
    texts = [_text(given[key], where, f'"{key}"') for key in keys]
    _check_size(where, sum(map(len, texts)))
    return texts


def _tokens(given: dict[str, Json], where: str) -> Content:
    """Return a row of tokens, checked, without padding; a token has loss by each of `_MASKS` and any label but -100."""
    ids: Any = given["input_ids"]
    columns: Any = {
        name: given[name] for name in (*_TOKENS, *_MASKS, "attention_mask", "position_ids") if name in given
    }
    if isinstance(labels := given.get("labels"), list):
        columns["labels"] = [int(label != _NO_LOSS) for label in labels]
    for name, column in columns.items():
        invalid = not isinstance(column, list) or not all(isinstance(value, int) and value >= 0 for value in column)
        if invalid or (name == "input_ids" and any(isinstance(value, bool) for value in column)):
            raise RowError(where, f'"{name}" is not a list of integers >= 0')
        if (len(column) != len(ids) and name != "source_ids") or not column:
            many = f'values of "{name}" for'
            raise RowError(where, f"{len(column)} {many} {len(ids)} tokens", f"another number of {many} the tokens")
    for name in _MASKS:
        if not set(columns.get(name, [])) <= {0, 1}:
            raise RowError(where, f'"{name}" must contain only 0 and 1')
    masks = [columns[name] for name in (*_MASKS, "labels") if name in columns]
    columns["loss_mask"] = [min(values) for values in zip([1] * len(ids), *masks, strict=True)]
    # Packers number the documents in the attention mask, or begin each at position 0.
    seen = columns.get("attention_mask", [1] * len(ids))
    numbers = seen if max(seen) > 1 else [*accumulate(int(place == 0) for place in columns.get("position_ids", ()))]
    several = sorted({number for number, one in zip(numbers, seen, strict=False) if one})
    if len(several) > 1 and "document_ids" not in columns:
        columns["document_ids"] = [max(0, number - several[0]) for number in numbers]
    read: Any = {}
    for name in (name for name in _TOKENS if name in columns):
        kept = columns[name] if name == "source_ids" else compress(columns[name], seen)
        read[name] = [int(value) for value in kept]
    if not read["input_ids"]:
        raise RowError(where, "padding alone")
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


def _has(*keys: str) -> Callable[[dict[str, Json]], bool]:
    return lambda given: all(key in given for key in keys)


_BESIDE_TOKENS = ("labels", "attention_mask", "position_ids", "special_tokens_mask")
_CHAT = ("completion", "tools", "system", "history", *_MARKS)
_ALPACA = ("instruction", "input", "output")
FORMATS = [
    Format('"input_ids"', (*_TOKENS, *_MASKS, *_BESIDE_TOKENS, *_WEIGHTS), _has("input_ids"), read=_tokens),
    Format('"messages"', ("messages", *_CHAT), _has("messages"), read=_messages),
    Format('"conversations"', ("conversations", *_CHAT), _has("conversations"), read=_messages),
    Format('"completion" as messages', ("prompt", *_CHAT), _is_chat_pair, read=_from_chat_pair),
    Format('"instruction" and "output"', (*_ALPACA, *_CHAT), _is_alpaca, read=_from_alpaca),
    Format('"prompt" and "completion"', ("prompt", *_CHAT), _has("prompt", "completion"), read=_from_pair),
    Format(
        '"text"', ("text", *_WEIGHTS), _has("text"), read=lambda given, where: {"text": _texts(given, where, "text")[0]}
    ),
]
"""The formats, in the order in which they are tried."""
KEYS = tuple(dict.fromkeys((*(key for known in FORMATS for key in known.keys), *_SYNONYMS)))
"""All keys that are read; of the others, those that look like marks are named and the rest are ignored."""
