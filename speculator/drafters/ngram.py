"""N-gram lookup (prompt lookup): draft the tokens that followed an earlier match of the sequence's end."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Drafter, LookupPaths, Memory, Sequences
from speculator.decoding.request import Request, as_count
from speculator.decoding.sampling import Noise
from speculator.decoding.verify import CHAIN_RULES
from speculator.drafters.shapes import check_length
from speculator.target.text import source_of

MEMORY = 2**17
"""Tokens of other sequences that a server, or several samples of a prompt, search: about 40 MB."""
LONGEST = 16
"""The most matching tokens that count."""
_OCCURRENCES = 4  # of an n-gram that are remembered, the newest
_ELSEWHERE = 2
"""A match in another sequence is as reliable as one in the sequence itself that is this many tokens shorter."""
Occurrence = tuple[Sequence[int], int]
"""A sequence, and the position after an n-gram in it."""


class _Index:
    """Where each n-gram of a growing sequence occurred last, in it and in its source.

    Attributes:
        ends: position after the last occurrence, by n-gram.
        known: number of tokens whose n-grams are in `ends`.
    """

    def __init__(self, text: Sequence[int], max_ngram: int):
        self.text, self.max_ngram = text, max_ngram
        self.source = _Index(source_of(text), max_ngram) if source_of(text) else None
        self.ends: dict[tuple[int, ...], int] = {}
        self.known = 0

    def read(self) -> None:
        """Add the n-grams of the tokens that are new since the last call, the newest token's excepted."""
        text, ends = self.text, self.ends
        # A step costs its own tokens, not the whole text. Later positions overwrite earlier ones, so the newest wins.
        for end in range(self.known + 1, len(text)):  # nothing follows the n-grams that end at the text's own end
            for size in range(1, min(self.max_ngram, end) + 1):
                ends[tuple(text[end - size : end])] = end
        self.known = len(text) - 1
        if self.source:
            self.source.read()

    def last(self, of: Sequence[int]) -> int | None:
        """Return the position after the last match of the longest suffix of `of` in this text; None without a match."""
        match, longest = None, 0
        # First the tokens that `read` has not added yet: their matches are newer than those in `ends`.
        for end in range(len(self.text) - 1, self.known, -1):
            size = min(self.max_ngram, _common_suffix(self.text, end, of))
            if size > longest:
                match, longest = end, size
        # The longest suffix first: a match of three tokens is right more often than one of a single token.
        for size in range(min(self.max_ngram, len(of)), longest, -1):
            found = self.ends.get(tuple(of[-size:]))
            if found is not None:
                return found
        return match


class History:
    """Where the n-grams of recent sequences occurred, including sequences that still grow.

    Args:
        tokens: the most tokens of finished sequences; the oldest are forgotten.
    """

    def __init__(self, tokens: int, ngram: int):
        self.tokens, self.ngram = tokens, ngram
        self._ends: dict[tuple[int, ...], tuple[Occurrence, ...]] = {}  # the newest first
        self._known: dict[int, tuple[Sequence[int], int]] = {}  # by its id a text and how far it is known; oldest first
        self._size = 0

    def read(self, sequences: Sequences) -> None:
        """Read the new tokens of these growing sequences; of others, forget the oldest beyond `tokens` tokens."""
        for text in sequences:
            _, known = self._known.pop(id(text), (text, 0))
            for end in range(max(known, self.ngram), len(text)):
                gram = tuple(text[end - self.ngram : end])
                self._ends[gram] = ((text, end), *self._ends.get(gram, ())[: _OCCURRENCES - 1])
            self._known[id(text)] = text, len(text)
            self._size += len(text) - known
        growing = sum(map(len, sequences))
        while self._size - growing > self.tokens and len(self._known) > len(sequences):
            self._forget(next(iter(self._known)))

    def _forget(self, name: int) -> None:
        """Drop the n-grams of the sequence whose `id` is `name`."""
        text, known = self._known.pop(name)
        self._size -= known
        for end in range(self.ngram, known):
            gram = tuple(text[end - self.ngram : end])
            left = tuple(each for each in self._ends.pop(gram, ()) if each[0] is not text)
            if left:
                self._ends[gram] = left

    def occurrences(self, text: Sequence[int]) -> tuple[Occurrence, ...]:
        """Return where the last n-gram of `text` occurred in the sequences read: its 4 newest places, newest first."""
        return self._ends.get(tuple(text[-self.ngram :]), ())


def _common_suffix(one: Sequence[int], end: int, other: Sequence[int]) -> int:
    """Return how many tokens before `end` equal the last ones of `other`, up to `LONGEST`: of a b c and x b c, 2."""
    count, most = 0, min(end, len(other), LONGEST)
    while count < most and one[end - 1 - count] == other[-1 - count]:
        count += 1
    return count


class NgramDrafter(Drafter):
    """Drafts the tokens that followed the most recent match of the longest suffix; the draft is deterministic.

    Args:
        num_speculative_tokens: the most tokens to copy.
        max_ngram: the longest suffix to look for; shorter ones are tried in turn, down to one token.
        memory: number of tokens of other sequences to search: the other rows, and the most recently finished ones.
            0 searches the row's own sequence only.
    """

    name = "ngram"
    rules: tuple[str, ...] = CHAIN_RULES
    capturable = True

    def __init__(self, num_speculative_tokens: int = 4, max_ngram: int = 3, memory: int = 0):
        self.num_speculative_tokens = self.nodes = num_speculative_tokens = check_length(num_speculative_tokens)
        self.max_ngram = max_ngram = as_count("max_ngram", max_ngram, least=1)
        self.memory = Memory()
        self.memory.paths = LookupPaths(num_speculative_tokens)
        self.history = History(memory, max_ngram) if memory else None
        self._indices: dict[int, _Index] = {}

    def choose(self, requests: Sequence[Request]) -> None:
        self.memory.paths.put(self.paths(requests))

    def paths(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the tokens that followed the best match of each request's sequence; none without a match."""
        return [tokens for _, tokens in self.look([request.sequence for request in requests])]

    def prepare(self) -> None:
        for index in self._indices.values():
            index.read()

    def forget(self) -> None:
        self._indices = {}
        if self.history:
            self.history = History(self.history.tokens, self.max_ngram)

    def look(self, sequences: Sequences) -> list[tuple[int, list[int]]]:
        """Return the best match of each sequence's end: its number of tokens, and the tokens that followed it.

        Without a match these are 0 and []. A match in another sequence counts as two tokens shorter, also in the number
        returned, but as at least one; at a tie the sequence's own match wins, and before it that in its source. At most
        `LONGEST` matched tokens count. New tokens are compared one by one until `prepare` has added them to the index.
        """
        # By identity: a request's sequence stays one list while it grows. An index holds its text, so no other text can
        # have that id.
        self._indices = {id(text): self._indices.get(id(text)) or _Index(text, self.max_ngram) for text in sequences}
        if self.history:
            self.history.read([text for text in sequences if text])
        return [self._best(index) for index in self._indices.values()]

    def _best(self, index: _Index) -> tuple[int, list[int]]:
        """Return what `look` returns for one sequence, that of the index."""
        text, last = index.text, index.last(index.text)
        matches = [] if last is None else [(text, last)]
        if index.source and (end := index.source.last(text)):  # first: it wins a tie, since an answer is short
            matches.insert(0, (index.source.text, end))
        if self.history:
            matches += self.history.occurrences(text)
        size, tokens = 0, []
        for other, end in matches:
            common = _common_suffix(other, end, text)
            if other is not text and other is not source_of(text):
                # At least 1, so that a match elsewhere is better than none.
                common = max(1, common - _ELSEWHERE)
            if common > size:
                size, tokens = common, list(other[end : end + self.num_speculative_tokens])
        return size, tokens

    def propose(self, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        return Draft(*self.memory.paths.first(len(pending), self.num_speculative_tokens), ragged=True)
