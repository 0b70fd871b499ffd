"""`python -m eval --target T --speculator S --output DIR`: acceptance and speed on text, as a report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers.utils import logging

from data.sources import PYTHON_SOURCES
from eval.run import evaluate
from eval.suites import from_text
from speculator import Target, load_head
from speculator.errors import OneLineParser, run_command


def main(argv: list[str] | None = None) -> int:
    """Run the command line; gives the exit code. Wrong input is one line on stderr and 2."""
    arguments = build_parser().parse_args(argv)
    return run_command("eval", lambda: run(arguments))


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog="python -m eval", description=__doc__)
    parser.add_argument("--target", required=True, help="hub id or folder of a causal LM")
    parser.add_argument("--speculator", required=True, help="folder of a trained head")
    parser.add_argument(
        "--suite",
        action="append",
        help="python-sources (the default): its held-out split; or a local .jsonl or .txt file: all of its documents",
    )
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 1")
    parser.add_argument("--max_prompts", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Evaluate and say where the report is."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = Target.load(arguments.target, dtype=arguments.dtype)
    head = load_head(arguments.speculator, target)
    suites = [
        from_text(
            [source],
            target.tokenizer,
            arguments.prompt_tokens,
            arguments.max_prompts,
            split="held-out" if source == PYTHON_SOURCES else None,
        )
        for source in arguments.suite or [PYTHON_SOURCES]
    ]
    evaluate(
        target,
        head,
        suites,
        arguments.output,
        temperatures=arguments.temperature or [0.0, 1.0],
        max_new_tokens=arguments.max_new_tokens,
        speculator_name=arguments.speculator,
        seed=arguments.seed,
    )
    print(f"\n{(arguments.output / 'report.md').read_text()}\nThe report and its plots are in {arguments.output}")


if __name__ == "__main__":
    sys.exit(main())
