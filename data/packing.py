"""Documents into rows of equal length, ready to train on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from transformers import PreTrainedTokenizerBase

_DOCUMENTS_AT_ONCE = 64


def pack(
    documents: Iterable[dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    max_tokens: int | None = None,
) -> Iterator[dict[str, list[int]]]:
    """Tokenise documents, end each with EOS, lay them end to end and cut the stream into rows.

    Special tokens in front of a document (BOS) are those that the tokenizer adds itself.

    Every row is {"input_ids": [length], "document_ids": [length]}: two positions belong to the same
    document iff their document ids agree, e.g. (length 8, EOS 0)
        input_ids     5 9 0 7 7 3 0 4
        document_ids  0 0 0 1 1 1 1 2
    The tail that does not fill a row is dropped.
    """
    ids: list[int] = []
    document_ids: list[int] = []
    emitted = 0
    count = 0
    stream = iter(documents)
    while batch := list(islice(stream, _DOCUMENTS_AT_ONCE)):
        for tokens in tokenizer([row["text"] for row in batch], verbose=False)["input_ids"]:
            ended = tokens if tokens[-1:] == [tokenizer.eos_token_id] else [*tokens, tokenizer.eos_token_id]
            ids += ended
            document_ids += [count] * len(ended)
            count += 1
        while len(ids) >= length:
            if max_tokens is not None and emitted + length > max_tokens:
                return
            first = document_ids[0]
            yield {"input_ids": ids[:length], "document_ids": [d - first for d in document_ids[:length]]}
            emitted += length
            del ids[:length], document_ids[:length]
