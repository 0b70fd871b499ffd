"""The values that travel through `data`: what a row holds, a document of a source, and a document as tokens."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, TypedDict

from data.mixture import SourceError
from speculator.chat import Message, Tool

if TYPE_CHECKING:
    from typing_extensions import Required


class RowError(SourceError):
    """A bad row in a source whose other rows may be good.

    Args:
        where: file and line.
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


Columns = dict[str, list[int]]
"""A row of tokens by the name of its column, see `data.packing.pack`."""


class Content(TypedDict, total=False):
    """The content of a row in one of four forms, which its keys tell apart: `text`; `prompt` and `completion`;
    `messages`; or `input_ids` and `loss_mask`.

    Attributes:
        label: False for a completion that is not to be trained on.
        dropped: number of messages that were cut off before a chat's first.
        document_ids: for each token of a packed row, the number of its document.
        source_ids: tokens that an encoder reads.
        unread: names of its keys that look like marks, and that we do not follow.
    """

    text: str
    prompt: str
    completion: str
    label: bool
    messages: list[Message]
    tools: list[Tool]
    dropped: int
    input_ids: list[int]
    loss_mask: list[int]
    document_ids: list[int]
    source_ids: list[int]
    unread: list[str]


class Document(Content, total=False):
    """A row as read from its source, before rendering.

    Attributes:
        id: its place in the source.
        where: its place for error messages.
        name: decides the row's split in place of a hash of its content.
        fault: what is wrong with the row, which then has no content.
    """

    id: Required[str]
    where: Required[str]
    name: str
    split: str
    fault: RowError


class ChatFacts(TypedDict):
    """What became of a chat when it was rendered, for counts and log lines.

    Attributes:
        where: its place for messages.
        completion: whether it was made from a prompt and its completion.
        rows, answers: number of its rows, and of its answers with loss.
        left_out: number of the message, from 0, and reason, of each answer that can't have loss.
        marked: number of answers without loss because the data say so, as by "weight": 0.
        thoughtless: number of answers that have loss without their thoughts.
        dropped: number of messages that were cut off before its first.
        why: why each row after the first one begins.
    """

    where: str
    completion: bool
    rows: int
    answers: int
    left_out: list[tuple[int, str]]
    marked: int
    thoughtless: int
    dropped: int
    why: list[str]


class TokenDocument(TypedDict, total=False):
    """A document, or a part of one, as tokens.

    Attributes:
        input_ids, loss_mask: tokens, and for each whether it has loss.
    """

    id: Required[str]
    input_ids: Required[list[int]]
    loss_mask: Required[list[int]]
    chat: ChatFacts


_CONTENT = ("text", "prompt", "completion", "label", "messages", "tools", "input_ids", "loss_mask", "source_ids")


def digest_of(row: Document) -> bytes:
    """Return a hash of a document's content, 16 bytes; two documents are copies if theirs are the same."""
    content = {key: value for key, value in row.items() if key in _CONTENT}
    try:
        text = row["text"] if "text" in row else json.dumps(content, sort_keys=True, default=str)
    except (RecursionError, TypeError):  # deeply nested; keys of several types
        text = repr(content)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
