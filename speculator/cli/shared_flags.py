"""Flags that several commands share. Parsers import nothing heavy: a mistyped flag shows at once."""

from __future__ import annotations

import argparse
import json
from typing import Any

from speculator.errors import OneLineParser, as_text
from speculator.files import JsonObject

RULES = ("match", "rejection", "block", "multi_candidate")
"""Names of the accept rules, see `speculator.decoding.verify.RULES`."""
MANY: dict[str, Any] = {"action": "extend", "nargs": "+"}
"""Settings of a flag that takes several values, and may be repeated."""


def add_target_flags(parser: OneLineParser) -> None:
    """Add the flags of the target."""
    parser.add_argument("--target", required=True, help="hub id, folder or GGUF file of a causal LM")
    add_tokenizer_flags(parser)
    parser.add_argument("--adapter", help="hub id or folder of a PEFT adapter of the target; needs the package peft")
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        default="auto",
        help="dtype of the target (default: auto, as stored; float32 on a CPU, and bfloat16 for a GGUF file on a GPU)",
    )


def add_tokenizer_flags(parser: OneLineParser) -> None:
    """Add the flags that decide, with the target's name, how its tokenizer renders text."""
    parser.add_argument("--revision", help="hub branch, tag or commit of the target")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the target")
    what = "JSON object of variables for the chat template, such as '{\"enable_thinking\": false}'"
    parser.add_argument("--chat_template_kwargs", type=_object, metavar="JSON", help=what)


def _object(text: str) -> JsonObject:
    """Parse a JSON object: the type of a flag."""
    try:
        value = json.loads(as_text(text))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a JSON object")
    return value


def add_drafter_flags(parser: OneLineParser) -> None:
    """Add the flags of drafter, shape and rule."""
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--speculator", help="hub id or folder of a trained head (default: plain decoding)")
    who.add_argument(
        "--draft_model",
        help="hub id or folder of a small causal LM with the target's tokenizer; --trust_remote_code counts for it too",
    )
    who.add_argument(
        "--ngram",
        action="store_true",
        help="draft by n-gram lookup in the text so far alone; a head that drafts adaptively uses lookup too",
    )
    add_revision(parser)
    parser.add_argument("--rule", choices=RULES, help="accept rule (default: the first that fits the draft)")
    parser.add_argument(
        "--num_speculative_tokens",
        type=int,
        help="tokens per draft (default: a head drafts adaptively, other drafters draft 4)",
    )
    parser.add_argument(
        "--branches", type=_numbers, metavar="4,2,1", help="number of children of a drafted token, level by level"
    )
    parser.add_argument("--nodes", type=int, help="draft a tree of the N likeliest tokens among --branches")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the flags that filter what is sampled above temperature 0."""
    parser.add_argument("--top_k", type=int, default=0, help="sample from the K most likely tokens (default: all)")
    what = "sample from the most likely tokens of this total probability (default: 1)"
    parser.add_argument("--top_p", type=float, default=1.0, help=what)
    what = "sample from tokens at least this likely relative to the most likely (default: 0)"
    parser.add_argument("--min_p", type=float, default=0.0, help=what)


def add_revision(parser: argparse.ArgumentParser | argparse._ArgumentGroup, head: str = "the head") -> None:
    """Add the flag `--speculator_revision`; its help names the head as `head`."""
    parser.add_argument("--speculator_revision", metavar="REVISION", help=f"hub branch, tag or commit of {head}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between, as 4,2,1") from None
