"""The fields of a request: those that are served, those that change nothing, and those that are refused by name."""

from __future__ import annotations

import secrets
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculator.decoding.sampling import Sampling
from speculator.prompts import Prompt

# Taken at these values alone, which are those that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
}
# About the caller, not about the text.
_IDLE = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
MOST_CHOICES = 128
_MOST_STOPS, _LONGEST_STOP = 16, 256


class BadRequestError(Exception):
    """A request that is answered by an error.

    Args:
        message: what is wrong.
        param: the field.
        status, code: of the answer.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        """As OpenAI's interface has it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False


class Fields(BaseModel):
    """What both kinds of completion take."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, lt=1)
    max_tokens: int | None = Field(None, ge=1)
    return_token_ids: bool | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def alternatives(self) -> int | None:
        """The likeliest tokens to tell beside each; None without logprobs."""
        raise NotImplementedError

    def samplings(self, count: int) -> list[Sampling]:
        """One for each answer, which draws from the stream `seed` plus its number; without a seed from any."""
        first = secrets.randbits(62) if self.seed is None else self.seed
        temperature = 1.0 if self.temperature is None else self.temperature
        how = temperature, max(self.top_k or 0, 0), self.top_p or 1.0, self.min_p or 0.0
        return [Sampling(*how, seed=first + number) for number in range(count)]

    def check(self) -> None:
        """Refuse what is not supported.

        Raises:
            BadRequestError: a field is unknown, or has a value that changes what is not changed here.
        """
        for name, value in (self.model_extra or {}).items():
            if name in _IDLE or value is None:
                continue
            if name not in _NEUTRAL:
                raise BadRequestError(f"{name}: no such field here", name)
            if value not in _NEUTRAL[name]:
                raise BadRequestError(f"{name} is not supported here: leave it out", name)
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options: only with stream", "stream_options")
        if len(self.stops) > _MOST_STOPS or not all(0 < len(stop) <= _LONGEST_STOP for stop in self.stops):
            raise BadRequestError(
                f"stop: at most {_MOST_STOPS} strings of 1 to {_LONGEST_STOP} characters each", "stop"
            )


class CompletionFields(Fields):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more texts or lists of token ids."""
        given = self.prompt
        one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if one else list(given)  # type: ignore[list-item, arg-type]


class ChatFields(Fields):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none"] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs: only with logprobs", "top_logprobs")
        if self.tools and self.tool_choice != "none":
            raise BadRequestError(
                'tools: calls are not read out of an answer here; with tool_choice "none" the template shows the '
                "tools to the model, and its answer comes as text",
                "tools",
            )

    def asked(self) -> Prompt:
        """The chat: contents in parts become one text.

        Raises:
            BadRequestError: a message that is none, or a part that is no text.
        """
        messages = [{**message, **_content(number, message)} for number, message in enumerate(self.messages)]
        return Prompt(messages, chat=True, tools=self.tools, where="messages")


def _content(number: int, message: dict[str, Any]) -> dict[str, str]:
    if not isinstance(message.get("role"), str):
        raise BadRequestError(f"messages[{number}]: it has no role", "messages")
    content: Any = message.get("content")
    if content is None and message["role"] != "assistant":  # which may have called tools instead
        raise BadRequestError(f"messages[{number}]: it has no content", "messages")
    if content is None or isinstance(content, str):
        return {}
    texts = [_text(part) for part in content] if isinstance(content, list) else [None]
    if None in texts:
        raise BadRequestError(f"messages[{number}]: its content is neither text nor parts of type text", "messages")
    return {"content": "".join(map(str, texts))}


def _text(part: Any) -> str | None:
    is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    return part["text"] if is_text else None


AnyFields = TypeVar("AnyFields", bound=Fields)


def parse(kind: type[AnyFields], body: bytes) -> AnyFields:
    """The fields that a body has.

    Raises:
        BadRequestError: it is no JSON object of them.
    """
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        raise BadRequestError(f"{param or 'the body'}: {first['msg']}", param) from None
    fields.check()
    return fields
