"""`python -m eval --target T --speculator S --output DIR`: acceptance and speed on text, as a report.

`python -m eval tune --target T --speculator S`: the draft length or tree that is fastest here, written beside the head.
`python -m eval compare A/report.json B/report.json`: what differs between two reports.
`python -m eval lossless --target T --speculator S`: is the text that drafts speed up the target's own?
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers.utils import logging

from data.sources import PYTHON_SOURCES
from eval import compare, lossless, tracking, tuning
from eval.decoders import OPTIONAL
from eval.run import check_flags, evaluate
from eval.suites import load_suite
from speculator import Target, load_head
from speculator.cli import drafting
from speculator.drafters.topology import Chain
from speculator.errors import OneLineParser, refuse, run_command


def main(argv: list[str] | None = None) -> int:
    """Run the command line; gives the exit code. Wrong input is one line on stderr and 2."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["lossless"]:
        return main_lossless(argv[1:])
    if argv[:1] in (["tune"], ["compare"]):
        command = tuning if argv[0] == "tune" else compare
        arguments = command.build_parser().parse_args(argv[1:])
        return run_command(f"eval {argv[0]}", lambda: command.run(arguments))
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
        help="python-sources (the default): its held-out split; a local .jsonl or .txt file; or a hub dataset as "
        "ORG/NAME[/CONFIG][:SPLIT]; repeatable",
    )
    parser.add_argument("--raw", action="store_true", help="no chat template, even where the target has one")
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 1")
    parser.add_argument("--batch_size", type=int, action="append", help="default: 1; repeatable")
    parser.add_argument("--draft_length", type=int, action="append", help="repeatable; default: as tuned, else all")
    parser.add_argument(
        "--rule",
        choices=Chain(1).rules,
        help="accept rule above temperature 0, of every drafter; the head then drafts chains; default: as drafted",
    )
    parser.add_argument("--draft_model", help="a small causal LM with the target's tokenizer, to compare with")
    parser.add_argument(
        "--baseline",
        action="append",
        choices=OPTIONAL,
        help="beside the plain loop and transformers' generate; default: hf_compiled on a GPU, hf_assisted with a "
        "draft model; repeatable",
    )
    parser.add_argument("--max_prompts", type=int, default=32, help="of each suite; default: 32")
    parser.add_argument("--prompt_tokens", type=int, default=64, help="of prompts that are cut from text; default: 64")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="per prompt and turn; default: 128")
    parser.add_argument("--repeats", type=int, default=1, help="timings of each prompt, the median counts; default: 1")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report_to", choices=["wandb", "none"], default="none", help="default: none")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Evaluate and say where the report is."""
    check_flags(arguments)
    tracking.check(arguments.report_to)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = Target.load(arguments.target, dtype=arguments.dtype)
    head = load_head(arguments.speculator, target)
    model = Target.load(arguments.draft_model, dtype=arguments.dtype) if arguments.draft_model else None
    suites = [
        load_suite(
            source,
            target,
            prompt_tokens=arguments.prompt_tokens,
            max_prompts=arguments.max_prompts,
            max_new_tokens=arguments.max_new_tokens,
            raw=arguments.raw,
        )
        for source in arguments.suite or [PYTHON_SOURCES]
    ]
    names = [suite.name for suite in suites]
    for name in names:
        refuse((names.count(name) > 1, f"two suites are called {name}: a report could not tell them apart"))
    temperatures = arguments.temperature or [0.0, 1.0]
    default = ["hf_compiled"] * (target.device.type == "cuda") + ["hf_assisted"] * (model is not None)
    report = evaluate(
        target,
        head,
        suites,
        arguments.output,
        temperatures=temperatures,
        max_new_tokens=arguments.max_new_tokens,
        speculator_name=arguments.speculator,
        seed=arguments.seed,
        batch_sizes=arguments.batch_size or [1],
        draft_lengths=sorted(set(arguments.draft_length or []), reverse=True),
        tuned_in=None if arguments.draft_length or arguments.rule else arguments.speculator,
        model=model,
        baselines=arguments.baseline or default,
        repeats=arguments.repeats,
        rule=arguments.rule,
    )
    if arguments.report_to == "wandb":
        tracking.send(report, arguments.output)
    print(f"\n{(arguments.output / 'report.md').read_text()}\nThe report and its plots are in {arguments.output}")


def main_lossless(argv: list[str]) -> int:
    """`python -m eval lossless`: exit code 0 where every check passed, 1 where one did not."""
    arguments = build_lossless_parser().parse_args(argv)
    return run_command("eval lossless", lambda: int(not lossless.run(arguments)))


def build_lossless_parser() -> OneLineParser:
    """The flags of `lossless`."""
    parser = OneLineParser(prog="python -m eval lossless", description=lossless.__doc__)
    parser.add_argument("--target", required=True, help="hub id or folder of a causal LM")
    drafting.add_flags(parser, required=True)
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 1")
    parser.add_argument(
        "--suite",
        default=PYTHON_SOURCES,
        help="python-sources (the default): its held-out split; or a .jsonl or .txt file",
    )
    parser.add_argument("--max_prompts", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--max_new_tokens", type=int, default=128, help="at temperature 0")
    parser.add_argument("--sampled_prompts", type=int, default=4, help="of these, how many are sampled from")
    parser.add_argument("--samples", type=int, default=4000, help="rows per sampled prompt, with drafts and without")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the checks as .json too")
    return parser
