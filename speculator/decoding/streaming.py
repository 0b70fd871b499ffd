"""Text from tokens as they come: pieces that never change afterwards, coloured by who gave the token."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from speculator.errors import safe, show

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
LEGEND = f"{_GREEN}green{_PLAIN}: draft tokens that the target accepted; uncoloured: tokens that it gave itself"


_BEFORE = 16
"""Tokens before a text that are decoded with it, where these are many."""
_INSIDE = re.compile(r"<0x[89AB][0-9A-F]>")
"""A byte token that begins no character."""


def last(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], count: int) -> Sequence[int]:
    """The last `count` tokens of a text, or up to three more, so that they do not begin inside a character: of a run of
    byte tokens with half a character in it tokenizers decode nothing.
    """
    start = max(0, len(tokens) - count)
    for begin in range(start, max(-1, start - 4), -1):
        name = tokenizer.convert_ids_to_tokens(int(tokens[begin])) if tokens else None
        if not (isinstance(name, str) and _INSIDE.fullmatch(name)):
            return tokens[begin:]
    return tokens[start:]


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], before: Sequence[int] = (), special: bool = False
) -> str:
    """The text of new tokens.

    Args:
        tokenizer: of the target.
        tokens: the new ones.
        before: those that the text goes on from, of which the last count. Some tokenizers drop the space at the start
            of a text, so " Paris" is "Paris" behind nothing; a chat's answer begins so.
        special: show special tokens too.
    """

    def text(ids: Sequence[int]) -> str:
        # Cleaning up would remove spaces that a stream has shown already.
        made = tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        assert isinstance(made, str)
        return made

    before = last(tokenizer, before, _BEFORE)
    whole, known = text([*before, *tokens]), text(before) if before else ""
    while not whole.startswith(known):  # it ended inside a character
        known = known[:-1]
    return whole[len(known) :]


class Detokenizer:
    """Pieces of text from tokens one by one; together they are `decode` of all the tokens.

    A token may end inside a character, so text is held back while it ends in a replacement character. Tokenizers with
    byte tokens ("<0xE4>") decode a run of them as a whole, so such a run is held back until it ends.

    Args:
        tokenizer: of the target.
        before: see `decode`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self.tokenizer = tokenizer
        # Tokens since the piece before the last one. That piece is decoded again: what a token's text is depends on
        # what is before it. `_shown` of the tokens have been given.
        self._window = list(last(tokenizer, before, _BEFORE))
        self._shown = len(self._window)
        self._special = set(tokenizer.all_special_ids)  # left out of the text: they end no run
        self._in_run = False

    def push(self, token: int) -> str:
        """The text that this token settles: empty while it may still change."""
        self._window.append(token)
        if token not in self._special:
            name = self.tokenizer.convert_ids_to_tokens(token)
            self._in_run = isinstance(name, str) and len(name) == 6 and name.startswith("<0x")
        piece = self._held()
        if not piece or self._in_run or piece.endswith("\ufffd"):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return piece

    def finish(self) -> str:
        """What is still held back, as it is."""
        piece = self._held()
        self._window, self._shown = [], 0
        return piece

    def _held(self) -> str:
        return decode(self.tokenizer, self._window[self._shown :], self._window[: self._shown])


class TextStream:
    """Prints one text on stdout while it is generated: give it to `generate` as `on_step`, then call `finish`.

    On a terminal control characters are shown as escapes.

    Args:
        tokenizer: of the target.
        lead: printed before the first token's text.
        colours: accepted draft tokens in green. A character of several tokens has the colour of the last.
        before: see `decode`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, lead: str = "", colours: bool = False, before: Sequence[int] = ()
    ):
        self.detokenizer = Detokenizer(tokenizer, before)
        self.lead, self.colours = lead, colours

    def __call__(self, row: int, tokens: Sequence[int], drafted: int) -> None:
        """A step's new tokens, of which the first `drafted` were drafted."""
        text, self.lead = safe(self.lead), ""
        for place, token in enumerate(tokens):
            piece = safe(self.detokenizer.push(token))
            text += f"{_GREEN}{piece}{_PLAIN}" if piece and self.colours and place < drafted else piece
        print(text, end="", flush=True)

    def finish(self) -> None:
        """Print what was held back, and end the line."""
        show(self.detokenizer.finish())
