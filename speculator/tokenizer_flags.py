"""Flags of the commands that render text as a target reads it: whose tokenizer, and variables of its chat template."""

from __future__ import annotations

import argparse
import json
from typing import Any

from speculator.errors import OneLineParser


def add_tokenizer_flags(parser: OneLineParser) -> None:
    """Add the flags that decide, with the target's name, how its tokenizer renders."""
    parser.add_argument("--revision", help="hub branch, tag or commit of the target")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the target")
    what = "JSON object of variables for the chat template, such as '{\"enable_thinking\": false}'"
    parser.add_argument("--chat_template_kwargs", type=_object, metavar="JSON", help=what)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a JSON object")
    return value
