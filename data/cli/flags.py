"""Flags of the commands of `speculator data`. Each function has a command's name and its description."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from speculator.cli.shared_flags import MANY, add_filters, add_revision, add_target_flags, add_tokenizer_flags
from speculator.errors import OneLineParser

ALL = sys.maxsize
"""Value of `--turns all`."""
MAX_BAD_ROWS = 0.05
NEW_TOKENS, THINKING_TOKENS = 256, 4096
"""Defaults of `--max_new_tokens`: for answers alone, and for thoughts and answers."""


def prepare(parser: OneLineParser) -> None:
    """Tokenize sources and pack them into rows.

    The output is a `datasets` folder with the splits train, validation and held-out. As a source of a training run
    (`--data.sources`) it keeps these splits.
    """
    parser.add_argument("--target", required=True, help="hub id or folder of the target; only the tokenizer is loaded")
    add_tokenizer_flags(parser)
    parser.add_argument(
        "--sources",
        required=True,
        **MANY,
        metavar="SOURCE",
        help="python-sources; a .jsonl, .json, .parquet, .txt, .md, .rst or .py file (also .gz) or a folder of them; a "
        "hub dataset: org/name, org/name/config, org/name:split; append a weight to mix sources by tokens: a.jsonl@0.7",
    )
    parser.add_argument("--seq_length", required=True, type=int, help="maximum number of tokens per row")
    parser.add_argument("--max_tokens", type=int, help="largest number of tokens per split (default: all)")
    parser.add_argument(
        "--num_proc",
        type=int,
        help="processes that tokenize; the rows do not depend on it (default: one per core, up to 8)",
    )
    add_raw(parser)
    add_max_bad_rows(parser)
    parser.add_argument("--output", required=True, type=Path, help="output folder, which must not exist")


def generate(parser: OneLineParser) -> None:
    """Let the target continue prompts, as training data for its draft head."""
    add_target_flags(parser)
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--speculator", help="hub id or folder of a trained draft head (default: plain decoding)")
    who.add_argument(
        "--server",
        **MANY,
        metavar="URL",
        help="OpenAI-compatible servers that share the rows; --adapter names a LoRA that they serve",
    )
    add_revision(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    what = (
        "prompts from python-sources, local files, folders or hub datasets, mixed by @weight; self: the target writes"
    )
    source.add_argument("--sources", **MANY, help=what)
    source.add_argument(
        "--prompts", type=Path, help='.jsonl file with rows {"prompt"}, {"messages"}, {"turns"} or {"question"}'
    )
    parser.add_argument("--output", type=Path, required=True, help="output folder; an unfinished one is resumed")
    parser.add_argument("--max_rows", type=int, help="largest number of prompts (default: all; 4000 for self)")
    text = parser.add_argument_group("--sources of text")
    add_raw(text)
    add_max_bad_rows(text)
    text.add_argument("--prompt_tokens", type=int, help="length of each prompt (default: 64)")
    what = "answers to write in a chat of --sources: all, or the first N (default: all; 1 for self)"
    parser.add_argument("--turns", type=_turns, metavar="all|N", help=what)
    own = parser.add_argument_group("--sources self")
    own.add_argument("--max_prompt_tokens", type=int, help="largest length of a user turn (default: 256)")
    parser.set_defaults(max_bad_rows=None)
    what = f"maximum new tokens per answer (default: {NEW_TOKENS}, {THINKING_TOKENS} if the target thinks first)"
    parser.add_argument("--max_new_tokens", type=int, help=what)
    what = (
        "sampling temperature; 0 decodes greedily; each of several values gets an equal share of the rows (default: 1)"
    )
    parser.add_argument("--temperature", type=float, **MANY, help=what)
    add_filters(parser)
    what = "rows decoded together (default: 16), or concurrent requests per server (default: 32)"
    parser.add_argument("--batch_size", type=int, help=what)
    parser.add_argument("--num_speculative_tokens", type=int, help="tokens to draft per step (default: adaptive)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")


def view(parser: OneLineParser) -> None:
    """Show rows as text, and mark the tokens that have loss.

    Text with loss is green and other text is dim. Without colours (in a file or pipe, or with NO_COLOR), text with loss
    is in [[double brackets]]. A line under the name of a chat says why it became several rows, or why an answer has no
    loss.
    """
    parser.add_argument("source", help="a folder that `speculator data prepare` wrote, or any other source")
    parser.add_argument("--target", required=True, help="hub id or folder of the target; only the tokenizer is loaded")
    add_tokenizer_flags(parser)
    add_raw(parser)
    parser.add_argument("--rows", type=int, default=3, help="number of rows (default: 3)")


def add_max_bad_rows(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--max_bad_rows",
        type=float,
        default=MAX_BAD_ROWS,
        help=f"largest share of unusable rows; they are skipped with a warning (default: {MAX_BAD_ROWS})",
    )


def add_raw(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    what = "never apply the chat template: prompts and completions stay text"
    parser.add_argument("--raw", action="store_true", help=what)


def _turns(text: str) -> int:
    """Return the value of `--turns`, for which "all" stands for `ALL`; argparse reports an error."""
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither all nor a number of turns")
    return ALL if text == "all" else int(text)
