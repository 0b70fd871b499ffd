"""The text of an answer while its tokens come: whole characters, and nothing of a string that it stops at."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from speculator.decoding.streaming import Detokenizer


class Answer:
    """One answer.

    Args:
        tokenizer: of the target.
        stops: strings that end the text, which are no part of it.
        before: tokens that the text goes on from, see `speculator.decoding.streaming.decode`.

    Attributes:
        text: what was given so far.
        stopped: one of the strings has come.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], before: Sequence[int] = ()):
        self._detokenizer, self._stops = Detokenizer(tokenizer, before), stops
        self._held = ""
        self.text, self.stopped = "", False

    def push(self, tokens: Sequence[int], ended: bool) -> str:
        """The text that these tokens settle: neither half a character nor what may become one of the strings."""
        if self.stopped:
            return ""
        held = self._held + "".join(map(self._detokenizer.push, tokens)) + (self._detokenizer.finish() if ended else "")
        found = [place for place in map(held.find, self._stops) if place >= 0]
        self.stopped = bool(found)
        keep = 0 if ended else max((_overlap(held, stop) for stop in self._stops), default=0)
        place = min(found) if found else len(held) - keep
        piece, self._held = held[:place], held[place:]
        self.text += piece
        return piece


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text with which the string begins."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
