"""Rows of prompts, and their tokens."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from speculator.errors import UserError, check_text
from speculator.files import parse_json


def read_rows(file: Path) -> list[dict]:
    """The rows of a .jsonl file, each with a "prompt" or "messages".

    Raises:
        UserError: the file can't be read, a line is no such row, or there is none.
    """
    try:
        content = file.read_bytes()
        lines = (gzip.decompress(content) if file.suffix == ".gz" else content).decode().split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {file}: {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            row = parse_json(line, f"{file}:{number}")
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
    """The row's tokens: of its text, or with `chat` of that as a user's message, or of its messages.

    Raises:
        UserError: a prompt that is no text, or the chat template refuses the messages.
    """
    prompt = prompt_of(row)
    if prompt is not None:
        check_text(f"prompt {prompt[:20]!r}", prompt)
    if prompt is not None and not chat:
        return tokenizer(prompt)["input_ids"]
    messages = row["messages"] if prompt is None else [{"role": "user", "content": prompt}]
    for message in messages:
        if isinstance(message.get("content"), str):
            check_text(f"message {message['content'][:20]!r}", message["content"])
    try:
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return encoded["input_ids"]
    except (TemplateError, TypeError) as error:
        raise UserError(f"the target's chat template refuses the messages: {error}") from None
