"""What the benchmarks share: their flags, the target and its prompts, the report as .json and .md."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from data.sources import PYTHON_SOURCES
from eval import suites
from speculator import Target
from speculator.cli import drafting
from speculator.device import dtype_name, hardware
from speculator.errors import OneLineParser, UserError
from speculator.files import check_folder, make_folder, write_json, write_text


def build_parser(name: str, description: str, max_prompts: int) -> OneLineParser:
    """The flags that every benchmark has."""
    parser = OneLineParser(prog=f"python -m benchmarks.{name}", description=description)
    suites.add_flags(parser, max_prompts)
    parser.add_argument("--output", type=Path, required=True, help="folder for the report")
    return parser


def load_target(arguments: argparse.Namespace) -> Target:
    """The target.

    Raises:
        UserError: there is none, or the flags can't be.
    """
    suites.check_flags(arguments)
    check_folder("--output", arguments.output)
    target = drafting.load_target(arguments)
    suites.check_lengths(target, arguments.prompt_tokens, arguments.max_new_tokens)
    return target


def load_prompts(arguments: argparse.Namespace, target: Target) -> list[list[int]]:
    """The prompts; what can't be measured has been refused by now, so the output folder is made."""
    suite = suites.held_out(PYTHON_SOURCES, target.tokenizer, arguments.prompt_tokens, arguments.max_prompts)
    make_folder(arguments.output)
    return suite.prompts


def check_steps(arguments: argparse.Namespace, num_speculative_tokens: int) -> None:
    """Refuse texts so short that every step could be cut by their end, and none be counted.

    Raises:
        UserError: they are.
    """
    if arguments.max_new_tokens < num_speculative_tokens + 2:
        raise UserError(
            f"--max_new_tokens must be at least {num_speculative_tokens + 2}: one of the prefill, and a whole step of "
            f"{num_speculative_tokens} drafted tokens"
        )


def write(
    arguments: argparse.Namespace,
    target: Target,
    prompts: list[list[int]],
    measured: dict,
    name: str,
    markdown: Callable[[dict], str],
) -> None:
    """Write what was `measured`, and on what, as NAME.md and NAME.json, and print the former."""
    report = {
        "target": target.name,
        "hardware": hardware(target.device),
        "torch": torch.__version__,
        "dtype": dtype_name(target.dtype),
        "prompts": len(prompts),
        "prompt_tokens": arguments.prompt_tokens,
        "max_new_tokens": arguments.max_new_tokens,
        **measured,
    }
    write_text(arguments.output / f"{name}.md", markdown(report))
    write_json(arguments.output / f"{name}.json", report)
    print(markdown(report))
