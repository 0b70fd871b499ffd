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
"""Date that templates write into training data, prompts and evaluation suites, so that a resumed run renders the same
text. Llama 3's templates use it if they have no clock."""


class RefusedError(UserError):
    """A chat template that rejects messages."""


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    tools: Any = None,
    ask: bool = False,
    today: datetime | None = None,
) -> str:
    """Render a chat with the tokenizer's template.

    Args:
        messages, tools: in OpenAI's format. Tool-call arguments that are JSON text become objects, as templates need.
        ask: end with the start of the assistant's next turn.
        today: date for the template; None: now.
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
        raise RefusedError(f"the chat template rejects the messages: {first_line(error)}") from None
    assert isinstance(text, str)
    return text


def content_text(content: Any) -> Any:
    """Join the parts of a message's content, if it is a list of parts in OpenAI's format.

    Raises:
        UserError: a part is not text.
    """
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"a part of type {kind!r:.40} in its content; only text is supported")
    return "".join(part["text"] for part in content)


def _with_objects(message: dict) -> dict:
    """Parse the arguments of a message's tool calls; text that is not a JSON object stays."""
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
    """Return a macro that replaces `strftime_now`, because transformers accepts no other clock."""
    directives = "aAbBcCdDeFfgGhHIjklmMpPrRsSTuUVwWxXyYzZ"
    written = [(f"%{letter}", today.strftime(f"%{letter}")) for letter in directives]
    written += [(f"%-{name[1]}", text.lstrip("0") or "0") for name, text in written]  # glibc: no leading zeros
    replaced = "".join(f" | replace('{name}', '{text}')" for name, text in written)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n"


def set_template_variables(tokenizer: PreTrainedTokenizerBase | None, variables: dict[str, Any] | None) -> None:
    """Set variables of the chat template for all chats: vLLM's `chat_template_kwargs`, such as `enable_thinking`."""
    if not variables:
        return
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError("chat_template_kwargs: the target has no chat template")
    wrong = [name for name in variables if not name.isidentifier()]
    if wrong:
        raise UserError(f"chat_template_kwargs: {wrong[0]!r:.40} is not the name of a variable")
    first = "".join(f"{{% set {name} = {value!r} %}}" for name, value in variables.items())
    template = tokenizer.chat_template
    several = isinstance(template, dict)
    tokenizer.chat_template = {name: first + each for name, each in template.items()} if several else first + template


def chat_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize rendered text without adding BOS, which the template writes itself."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
