"""Fields of the requests: supported, ignored, or accepted at their neutral value only."""

from __future__ import annotations

import gc
import secrets
from itertools import chain
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from speculator.chat import check_template_variables, clean_messages, clean_tools
from speculator.decoding.request import next_seed
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError
from speculator.prompts import Conversation
from speculator.server.errors import APIError

# Unsupported fields with the values that change nothing; any other value is an error.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
}
_DEFAULT_TOKENS = 16  # OpenAI's default for completions; a chat without a limit runs to the end of the context
# Fields about the caller, which do not affect the text.
_IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user")


class _Strict(BaseModel):
    """Base of objects that reject unknown fields and convert no types."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _known(self) -> _Strict:
        # Not extra="forbid", which collects an error for each of a million unknown fields.
        for name in self.model_extra or ():
            raise ValueError(f"{name:.40}: unknown field")
        return self


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding that hides the length of tokens; ours have none


class GenerationRequest(BaseModel):
    """Fields that requests for completions and for chat completions share. A field that is None has its default."""

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
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    store: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _checked(cls, stop: Any) -> Any:
        """Return `stop` as given; raise a ValueError unless it is at most 16 texts of 1 to 256 characters."""
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
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def max_new_tokens(self) -> int | None:
        """Most new tokens of an answer; None: as many as the context holds."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens reported at each position; None without log-probabilities."""
        raise NotImplementedError

    def samplings(self, count: int) -> list[Sampling]:
        """Return the sampling settings of `count` answers: answer i uses seed + i; the default seed is random."""
        first = secrets.randbits(62) if self.seed is None else self.seed
        temperature = 1.0 if self.temperature is None else self.temperature
        settings = temperature, max(self.top_k or 0, 0), self.top_p or 1.0, self.min_p or 0.0
        return [Sampling(*settings, seed=next_seed(first, number)) for number in range(count)]

    def check(self) -> None:
        """Raise an APIError for fields that are unknown, not supported or contradict each other."""
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED or value is None:
                continue
            if name not in _NEUTRAL:
                raise APIError(f"{name:.40}: unknown field", name[:40])
            if value not in _NEUTRAL[name]:
                raise APIError(f"{name} is not supported: leave it out", name)
        if self.stream_options is not None and not self.stream:
            raise APIError("stream_options needs stream: true", "stream_options")
        if self.max_new_tokens is not None and (self.min_tokens or 0) > self.max_new_tokens:
            raise APIError(f"min_tokens must be at most max_tokens, which is {self.max_new_tokens}", "min_tokens")


class CompletionRequest(GenerationRequest):
    """Fields of `POST /v1/completions`."""

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens or _DEFAULT_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, prompt: Any) -> list[str] | list[list[int]]:
        """Return the prompts as a list of texts or of token ids; raise a ValueError for anything else."""
        single = isinstance(prompt, str) or (isinstance(prompt, list) and set(map(type, prompt)) == {int})
        prompts = [prompt] if single else prompt
        kinds = set(map(type, prompts)) if isinstance(prompts, list) else set()
        if kinds != {str} and not (kinds == {list} and set(map(type, chain.from_iterable(prompts))) <= {int}):
            raise ValueError("must be a text, a list of token ids, a list of texts, or a list of lists of token ids")
        return prompts


class ChatRequest(GenerationRequest):
    """Fields of `POST /v1/chat/completions`."""

    messages: Any
    tools: Any = None
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("messages", "tools")
    @classmethod
    def _cleaned(cls, given: Any, field: ValidationInfo) -> Any:
        """Return messages or tools in the form that templates expect; raise a ValueError for malformed ones."""
        try:
            return clean_messages(given) if field.field_name == "messages" else clean_tools(given)
        except UserError as error:
            raise ValueError(str(error)) from None

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
        """Whether tool calls in the answer are parsed into the field `tool_calls`."""
        return bool(self.tools) and self.tool_choice != "none"

    def prompt(self) -> Conversation:
        """Return the messages, with the tools if the answer may call them, as a prompt."""
        tools = self.tools if self.parses_calls else None
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        variables = {**effort, **(self.chat_template_kwargs or {})} or None
        return Conversation(messages=self.messages, chat=True, tools=tools, where="messages", variables=variables)


class LoadRequest(_Strict):
    """Fields of `POST /v1/speculator/load`: `path` is the folder of a head."""

    path: str = Field(pattern="^[^\0]+$")


AnyRequest = TypeVar("AnyRequest", bound=BaseModel)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Return a JSON body as a checked request of this kind; raise an APIError for the first mistake."""
    # Else the collector would look at a long list again and again while it grows, and hold up all threads.
    gc.disable()
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        param = str(first["loc"][0]) if first["loc"] else None
        raise APIError(f"{where}: {first['msg'].removeprefix('Value error, ')}", param) from None
    finally:
        gc.enable()
    if isinstance(request, GenerationRequest):
        request.check()
    return request
