"""Incremental detokenization: text pieces that never change afterwards, coloured by the token's origin."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from speculator.chat import decoded
from speculator.errors import safe, show
from speculator.terminal import GREEN, PLAIN, colours

MAX_CONTEXT = 16
"""Preceding tokens that are decoded together with new ones."""
_MAX_HELD = 16
"""Tokens whose text is held back at most, and up to four more for a character to end: no character has more."""
_CONTINUATION_BYTE = re.compile(r"<0x[89AB][0-9A-F]>")
"""Name of a byte token inside a UTF-8 character."""


def last(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], count: int) -> Sequence[int]:
    """Return the last `count` tokens, or up to 3 more: no tokenizer decodes what begins inside a character."""
    # A character has at most four bytes, so at most three tokens back one begins.
    start = max(0, len(tokens) - count)
    for begin in range(start, max(-1, start - 4), -1):
        name = tokenizer.convert_ids_to_tokens(int(tokens[begin])) if tokens else None
        if not (isinstance(name, str) and _CONTINUATION_BYTE.fullmatch(name)):
            return tokens[begin:]
    return tokens[start:]


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], before: Sequence[int] = (), special: bool = False
) -> str:
    """Return the text of new tokens; without the tokens `before`, some tokenizers drop a leading space (" Paris")."""

    before = last(tokenizer, before, MAX_CONTEXT)
    return decode_after(tokenizer, tokens, before, decoded(tokenizer, before, special) if before else "", special)


def decode_after(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], before: Sequence[int], known: str, special: bool = False
) -> str:
    """Return the text of tokens that follow the tokens `before`, whose text is `known`."""
    whole = decoded(tokenizer, [*before, *tokens], special)
    while not whole.startswith(known):  # it ended inside a character
        known = known[:-1]
    return whole[len(known) :]


class Detokenizer:
    """Turns tokens into pieces of text, which concatenate to `decode` of all tokens.

    A token may end inside a character, so text that ends in a replacement character is held back. Tokenizers with byte
    tokens ("<0xE4>") decode a run of them at once, so a run is held back until it ends.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self.tokenizer = tokenizer
        # Tokens since the last piece but one. That piece is decoded again, as a token's text depends on its left
        # context. The text of the first `_shown` tokens has been returned.
        self._window = list(last(tokenizer, before, MAX_CONTEXT))
        self._shown = len(self._window)
        self._special = set(tokenizer.all_special_ids)  # not in the text, so they end no run
        self._in_run = False

    def push(self, token: int) -> str:
        """Return the text that this token completes; "" while later tokens may still change the text."""
        if token in self._special:
            return ""
        self._window.append(token)
        name = self.tokenizer.convert_ids_to_tokens(token)
        # "<0xE4>": the next token may be another byte of the same character.
        self._in_run = isinstance(name, str) and len(name) == 6 and name.startswith("<0x")
        piece = self._held()
        # What is held is decoded again for every token, so a text without an end to wait for is shown in parts.
        held = len(self._window) - self._shown
        broken = piece.endswith("\ufffd")
        if (held < _MAX_HELD and (not piece or self._in_run)) or (held < _MAX_HELD + 4 and broken):
            return ""
        # This piece's tokens become the left context of the next piece.
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return piece

    def finish(self) -> str:
        piece = self._held()
        self._window, self._shown = [], 0
        return piece

    def _held(self) -> str:
        return decode(self.tokenizer, self._window[self._shown :], self._window[: self._shown])


class TextStream:
    """Prints a completion while it is generated: pass this object to `generate` as `on_step`, then call `finish`.

    On a terminal control characters are shown as escapes.

    Args:
        lead: text to print before the first token.
        show_drafts: print accepted draft tokens in green, or without colours in [[brackets]].
        before: tokens before the completion, see `decode`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, lead: str = "", show_drafts: bool = False, before: Sequence[int] = ()
    ):
        self.detokenizer = Detokenizer(tokenizer, before)
        self.lead, self.marks = lead, ("", "")
        if show_drafts:
            self.marks = (GREEN, PLAIN) if colours(sys.stdout) else ("[[", "]]")

    def __call__(self, row: int, tokens: Sequence[int], accepted: int) -> None:
        """Print a step's new tokens, the first `accepted` of which come from the draft."""
        lead, self.lead = self.lead, ""
        pieces = [safe(self.detokenizer.push(token)) for token in tokens]
        draft, sampled = "".join(pieces[:accepted]), "".join(pieces[accepted:])
        before, after = self.marks if draft else ("", "")
        print(f"{safe(lead)}{before}{draft}{after}{sampled}", end="", flush=True)

    def finish(self) -> None:
        """Print text that was held back for later tokens, and end the line."""
        show(self.detokenizer.finish())
