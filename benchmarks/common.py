"""Flags, prompts and report files that the comparisons of drafters share."""

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
from speculator.errors import OneLineParser
from speculator.files import make_folder, write_json, write_text


def build_parser(name: str, description: str, max_prompts: int) -> OneLineParser:
    """The flags that select target, prompts and output folder."""
    parser = OneLineParser(prog=f"python -m benchmarks.{name}", description=description)
    suites.add_flags(parser, max_prompts)
    parser.add_argument("--output", type=Path, required=True, help="folder for the report")
    return parser


def load_target(arguments: argparse.Namespace) -> Target:
    """Load the target and check that prompts and answers fit its context."""
    suites.check_flags(arguments)
    target = drafting.load_target(arguments)
    suites.check_lengths(target, arguments.prompt_tokens, arguments.max_new_tokens)
    return target


def load_prompts(arguments: argparse.Namespace, target: Target) -> list[list[int]]:
    """Held-out prompts from the machine's Python sources."""
    return suites.held_out(PYTHON_SOURCES, target.tokenizer, arguments.prompt_tokens, arguments.max_prompts).prompts


def write(
    arguments: argparse.Namespace,
    target: Target,
    prompts: list[list[int]],
    measured: dict,
    name: str,
    markdown: Callable[[dict], str],
) -> None:
    """Write the measurements and their conditions as NAME.json and NAME.md, and print the latter."""
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
    make_folder(arguments.output)
    write_text(arguments.output / f"{name}.md", markdown(report))
    write_json(arguments.output / f"{name}.json", report)
    print(markdown(report))
