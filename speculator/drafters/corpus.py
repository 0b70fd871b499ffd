"""A corpus to look in: where in it a text's end occurs, and what mostly follows there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from speculator.errors import UserError, check_text
from speculator.files import read_rows, read_text

_log = logging.getLogger(__name__)

LONGEST = 16
"""Tokens of a text's end that are looked for."""
_VOTES = 16  # places on either side of the best one that say what follows
MOST = 2**24
"""Tokens of a corpus: of 8 bytes each when it is sorted."""


class Corpus:
    """The places of a corpus, ordered by what is before them read backwards: those behind like ends are neighbours.

    Args:
        sequences: token ids.
        most: tokens in all; what is beyond is left out, and a warning says so.

    Raises:
        UserError: there is no token in it.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], most: int = MOST):
        parts: list[np.ndarray] = []
        room = most
        for text in sequences:
            if room < len(text):
                _log.warning(f"the corpus is cut at {most:,} tokens")
            parts += [np.array([-1], dtype=np.int32), np.asarray(text[:room], dtype=np.int32)]
            room -= len(text)
            if room < 0:
                break
        if room == most:
            raise UserError("the corpus has no tokens")
        # A context may begin before the first text; behind the last nothing follows.
        self.tokens = np.concatenate([np.full(LONGEST, -1, np.int32), *parts, np.array([-1], np.int32)])
        self._order = self._sorted()

    def _sorted(self) -> np.ndarray:
        """Places by the `LONGEST` tokens that end there, by doubling: the ranks of two halves make the whole's."""
        _, rank = np.unique(self.tokens, return_inverse=True)
        size = 1
        while size < LONGEST:
            before = np.concatenate([np.zeros(size, rank.dtype), rank[:-size]])
            key = rank.astype(np.int64) * (int(rank.max()) + 1) + before
            _, rank = np.unique(key, return_inverse=True)
            size *= 2
        order = np.argsort(rank, kind="stable").astype(np.int32)
        return order[(order >= LONGEST) & (self.tokens[order] >= 0)]

    def find(self, text: Sequence[int], count: int) -> tuple[int, list[int]]:
        """How many tokens of the text's end occur together in the corpus, at most `LONGEST`, and up to `count` tokens
        that follow there: of the places that match alike the most common next token, again and again.
        """
        query = list(text[: -LONGEST - 1 : -1])  # backwards
        low, high = 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            if self._before(self._order[middle], len(query)) < query:
                low = middle + 1
            else:
                high = middle
        near = self._order[max(0, low - _VOTES) : low + _VOTES].astype(np.int64)
        back = self.tokens[near[:, None] - np.arange(len(query))]  # [places, query]
        alike = (back == np.array(query)).cumprod(1).sum(1)
        longest = int(alike.max())
        if not longest:
            return 0, []
        ahead = near[alike == longest, None] + np.arange(1, count + 1)
        following = self.tokens[np.minimum(ahead, len(self.tokens) - 1)].tolist()  # [places, count]
        tokens: list[int] = []
        for step in range(count):
            votes = Counter(row[step] for row in following if row[step] >= 0)
            if not votes:
                break
            tokens.append(votes.most_common(1)[0][0])
            following = [row for row in following if row[step] == tokens[-1]]
        return longest, tokens

    def _before(self, place: int, count: int) -> list[int]:
        return self.tokens[place - count + 1 : place + 1][::-1].tolist()


def read_corpus(files: Sequence[Path], tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Text files, and .jsonl files of rows with a "text".

    Raises:
        UserError: one can't be read, a row has no text, or there is nothing in any.
    """
    try:
        return Corpus(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in _texts(files))
    except UserError as error:
        raise UserError(f"--ngram_corpus: {error}") from None


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            for where, row in read_rows(file):
                text = row.get("text") if isinstance(row, dict) else None
                if not isinstance(text, str):
                    raise UserError(f'{where}: a row needs "text" (text)')
                check_text(where, text)
                yield text
        else:
            yield read_text(file)
