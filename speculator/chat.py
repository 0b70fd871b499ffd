"""Chats as a tokenizer's template writes them; a template is a program, so its time and memory are bounded."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.errors import UserError, first_line

_SECONDS = 3.0  # of this thread's own time; a template takes a millisecond
_BYTES = 512 << 20
_MOST_CHARACTERS = 4_000_000
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
    """`render` within bounds.

    Raises:
        RefusedError: as `render`.
        UserError: the template does not end, or takes more memory than there is for it.
    """
    with bounded(f"the chat template of {tokenizer.name_or_path}"):
        return render(tokenizer, messages, tools, ask, today)


def render(
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
        MemoryError: it takes more than there is.
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
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        raise RefusedError(f"the chat template refuses the messages: {first_line(error)}") from None
    if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
        raise RefusedError(f"the chat template writes no text, or more than {_MOST_CHARACTERS:,} characters")
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


class _TooLongError(BaseException):
    """Not an Exception: nothing in between takes it for an error of its own."""


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Stop work that takes too long (by a signal, so in the main thread only) or too much memory (by `setrlimit`).

    On a system without one of them, that bound is not set.

    Raises:
        UserError: a bound was exceeded; the message begins with `what`.
    """
    try:
        with _bounded_memory(), _bounded_time():
            yield
    except _TooLongError:
        raise UserError(f"{what} does not end") from None
    except MemoryError:
        raise UserError(f"{what} takes too much memory") from None


@contextmanager
def _bounded_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    started = time.thread_time()

    def look(*_: object) -> None:
        if time.thread_time() - started > _SECONDS:
            raise _TooLongError

    handler = signal.signal(signal.SIGALRM, look)
    timer = signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    try:
        import resource  # not on every system
    except ImportError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):  # no /proc, or less is left than that
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _BYTES
        if soft == resource.RLIM_INFINITY or most < soft:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
