"""Rows of prompts, chats as the target's template writes them, and their tokens."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.errors import UserError, check_text, first_line
from speculator.lines import json_rows

_TEMPLATE_SECONDS = 3.0  # of this thread's own time; a template takes a millisecond
_TEMPLATE_BYTES = 512 << 20
_MOST_CHARACTERS = 4_000_000


class RefusedError(UserError):
    """A chat template that does not take these messages; others it may."""


def read_rows(file: Path) -> list[dict]:
    """The rows of a .jsonl file, each with a "prompt" or "messages", and perhaps "tools".

    Raises:
        UserError: the file can't be read, a line is no such row, or there is none.
    """
    rows = []
    for number, row, fault in json_rows(file):
        if fault:
            raise UserError(f"{file}:{number}: {fault}")
        if not isinstance(row, dict) or (prompt_of(row) is None and not _are_messages(row.get("messages"))):
            raise UserError(f'{file}:{number}: a row needs "prompt" (text) or "messages" (a list of objects)')
        rows.append(row)
    if not rows:
        raise UserError(f"--prompts {file}: no rows in it")
    return rows


def prompt_of(row: dict) -> str | None:
    """The row's text to continue; None for a row of messages."""
    return row["prompt"] if isinstance(row.get("prompt"), str) else None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def encode(tokenizer: PreTrainedTokenizerBase, row: dict, chat: bool) -> list[int]:
    """The row's tokens: of its text, or with `chat` of that as a user's message, or of its messages and `tools`.

    Special tokens that a prompt or a message spells are special, as they are to transformers and to servers: what is
    asked may be a template written by hand.

    Raises:
        UserError: a prompt that is no text, or the chat template refuses the messages.
    """
    prompt = prompt_of(row)
    if prompt is not None:
        check_text(f"prompt {prompt[:20]!r}", prompt)
    if prompt is not None and not chat:
        return tokenizer(prompt, verbose=False)["input_ids"]
    messages = row["messages"] if prompt is None else [{"role": "user", "content": prompt}]
    for message in messages:
        if isinstance(message.get("content"), str):
            check_text(f"message {message['content'][:20]!r}", message["content"])
    return chat_tokens(chat_text(tokenizer, messages, row.get("tools"), ask=True), tokenizer)


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict], tools: Any = None, ask: bool = False) -> str:
    """A chat as the tokenizer's template writes it; with `ask`, up to where the model goes on.

    Raises:
        RefusedError: the template does not take the messages.
        UserError: it does not end, or takes more memory than there is for it.
    """
    try:
        with _bounded():
            text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask)
    except (_TooLongError, MemoryError) as error:
        what = "does not end" if isinstance(error, _TooLongError) else "takes too much memory"
        raise UserError(f"the chat template of {tokenizer.name_or_path} {what}") from None
    except Exception as error:  # a template is a program of its own: it may raise anything
        raise RefusedError(f"the chat template refuses the messages: {first_line(error)}") from None
    if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
        raise RefusedError(f"the chat template writes no text, or more than {_MOST_CHARACTERS:,} characters")
    return text


def chat_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of what a chat template wrote, and nothing in front: it writes BOS itself where there is one."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class _TooLongError(Exception):
    pass


@contextmanager
def _bounded() -> Iterator[None]:
    """End what takes too long, by a signal, or too much memory, by the process's limit, where a system has these.

    Signals come to the main thread alone.
    """
    with _bounded_memory():
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
            yield
            return
        started = time.thread_time()

        def look(*_: object) -> None:
            if time.thread_time() - started > _TEMPLATE_SECONDS:
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
        import resource
    except ImportError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):  # no /proc, or less is left than that
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _TEMPLATE_BYTES
        if soft == resource.RLIM_INFINITY or most < soft:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
