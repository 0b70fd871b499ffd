"""Text of an answer while its tokens arrive: whole characters only, cut before a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from speculator.decoding.streaming import Detokenizer


class AnswerText:
    """Text of one answer.

    Args:
        stops: stop strings, which are not part of the text. The engine finds them: it ends the request.
        before: token ids that the text continues, see `speculator.decoding.streaming.decode`.

    Attributes:
        stopped: True once a stop string has ended the answer.
        held: text that is kept back: it may begin a stop string, or begins with the one that ended the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], before: Sequence[int] = ()):
        self._detokenizer, self._stops = Detokenizer(tokenizer, before), stops
        self.text, self.held, self.stopped = "", "", False

    def push(self, tokens: Sequence[int], finish_reason: str | None) -> str:
        """Add token ids and return the new text; half a character or a stop string's start waits for a later call."""
        held, before_last = self.held, len(self.held)
        for token in tokens:
            before_last = len(held)
            held += self._detokenizer.push(token)
        if finish_reason:
            held += self._detokenizer.finish()
            end, self.stopped = len(held), finish_reason == "stop"
            if self.stopped:
                # The last token has completed a stop string. One that ends before it was among the first `min_tokens`
                # tokens. With 5 characters before the last token, a stop string of 3 may begin at 3.
                found = [held.find(stop, max(0, before_last - len(stop) + 1)) for stop in self._stops]
                end = min((start for start in found if start >= 0), default=end)
        else:
            # "..he" may be the start of the stop string "hello": it is kept back until more text decides.
            end = len(held) - max((_overlap(held, stop) for stop in self._stops), default=0)
        piece, self.held = held[:end], held[end:]
        self.text += piece
        return piece


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class ChannelText:
    """Thought and content of an answer in gpt-oss's channels, while its tokens arrive.

    An answer is "<|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>content".

    Attributes:
        texts: the thought ("reasoning") and the content so far, without calls; empty before the first message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._read = tokenizer, Detokenizer(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._header: list[int] | None = []  # tokens before a message; None in a message
        self._field = ""  # of the message: a key of `texts`, or "" for a call
        self.texts: dict[str, str] = {}

    def push(self, tokens: Sequence[int], ended: bool) -> None:
        """Add token ids; `ended` says that no more follow."""
        for token in tokens:
            mark = self._special.get(token, "")
            if mark == "<|message|>":
                self._end()
                name = self._tokenizer.decode(self._header or [])
                # "analysis", "final", or a call: "commentary to=functions.f" or " to=functions.f", "commentary"
                self._field = "" if "to=" in name else "reasoning" if "analysis" in name else "content"
                self._header, self._read = None, Detokenizer(self._tokenizer)
                self.texts = {"reasoning": "", "content": "", **self.texts}
            elif self._header is None and not mark:
                self._add(self._read.push(token))
            elif self._header is None or mark not in ("", "<|channel|>", "<|constrain|>"):
                self._end()
                self._header = []
            elif not mark:
                self._header.append(token)
        if ended:
            self._end()

    def before(self, held: int) -> dict[str, str]:
        """Return `texts` without the last `held` characters, in which a stop string may begin."""
        texts = dict(self.texts)
        if self._header is None and self._field:
            texts[self._field] = texts[self._field][: max(0, len(texts[self._field]) - held)]
        return texts

    def _add(self, text: str) -> None:
        if self._field:
            self.texts[self._field] += text

    def _end(self) -> None:
        if self._header is None:
            self._add(self._read.finish())
