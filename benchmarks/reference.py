"""The reference run: heads, and every figure of docs/reference, on one machine, by one command that may be cut off.

    python -m benchmarks.reference                       everything; what is done is not done again
    python -m benchmarks.reference text mlp              these phases alone, for a machine that is lent by the hour
    python -m benchmarks.reference --rehearse            the same on tiny sizes, on any CPU, in minutes

There are two recipes. `chat`: SmolLM2-135M-Instruct writes prompts and answers, and an MLP head and an attention
head are trained on them; sized for two CPU cores. `code`: a larger target made from the machine's own Python sources;
sized for one GPU, and what is done where there is one.

Each phase is a command that a user could type; it is printed before it runs. What it makes lies under --output and
appears there when it is whole, so a phase that was cut off is done again, or goes on where its command can. After each,
all reports so far are copied to --publish.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import phases, reference_chat, reference_code
from speculator.errors import OneLineParser, refuse, run_command
from train.config import ROOT


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.reference", description=__doc__)
    parser.add_argument("phase", nargs="*", help="of those that --list shows; default: all")
    parser.add_argument("--list", action="store_true", help="show the phases and what is done, and stop")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes")
    parser.add_argument("--recipe", choices=["chat", "code"], help="default: code on a GPU, else chat")
    chat = parser.add_argument_group("--recipe chat")
    chat.add_argument("--suite", action="append", help=f"repeatable; default: {', '.join(reference_chat.SUITES)}")
    code = parser.add_argument_group("--recipe code")
    code.add_argument("--minutes", type=float, help="of training the target; default: 8")
    code.add_argument("--source", action="append", default=[], help="local text beside python-sources; repeatable")
    parser.add_argument("--output", type=Path, help="default: runs/reference, or runs/rehearsal")
    parser.add_argument("--publish", type=Path, help="default: docs/reference, or OUTPUT/published in a rehearsal")
    flags = parser.parse_args(argv)
    return run_command("reference", lambda: run(flags))


def run(flags: argparse.Namespace) -> None:
    """Do the phases that are not done."""
    recipe = flags.recipe or ("code" if torch.cuda.is_available() else "chat")
    folder = flags.output or Path("runs", "rehearsal" if flags.rehearse else "reference")
    published = flags.publish or (folder / "published" if flags.rehearse else ROOT / "docs" / "reference")
    if recipe == "chat":
        suites = flags.suite or list(reference_chat.SUITES)
        missing = [suite for suite in suites if suite.endswith(".jsonl") and not Path(suite).exists()]
        refuse(
            (flags.minutes is not None or bool(flags.source), "--minutes and --source are of --recipe code"),
            (missing and not flags.list, f"no {', '.join(missing)} here: Spec-Bench is {reference_chat.SPEC_BENCH}"),
        )
        scale = reference_chat.REHEARSAL if flags.rehearse else reference_chat.FULL
        dtype = "bfloat16" if flags.list else reference_chat.training_dtype(folder)
        table = reference_chat.phases(folder, scale, suites, dtype)
        patterns = reference_chat.PUBLISHED
    else:
        scale = reference_code.REHEARSAL if flags.rehearse else reference_code.FULL
        minutes = scale.minutes if flags.minutes is None else flags.minutes
        refuse(
            (flags.suite is not None, "--suite is of --recipe chat"),
            (not minutes > 0, "--minutes must be above 0"),
            *((not Path(source).exists(), f"--source {source}: not here") for source in flags.source),
        )
        table = reference_code.phases(folder, scale, minutes, ["python-sources", *flags.source])
        patterns = reference_code.PUBLISHED
    if flags.list:
        phases.show(table)
    else:
        phases.run(table, flags.phase, published, patterns)


if __name__ == "__main__":
    sys.exit(main())
