"""Pack documents into rows of equal length, or give each a row of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def pack(
    documents: Iterable[dict[str, Any]], length: int, max_tokens: int | None = None
) -> Iterator[dict[str, list[int]]]:
    """Concatenate rendered documents and cut the stream into rows.

    Every row has the columns "input_ids", "document_ids", "loss_mask" and "rejected" [length]: two positions belong to
    the same document iff their document ids agree, e.g. (length 8, EOS 0, the second document a prompt and its
    completion)
        input_ids     5 9 0 7 7 3 0 4
        document_ids  0 0 0 1 1 1 1 2
        loss_mask     1 1 1 0 0 1 1 1
        rejected      0 0 0 0 0 0 1 0    tokens that replaced a rejected draft token, if the document marks them
    The tail that does not fill a row is dropped, unless it is all there is.

    Args:
        documents: rows of `data.rendering.render`.
        length: tokens of a row.
        max_tokens: stop before the rows have more tokens than this; None: no limit.
    """
    columns: dict[str, list[int]] = {"input_ids": [], "document_ids": [], "loss_mask": [], "rejected": []}
    emitted = 0
    for count, document in enumerate(documents):
        columns["input_ids"] += document["input_ids"]
        columns["document_ids"] += [count] * len(document["input_ids"])
        columns["loss_mask"] += document["loss_mask"]
        columns["rejected"] += document.get("rejected") or [0] * len(document["input_ids"])
        # What fills whole rows leaves the buffer, so it never holds more than one row and one document.
        whole = len(columns["input_ids"]) // length * length
        for start in range(0, whole, length):
            # Whole rows only: with rows of 8 and max_tokens 20, two rows and no shorter third one.
            if max_tokens is not None and emitted + length > max_tokens:
                return
            row = {name: column[start : start + length] for name, column in columns.items()}
            # From 0 in each row: only equality counts.
            first = row["document_ids"][0]
            yield {**row, "document_ids": [d - first for d in row["document_ids"]]}
            emitted += length
        for column in columns.values():
            del column[:whole]
    # A text of one token has no next token to predict.
    if not emitted and len(columns["input_ids"]) > 1:
        yield columns


def one_per_row(
    documents: Iterable[dict[str, Any]], length: int, max_tokens: int | None = None
) -> Iterator[dict[str, list[int]]]:
    """Make a row of each document of an encoder-decoder target, with its "source_ids"; what exceeds `length` is cut."""
    emitted = 0
    for document in documents:
        row = {name: document[name][:length] for name in ("input_ids", "loss_mask", "rejected")}
        emitted += (size := len(row["input_ids"]))
        if max_tokens is not None and emitted > max_tokens:
            return
        yield {**row, "document_ids": [0] * size, "source_ids": document["source_ids"]}
