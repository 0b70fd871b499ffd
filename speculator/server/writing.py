"""Answers as OpenAI's interface writes them, whole and in chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.decoding.request import Scores
from speculator.decoding.streaming import decode
from speculator.server.answer import Answer
from speculator.server.schema import Fields
from speculator.server.worker import News

_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
_LEAST = -9999.0  # JSON has no infinity


class Writer:
    """What one call is answered with.

    Args:
        fields: of the call.
        model: its name.
        tokenizer: of the target.
        prompts: token ids; each has `fields.choices` answers, one after the other.
    """

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, fields: Fields, model: str, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]):
        self.fields, self.tokenizer, self.prompts = fields, tokenizer, prompts
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        count = len(prompts) * fields.choices
        self.answers = [Answer(tokenizer, fields.stops, self._before(at)) for at in range(count)]
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._scores: list[list[Scores]] = [[] for _ in range(count)]
        self._reasons: list[str | None] = [None] * count
        self._offsets = [0] * count
        self._letter = tokenizer("a", add_special_tokens=False)["input_ids"]

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return all(self._reasons)

    def take(self, news: News) -> str:
        """Take in what a step gave; returns the text that it settled."""
        at = news.index
        piece = self.answers[at].push(news.tokens, news.finish_reason is not None)
        self._tokens[at] += news.tokens
        self._scores[at] += news.scores
        self._reasons[at] = "stop" if self.answers[at].stopped else _REASONS.get(news.finish_reason or "")
        return piece

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        columns = enumerate(zip(self.answers, self._tokens, self._scores, strict=True))
        choices = [self._choice(at, self.message(own.text), tokens, scores) for at, (own, tokens, scores) in columns]
        return {**self._head, "object": self.whole, "choices": choices, "usage": self.usage(), **self._echo()}

    def opening(self) -> list[str]:
        """Events before the first token."""
        return []

    def event(self, news: News) -> str:
        """What a step gave as an event; empty where it settled nothing to send."""
        piece, at = self.take(news), news.index
        telling = self.fields.return_token_ids or self.fields.alternatives is not None
        if not (piece or telling or self._reasons[at]):
            return ""
        return self.events(self._choice(at, self.delta(piece), news.tokens, news.scores))

    def closing(self) -> list[str]:
        """Events behind the last token."""
        usage = [] if not self._usage_wanted else [self._event({"choices": [], "usage": self.usage()})]
        return [*usage, "data: [DONE]\n\n"]

    def usage(self) -> dict[str, int]:
        read, new = sum(map(len, self.prompts)), sum(map(len, self._tokens))
        return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}

    # What the two kinds of completion have of their own.

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _before(self, at: int) -> list[int]:
        return self.prompts[at // self.fields.choices]

    def _echo(self) -> dict[str, Any]:
        return {}

    def _prompt(self, at: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[at // self.fields.choices]}

    def _logprobs(self, at: int, tokens: Sequence[int], scores: Sequence[Scores]) -> dict[str, Any]:
        names = [self._name(token) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(self._offsets[at])
            self._offsets[at] += len(name)
        return {
            "tokens": names,
            "token_logprobs": [_finite(score.logprob) for score in scores],
            "top_logprobs": [
                {self._name(token): _finite(value) for token, value in reversed(score.top)}  # of one name the likeliest
                for score in scores
            ],
            "text_offset": offsets,
        }

    @property
    def _usage_wanted(self) -> bool:
        return self.fields.stream_options is not None and self.fields.stream_options.include_usage

    def _choice(self, at: int, text: dict[str, Any], tokens: list[int], scores: list[Scores]) -> dict[str, Any]:
        logprobs = None if self.fields.alternatives is None else self._logprobs(at, tokens, scores)
        choice = {"index": at, **text, "logprobs": logprobs, "finish_reason": self._reasons[at]}
        if self.fields.return_token_ids:
            choice |= {"token_ids": tokens}
            if len(tokens) == len(self._tokens[at]):  # all that there is so far
                choice |= self._prompt(at)
        return choice

    def events(self, choice: dict[str, Any], **more: Any) -> str:
        return self._event({"choices": [choice], **({"usage": None} if self._usage_wanted else {}), **more})

    def _event(self, content: dict[str, Any]) -> str:
        return f"data: {json.dumps({**self._head, 'object': self.chunk, **content})}\n\n"

    def _name(self, token: int) -> str:
        """A token's text inside a text: behind a letter, as at the start it may lose its space."""
        return decode(self.tokenizer, [token], self._letter, special=True)


class ChatWriter(Writer):
    """The same for a chat."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def opening(self) -> list[str]:
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self.events({"index": at, **first}) for at in range(len(self.answers))]

    def _before(self, at: int) -> list[int]:
        return []  # an answer begins a text

    def _echo(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[0]} if self.fields.return_token_ids else {}

    def _prompt(self, at: int) -> dict[str, Any]:
        return {}

    def events(self, choice: dict[str, Any], **more: Any) -> str:
        return super().events(choice, **(self._echo() if "role" in choice["delta"] else {}), **more)

    def _logprobs(self, at: int, tokens: Sequence[int], scores: Sequence[Scores]) -> dict[str, Any]:
        def one(token: int, value: float) -> dict[str, Any]:
            name = self._name(token)
            part = "\ufffd" in name  # of a character: which bytes it is the tokenizer does not say
            return {"token": name, "logprob": _finite(value), "bytes": None if part else list(name.encode())}

        pairs = zip(tokens, scores, strict=True)
        content = [
            {**one(token, score.logprob), "top_logprobs": [one(*pair) for pair in score.top]} for token, score in pairs
        ]
        return {"content": content}


def _finite(value: float) -> float:
    return max(value, _LEAST)
