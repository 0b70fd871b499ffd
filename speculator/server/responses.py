"""Responses in OpenAI's format, whole and as events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.chat import (
    THINK_END,
    Function,
    answer_message,
    has_channels,
    split_thought,
    thoughts_of,
)
from speculator.decoding.logprobs import TokenLogprobs
from speculator.decoding.streaming import Detokenizer, decode
from speculator.server.answer import AnswerText, ChannelText
from speculator.server.schema import ChatRequest, GenerationRequest, StreamOptions
from speculator.server.worker import StepOutput

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


Fields = dict[str, Any]
"""Fields of an object of OpenAI's API: of a response or an event, a choice, a message, or log-probabilities."""


class CompletionWriter:
    """Response to `POST /v1/completions`.

    Args:
        prompts: token ids; `request.choices` answers follow each other for every prompt.
        continues: whether answers continue the text of their prompts; see `PromptTarget.continues`.
    """

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[list[int]],
        continues: bool = True,
    ):
        self.request, self.tokenizer, self.prompts, self._continues = request, tokenizer, prompts, continues
        self._head: Fields = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        count = len(prompts) * request.choices
        self.answers = [AnswerText(tokenizer, request.stops, self._tokens_before(index)) for index in range(count)]
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        self._finish_reasons: list[str | None] = [None] * count
        self._shown: list[list[int]] = [[] for _ in range(count)]  # the tokens without the one that ends the answer
        self._offsets = [0] * count
        self._readers: dict[int, Detokenizer] = {}  # by answer, for the offsets
        # Answers are numbered prompt by prompt: with n = 2, answer 3 belongs to prompt 3 // 2 = 1.
        # A token is decoded after this letter, because tokenizers drop the space of a text's first token.
        self._letter = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._texts: dict[int, str] = {}  # of single tokens
        options = request.stream_options or StreamOptions()
        self._stream_usage = options.include_usage
        self._continuous_usage = options.include_usage and options.continuous_usage_stats

    @property
    def done(self) -> bool:
        return all(self._finish_reasons)

    def add(self, output: StepOutput) -> str:
        """Add a step's tokens to its answer and return the answer's new text, which may lag behind the tokens."""
        index = output.index
        # The token that ends an answer is not part of its text, not even one that is not marked as special.
        shown = output.tokens[:-1] if output.finish_reason == "eos" else output.tokens
        text = self.answers[index].push(shown, output.finish_reason)
        self._tokens[index] += output.tokens
        self._shown[index] += shown
        if not self.request.stream:  # an event has them already
            self._logprobs[index] += output.logprobs
        self._finish_reasons[index] = _FINISH_REASONS.get(output.finish_reason or "")
        return text

    def body(self) -> Fields:
        """Return the whole response, once every answer has ended."""
        columns = enumerate(zip(self._tokens, self._logprobs, strict=True))
        choices = [self._choice(index, self.message(index), tokens, logprobs) for index, (tokens, logprobs) in columns]
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage(), **self._prompt_ids()}

    def opening(self) -> list[str]:
        """Return the events, lines of server-sent events, to send with the first token, before its own."""
        return []

    def event(self, output: StepOutput) -> str:
        """Add a step's tokens and return the event with the new text; "" if there is nothing to send yet."""
        text, index = self.add(output), output.index
        has_tokens = self.request.return_token_ids or self.request.num_logprobs is not None
        if not (text or has_tokens or self._finish_reasons[index]):
            return ""
        return self.choice_event(self._choice(index, self.delta(index, text), output.tokens, output.logprobs), {})

    def closing(self) -> list[str]:
        """Return the events after the last token."""
        usage = [self._event({"choices": [], "usage": self.usage()})] if self._stream_usage else []
        return [*usage, "data: [DONE]\n\n"]

    def usage(self) -> Fields:
        """Return the numbers of tokens so far, over all prompts and answers."""
        prompt, new = sum(map(len, self.prompts)), sum(map(len, self._tokens))
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    # ---- parts that the two kinds of completion write differently

    def message(self, index: int) -> Fields:
        """Return the field of a choice that holds a finished answer, given the answer's number."""
        return {"text": self.answers[index].text}

    def delta(self, index: int, text: str) -> Fields:
        """Return the field of a streamed choice that holds an answer's new text."""
        return {"text": text}

    def _tokens_before(self, index: int) -> list[int]:
        return self.prompts[index // self.request.choices] if self._continues else []

    def _prompt_ids(self) -> Fields:
        """Return the field with the prompt's token ids; {} for completions, whose choices hold it."""
        return {}

    def _logprobs_of(self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Fields:
        """Return the field `logprobs` for consecutive tokens of an answer; called once for each token, in order."""
        texts = [self._token_text(token) for token in tokens]
        if index not in self._readers:
            self._readers[index] = Detokenizer(self.tokenizer, self._tokens_before(index))
        offsets, reader = [], self._readers[index]
        # Where each token's text begins in the answer, in characters: "a", " cat" are at 0 and 1. The tokens of one
        # character begin where it does.
        for token, text in zip(tokens, texts, strict=True):
            begin, piece = self._offsets[index], reader.push(token)
            self._offsets[index] += len(piece)
            offsets.append(self._offsets[index] - len(text) if piece.endswith(text) else begin)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": [
                # Reversed: of several tokens with the same text, the most likely one stays. The token itself is there.
                {text: _finite(each.logprob)}
                | {self._token_text(token): _finite(value) for token, value in reversed(each.top)}
                for text, each in zip(texts, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _choice(self, index: int, text: Fields, tokens: list[int], logprobs: list[TokenLogprobs]) -> Fields:
        """Return a choice with its `text` from `message` or `delta`, and the tokens of the whole answer or a step."""
        reported = None if self.request.num_logprobs is None else self._logprobs_of(index, tokens, logprobs)
        choice: Fields = {
            "index": index,
            **text,
            "logprobs": reported,
            "finish_reason": self._finish_reasons[index],
        }
        if self.request.return_token_ids:
            choice |= {"token_ids": tokens}
            # In the whole answer, or in the first event of a stream.
            if self.object == "text_completion" and len(tokens) == len(self._tokens[index]):
                choice["prompt_token_ids"] = self.prompts[index // self.request.choices]
        return choice

    def choice_event(self, choice: Fields, more: Fields) -> str:
        """Return the event with one choice, the usage if the client asked for it, and `more` fields of the event."""
        usage: Fields = {"usage": self.usage() if self._continuous_usage else None} if self._stream_usage else {}
        return self._event({"choices": [choice], **usage, **more})

    def _event(self, content: Fields) -> str:
        return f"data: {json.dumps({**self._head, 'object': self.chunk_object, **content})}\n\n"

    def _token_text(self, token: int) -> str:
        """Return the text of a single token with its leading space, which some tokenizers drop at a text's start."""
        if token not in self._texts:
            self._texts[token] = decode(self.tokenizer, [token], self._letter, special=True)
        return self._texts[token]


class ChatWriter(CompletionWriter):
    """Response to `POST /v1/chat/completions`."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    request: ChatRequest

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._channels = [ChannelText(self.tokenizer) for _ in self.answers] if has_channels(self.tokenizer) else []
        self._sent = [{"reasoning": 0, "content": 0} for _ in self.answers]  # characters

    def add(self, output: StepOutput) -> str:
        index, before = output.index, len(self._shown[output.index])
        text = super().add(output)
        if self._channels:
            self._channels[index].push(self._shown[index][before:], output.finish_reason is not None)
        return text

    def message(self, index: int) -> Fields:
        return {"message": {"role": "assistant", **self._parsed(index)}}

    def delta(self, index: int, text: str) -> Fields:
        """Return `delta`: the new text; with tools, all of it at the end; in channels, new thought and content."""
        if not (self.request.parses_calls or self._channels):
            return {"delta": {"content": text} if text else {}}
        ended = self._finish_reasons[index] is not None
        if self.request.parses_calls and not ended:  # what is a call is known at the end
            return {"delta": {}}
        parsed = self._parsed(index) if ended else self._of_channels(index)
        for number, call in enumerate(parsed.get("tool_calls", ())):
            call["index"] = number
        for name, sent in self._sent[index].items() if self._channels else ():
            whole = parsed.pop(name, None) or ""
            self._sent[index][name] = max(sent, len(whole))
            if new := whole[sent:]:
                parsed[name] = new
        return {"delta": parsed}

    def _of_channels(self, index: int) -> Fields:
        return self._channels[index].before(len(self.answers[index].held))

    def _parsed(self, index: int) -> Fields:
        """Return content, reasoning and tool calls of a finished answer; no calls of one that a stop string ended.

        If there are tool calls, the answer's finish reason "stop" becomes "tool_calls".
        """
        answer, calls = self.answers[index], []
        thought, content = self._split(answer.text)
        if not answer.stopped:
            prompt, tools = self.prompts[index // self.request.choices], self.request.tools
            message = answer_message(self.tokenizer, prompt, self._shown[index], tools)
            # One call only where the client asks for that, as in vLLM.
            calls = (message.get("tool_calls") or [])[: 1 if self.request.parallel_tool_calls is False else None]
            if calls and not self.request.parses_calls:
                calls = []
            elif found := thoughts_of(message):
                thought, content = found, message["content"] or ""
            else:
                thought, content = self._split(message["content"] or "")
        if self._channels and (found_texts := self._of_channels(index)):
            thought, content = found_texts["reasoning"], found_texts["content"] or ""
        parsed: Fields = {"content": content or (None if calls else "")}
        if thought:
            parsed["reasoning"] = thought
        if calls:
            parsed["tool_calls"] = [_call(call["function"]) for call in calls]
            if self._finish_reasons[index] == "stop":
                self._finish_reasons[index] = "tool_calls"
        return parsed

    def _split(self, text: str) -> tuple[str, str]:
        """Return the thought of an answer, if the chat template knows its mark, and the text after it."""
        return split_thought(text) if THINK_END in str(self.tokenizer.chat_template) else ("", text)

    def opening(self) -> list[str]:
        first: Fields = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        choices: list[Fields] = [{"index": index, **first} for index in range(len(self.answers))]
        return [self.choice_event(choice, self._prompt_ids()) for choice in choices]

    def _tokens_before(self, index: int) -> list[int]:
        return []  # an answer starts a new text

    def _prompt_ids(self) -> Fields:
        return {"prompt_token_ids": self.prompts[0]} if self.request.return_token_ids else {}

    def _logprobs_of(self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Fields:
        def entry(token: int, value: float) -> Fields:
            text = self._token_text(token)
            partial = "\ufffd" in text  # a part of a character: its bytes are not known
            return {"token": text, "logprob": _finite(value), "bytes": None if partial else list(text.encode())}

        content: list[Fields] = [
            {**entry(token, each.logprob), "top_logprobs": [entry(*pair) for pair in each.top]}
            for token, each in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content}


def _call(function: Function) -> Fields:
    """Return a call in OpenAI's format, with a new id and its arguments as JSON text."""
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    called: Function = {"name": function["name"], "arguments": text}
    # Mistral's templates take no other ids than nine letters and digits.
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": called}


def _finite(value: float) -> float:
    return max(value, _LOWEST_LOGPROB)
