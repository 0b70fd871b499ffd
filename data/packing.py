"""Pack documents into rows of at most one length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from data.documents import Columns, TokenDocument

COLUMNS = ("input_ids", "document_ids", "loss_mask")
_OPEN_ROWS = 32
"""Rows that wait for a document that fits. Chats of 100 to 1,500 tokens then fill 99% of rows of 4,096."""


def pack(documents: Iterable[TokenDocument], length: int, max_tokens: int | None = None) -> Iterator[Columns]:
    """Put whole documents into rows, each into the fullest open row that has room for it, and yield the rows.

    So no token loses the beginning of its document; only a document that is longer than a row is cut. Plain text, which
    has loss everywhere, fills rows of its own and is cut at their ends. Rows may be shorter than `length`, and come in
    the order in which they are full.

    Every row has the columns "input_ids", "document_ids" and "loss_mask" [at most length]: two positions belong to the
    same document iff their document ids agree, e.g. (length 8, EOS 0, prompts and their completions)
        input_ids     5 9 3 0 7 7 0
        document_ids  0 0 0 0 1 1 1
        loss_mask     0 0 1 1 0 1 1
    A row's first document id is the number of its documents that began in another row and are continued here. These
    come first: a row that starts with the rest of one cut document has the ids 1, 2, 3, ...

    Args:
        length: tokens of a row.
        max_tokens: stop before the rows have more tokens than this; None: no limit.
    """
    emitted = 0
    for row in _fill(documents, length):
        size = len(row["input_ids"])
        if max_tokens is not None and emitted + size > max_tokens:
            return
        if size > 1:  # a text of one token has no next token to predict
            emitted += size
            yield row


class _OpenRow:
    """A row that is being filled; the first `rests` of its documents began in another row."""

    def __init__(self) -> None:
        self.columns: Columns = {name: [] for name in COLUMNS}
        self.rests = self.documents = 0

    @property
    def used(self) -> int:
        return len(self.columns["input_ids"])

    def append(self, document: TokenDocument, begin: int, length: int) -> int:
        """Append a document's tokens from `begin` on, up to a row of `length`; return the end of the appended part."""
        end = min(begin + length - self.used, len(document["input_ids"]))
        self.columns["document_ids"] += [self.documents] * (end - begin)
        self.columns["input_ids"] += document["input_ids"][begin:end]
        self.columns["loss_mask"] += document["loss_mask"][begin:end]
        self.rests += begin > 0
        self.documents += 1
        return end

    def finished(self) -> Columns:
        """Return the row, with the document ids that `pack` describes."""
        return {**self.columns, "document_ids": [each + self.rests for each in self.columns["document_ids"]]}


def _fill(documents: Iterable[TokenDocument], length: int) -> Iterator[Columns]:
    """Yield the rows of `pack` without its limit; a row may have a single token."""
    text, rows = _OpenRow(), list[_OpenRow]()  # the open rows: one of plain text, and those of other documents
    for document in documents:
        size, begin = len(document["input_ids"]), 0
        if all(document["loss_mask"]):
            while begin < size:
                begin = text.append(document, begin, length)
                if text.used == length:
                    yield text.finished()
                    text = _OpenRow()
            continue
        while begin < size:
            needed = min(size - begin, length)
            # Rests come first in their rows, so that their number tells which documents they are.
            fitting = [row for row in rows if row.used + needed <= length and (not begin or row.rests == row.documents)]
            if not fitting:
                rows.append(_OpenRow())
            row = max(fitting, key=lambda row: row.used, default=rows[-1])
            begin = row.append(document, begin, length)
            if row.used == length or len(rows) > _OPEN_ROWS:
                fullest = max(rows, key=lambda row: row.used)
                rows.remove(fullest)
                yield fullest.finished()
    yield from (row.finished() for row in (*rows, text) if row.used)
