"""`python -m benchmarks.step`: what a plain step, a draft and a verify pass cost at a published shape, random weights.

    python -m benchmarks.step --preset llama-3-8b [--batch_size 1]... [--context 512] [--output DIR]

A plain step and a verify pass are compared with the time in which this machine can read their bytes once: all weights
and the live keys and values, over a bandwidth that is measured first with a large copy. c and v are measured as every
report's are (`speculator.drafters.costs`), on the loop's own steps. How much of a draft is accepted can't be known with random
weights: the speedup at an acceptance that others published is a projection, and is called one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging

from benchmarks.shapes import PRESETS, Preset, bandwidth, draft_bytes, random_head, random_target, step_bytes
from speculator import HeadDrafter, Sampling, Target
from speculator.device import dtype_name, hardware
from speculator.drafters.costs import BLOCK, StepSeconds, measure
from speculator.errors import OneLineParser, refuse, refuse_below, run_command
from speculator.files import make_folder, write_json, write_text
from speculator.heads import MLPSpeculator
from speculator.tables import markdown_table


def measure_steps(
    target: Target, head: MLPSpeculator, length: int, rows: int, context: int, blocks: int, rate: float
) -> dict:
    """One line: a chain of `length` for `rows` texts of `context` tokens, at `rate` bytes per second."""
    torch.manual_seed(0)
    prompts = torch.randint(target.vocab_size, (rows, context)).tolist()
    costs = StepSeconds()
    measure(target, HeadDrafter(head, length), prompts, Sampling(), blocks, costs)
    figures = costs.figures(length)
    decode, c, v = (figures[name] for name in ("decode_seconds", "draft_over_decode", "verify_over_decode"))
    # Sequences grow while they are measured; with random weights nearly every draft is refused, so by a token a step.
    live = context + blocks * BLOCK // 2
    plain, wide = (step_bytes(target, rows, live + width) / rate for width in (1, 1 + length))
    return {
        "batch_size": rows,
        "num_speculative_tokens": length,
        "decode_seconds": decode,
        "decode_over_bound": decode / plain,
        "verify_seconds": v * decode,
        "verify_over_bound": v * decode / wide,
        "draft_over_decode": c,
        "draft_over_decode_by_bytes": draft_bytes(head, length) / rate / plain,
        "verify_over_decode": v,
    }


def projected(row: dict, acceptance_length: float) -> float:
    """The speedup E / (G c + v) that a head with this acceptance would have."""
    return acceptance_length / (row["num_speculative_tokens"] * row["draft_over_decode"] + row["verify_over_decode"])


def markdown(report: dict) -> str:
    projection = report["projection"]
    header = ("batch size", "G", "plain step, ms", "over bound", "verify pass, ms", "over bound")
    table = [
        (
            row["batch_size"],
            row["num_speculative_tokens"],
            f"{1e3 * row['decode_seconds']:.2f}",
            f"{row['decode_over_bound']:.2f}",
            f"{1e3 * row['verify_seconds']:.2f}",
            f"{row['verify_over_bound']:.2f}",
            *(f"{row[name]:.3f}" for name in ("draft_over_decode", "draft_over_decode_by_bytes", "verify_over_decode")),
        )
        for row in report["rows"]
    ]
    speedups = ", ".join(f"{speedup:.2f} at batch size {rows}" for rows, speedup in projection["speedup"].items())
    lines = [
        f"# Steps at the shape of {report['preset']}, random weights",
        "",
        f"{report['hardware']}, {report['dtype']}, torch {report['torch']}, {report['context']} tokens of context; "
        f"a copy moves {report['bytes_per_second'] / 1e9:,.0f} GB/s.",
        "",
        markdown_table([*header, "c", "c by bytes", "v"], table),
        "",
        f"**A projection, not a measurement**: at {projection['acceptance_length']:.2f} tokens per step "
        f"({projection['source']}) these costs at G = {projection['num_speculative_tokens']} would give a speedup of {speedups}.",
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, required=True, help="whose shape")
    parser.add_argument("--batch_size", type=int, action="append", help="default: 1, 8 and 32; repeatable")
    parser.add_argument("--context", type=int, default=512, help="tokens before the first step; default: 512")
    parser.add_argument("--blocks", type=int, default=16, help=f"of {BLOCK} steps of each kind; default: 16")
    parser.add_argument(
        "--acceptance_length", type=float, help="project with this acceptance instead of a published one"
    )
    parser.add_argument("--output", type=Path, help="folder for step-PRESET.json and .md")
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the figures."""
    preset: Preset = PRESETS[arguments.preset]
    batch_sizes = arguments.batch_size or [1, 8, 32]
    longest, deepest = preset.target["max_position_embeddings"], preset.head["n_predict"]
    given = arguments.acceptance_length
    refuse_below(arguments, context=1, blocks=1)
    refuse(
        (min(batch_sizes) < 1, "--batch_size must be at least 1"),
        (arguments.context >= longest, f"--context {arguments.context}: {arguments.preset} has room for {longest}"),
        (
            given is not None and not 1 <= given <= 1 + deepest,
            f"--acceptance_length {given} is not in 1..{1 + deepest}: the head drafts {deepest}",
        ),
    )
    if arguments.output:
        make_folder(arguments.output)
    logging.set_verbosity_error()
    rate = bandwidth()
    target = random_target(arguments.preset)
    head = random_head(target, preset.head)
    assert isinstance(head, MLPSpeculator)
    shapes = [(rows, length) for rows in batch_sizes for length in range(1, deepest + 1)]
    rows = [
        measure_steps(target, head, length, size, arguments.context, arguments.blocks, rate)
        for size, length in tqdm(shapes, desc=arguments.preset, unit="shape")
    ]
    acceptance_length = given or preset.acceptance_length
    report = {
        "preset": arguments.preset,
        "hardware": hardware(target.device),
        "torch": torch.__version__,
        "dtype": dtype_name(target.dtype),
        "context": arguments.context,
        "bytes_per_second": rate,
        "rows": rows,
        "projection": {
            "note": "not measured: the acceptance is another's",
            "acceptance_length": acceptance_length,
            "source": "--acceptance_length" if given else preset.source,
            "num_speculative_tokens": deepest,
            "speedup": {
                str(row["batch_size"]): projected(row, acceptance_length)
                for row in rows
                if row["num_speculative_tokens"] == deepest
            },
        },
    }
    if arguments.output:
        name = f"step-{arguments.preset}"
        write_text(arguments.output / f"{name}.md", markdown(report))
        write_json(arguments.output / f"{name}.json", report)
    print(markdown(report))


if __name__ == "__main__":
    sys.exit(main())
