"""The values that travel through `data`: what a row holds, a document of a source, and a document as tokens."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, TypedDict

from speculator.chat import Message, Tool

if TYPE_CHECKING:
    from typing_extensions import Required

    from data.rows import RowError

Columns = dict[str, list[int]]
"""A row of tokens by the name of its column, see `data.packing.pack`."""


class Content(TypedDict, total=False):
    """The content of a row in one of four forms, which its keys tell apart: `text`; `prompt` and `completion`;
    `messages`; or `input_ids` and `loss_mask`.

    Attributes:
        label: False for a completion that is not to be trained on.
        tools: tools of a chat.
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
        split: the split that its source gives it.
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
        id: that of the document.
        input_ids, loss_mask: tokens, and for each whether it has loss.
        chat: facts of a chat, in its first row.
    """

    id: Required[str]
    input_ids: Required[list[int]]
    loss_mask: Required[list[int]]
    chat: ChatFacts


_CONTENT = ("text", "prompt", "completion", "label", "messages", "tools", "input_ids", "loss_mask", "source_ids")


def digest_of(row: Document) -> bytes:
    """Return a hash of a document's content, 16 bytes."""
    return hashlib.sha256(_identity(row)).digest()[:16]


def _identity(row: Document) -> bytes:
    """Return the content of a document as bytes; two documents are copies if these are the same."""
    if "text" in row:
        return row["text"].encode()
    content = {key: value for key, value in row.items() if key in _CONTENT}
    try:
        return json.dumps(content, sort_keys=True, default=str).encode()
    except (RecursionError, TypeError):  # deeply nested; keys of several types
        return repr(content).encode("utf-8", "surrogatepass")
