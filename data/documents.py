"""The values that travel through `data`: what a row holds, a document of a source, and a document as tokens."""

from __future__ import annotations

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
        label: False, of a completion that is not to be learnt.
        tools: tools of a chat.
        dropped: number of messages that were cut off before a chat's first.
        document_ids, rejected, source_ids: further columns of tokens, see `data.rows`.
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
    rejected: list[int]
    source_ids: list[int]


class Document(Content, total=False):
    """A row in its source.

    Attributes:
        id: its place in the source.
        where: its place for error messages.
        name: stands for the content when documents are split.
        split: the split that its source gives it.
        fault: what is wrong with the row, which then has no content.
    """

    id: Required[str]
    where: Required[str]
    name: str
    split: str
    fault: RowError


class ChatFacts(TypedDict):
    """What became of a chat.

    Attributes:
        where: its place for messages.
        completion: it is a prompt with its completion.
        rows, answers: number of its rows, and of its answers with loss.
        left_out: number of the message, from 0, and reason, of each answer without loss.
        marked: number of answers that the row itself excludes.
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
        rejected: for each token whether it replaced a rejected draft token; none did without it.
        source_ids: what an encoder reads.
        chat: facts of a chat, in its first row.
    """

    id: Required[str]
    input_ids: Required[list[int]]
    loss_mask: Required[list[int]]
    rejected: list[int]
    source_ids: list[int]
    chat: ChatFacts
