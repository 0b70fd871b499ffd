"""Fields of the requests: supported, ignored, or accepted at their neutral value only."""

from __future__ import annotations

import secrets
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from speculator.chat import check_template_variables, clean_message, clean_tools, content_text
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError
from speculator.prompts import Prompt
from speculator.server.errors import APIError

# Unsupported fields with the values that change nothing; any other value is an error.
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
_DEFAULT_TOKENS = 16  # OpenAI's default for completions; a chat without a limit runs to the end of the context
# Fields about the caller, which do not affect the text.
_IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """Fields of both kinds of completion."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, lt=1)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    store: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _checked(cls, stop: Any) -> Any:
        texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
        if (
            not isinstance(texts, list)
            or len(texts) > 16
            or not all(isinstance(s, str) and 0 < len(s) < 257 for s in texts)
        ):
            raise ValueError("must be a text of 1 to 256 characters, or a list of up to 16 of them")
        return stop

    @property
    def choices(self) -> int:
        """Number of answers per prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def max_new_tokens(self) -> int | None:
        """Limit of an answer; None: to the end of the context."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens reported at each position; None without log-probabilities."""
        raise NotImplementedError

    def samplings(self, count: int) -> list[Sampling]:
        """Return the sampling settings of `count` answers: answer i uses seed + i; without a seed, a random one + i."""
        # Below 2^62, so that seed + n stays within 64 bits.
        first = secrets.randbits(62) if self.seed is None else self.seed
        temperature = 1.0 if self.temperature is None else self.temperature
        settings = temperature, max(self.top_k or 0, 0), self.top_p or 1.0, self.min_p or 0.0
        return [Sampling(*settings, seed=first + number) for number in range(count)]

    def check(self) -> None:
        """Raise an APIError for fields that are unknown or not supported."""
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED or value is None:
                continue
            if name not in _NEUTRAL:
                raise APIError(f"{name}: unknown field", name)
            if value not in _NEUTRAL[name]:
                raise APIError(f"{name} is not supported: leave it out", name)
        if self.stream_options is not None and not self.stream:
            raise APIError("stream_options needs stream: true", "stream_options")
        if self.max_new_tokens is not None and (self.min_tokens or 0) > self.max_new_tokens:
            raise APIError(f"min_tokens must be at most max_tokens, which is {self.max_new_tokens}", "min_tokens")


class CompletionRequest(GenerationRequest):
    """Fields of `POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens or _DEFAULT_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or lists of token ids."""
        given = self.prompt
        # A list of integers is one prompt; a list of lists or of texts is several.
        single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if single else list(given)  # type: ignore[list-item, arg-type]


class Message(BaseModel):
    """A message of a chat; further fields, such as tool_calls, go to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        try:
            return content_text(content)
        except UserError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":  # an assistant may have called tools instead
            raise ValueError("content is missing")
        return self


class ChatRequest(GenerationRequest):
    """Fields of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise APIError("top_logprobs needs logprobs: true", "top_logprobs")
        try:
            check_template_variables(self.chat_template_kwargs or {})
        except UserError as error:
            raise APIError(str(error), "chat_template_kwargs") from None

    @property
    def parses_calls(self) -> bool:
        """Tool calls in the answer become `tool_calls`."""
        return bool(self.tools) and self.tool_choice != "none"

    def prompt(self) -> Prompt:
        messages = [clean_message(message.model_dump(exclude_unset=True)) for message in self.messages]
        variables = self.chat_template_kwargs
        return Prompt(messages, chat=True, tools=clean_tools(self.tools), where="messages", variables=variables)


class LoadRequest(_Strict):
    """Fields of `POST /v1/speculator/load`."""

    path: str


AnyRequest = TypeVar("AnyRequest", bound=BaseModel)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Parse and check a JSON body; the first mistake becomes an APIError."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        param = str(first["loc"][0]) if first["loc"] else None
        raise APIError(f"{where}: {first['msg'].removeprefix('Value error, ')}", param) from None
    if isinstance(request, GenerationRequest):
        request.check()
    return request
