"""Render chats with a tokenizer's template, in the Jinja sandbox of transformers."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.errors import UserError, first_line

DATA_DAY = datetime(2024, 7, 26)
"""Today, to a template that writes the date into data, a run's prompts and suites: work that goes on another day is the
same work. The day that Llama 3's templates take where they have no clock."""


class RefusedError(UserError):
    """A chat template that does not take these messages; others it may."""


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: Any = None,
    ask: bool = False,
    today: datetime | None = None,
) -> str:
    """A chat as the tokenizer's template writes it.

    Args:
        messages, tools: as OpenAI's interface has them. Templates take the arguments of a tool's call as an object, so
            JSON text of one is read.
        ask: write it up to where the model goes on.
        today: for a template that writes the date; None: by the clock.

    Raises:
        RefusedError: the template does not take the messages.
    """
    try:
        template = tokenizer.get_chat_template(None, tools)
        if today is not None and "strftime_now" in template:
            template = _stopped_clock(today) + template
        text = tokenizer.apply_chat_template(
            [_with_objects(message) for message in messages],
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=ask,
        )
    except Exception as error:  # a template may raise anything
        raise RefusedError(f"the chat template refuses the messages: {first_line(error)}") from None
    assert isinstance(text, str)
    return text


def _with_objects(message: dict) -> dict:
    """A message whose calls of tools have objects as arguments; what is no JSON of one stays."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        arguments = json.loads(call["function"]["arguments"])
        if isinstance(arguments, dict):
            return {**call, "function": {**call["function"], "arguments": arguments}}
    return call


@cache
def _stopped_clock(today: datetime) -> str:
    """A macro in the place of the function by which templates write the date: transformers hands them none of ours."""
    directives = "aAbBcCdDeFfgGhHIjklmMpPrRsSTuUVwWxXyYzZ"
    written = [(f"%{letter}", today.strftime(f"%{letter}")) for letter in directives]
    written += [(f"%-{name[1]}", text.lstrip("0") or "0") for name, text in written]  # as glibc leaves out zeros
    replaced = "".join(f" | replace('{name}', '{text}')" for name, text in written)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n"  # which trim_blocks takes


def chat_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of what a chat template wrote, and nothing in front: it writes BOS itself where there is one."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
