"""Measure a plain step, a draft and a verification at a published shape with random weights.

    python -m benchmarks.step --preset llama-3-8b [--batch_size 1]... [--context 448] [--output DIR]

Compares both steps with the time this machine needs to read their bytes once (all weights and the live keys and
values), using the bandwidth of a large copy. Draft cost c and verify cost v are measured as in every report. Random
weights say nothing about acceptance, so the speedup is a projection from a published acceptance length.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging

from benchmarks.shapes import PRESETS, bandwidth, draft_bytes, random_head, random_target, step_bytes
from speculator import HeadDrafter, Sampling, Target
from speculator.device import dtype_name, hardware
from speculator.drafters.measure import interquartile_mean, measure_costs, paired_steps
from speculator.errors import OneLineParser, refuse, refuse_below, run_command
from speculator.files import make_folder, write_json, write_text
from speculator.heads import MLPSpeculator
from speculator.tables import markdown_table

_BLOCK = 5  # steps


def measure_steps(
    target: Target, head: MLPSpeculator, length: int, rows: int, context: int, blocks: int, rate: float
) -> dict:
    """Measure chains of `length` for `rows` sequences of `context` tokens; `rate` is in bytes per second."""
    torch.manual_seed(0)
    prompts = torch.randint(target.vocab_size, (rows, context)).tolist()
    steps = paired_steps(target, HeadDrafter(head, length), prompts, Sampling(), blocks * _BLOCK)
    (entry,) = measure_costs(target, None, (), [(rows, True)], math.inf)
    step, decode = interquartile_mean(b / a for a, b in steps), interquartile_mean(a for a, _ in steps)
    v = min(step, entry.of(0, length * rows, False))
    c = (step - v) / length
    # Random weights reject nearly every draft, so rows grow by about one token per step while they are measured.
    live = context + blocks * _BLOCK // 2
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


def projected(row: dict) -> float:
    """Speedup E / (G c + v)."""
    cost = row["num_speculative_tokens"] * row["draft_over_decode"] + row["verify_over_decode"]
    return row["acceptance_length"] / cost


def markdown(report: dict) -> str:
    header = ("batch size", "G", "plain step, ms", "over bound", "verification, ms", "over bound")
    header += ("c", "c by bytes", "v", "E", "projected speedup")
    table = [
        (
            row["batch_size"],
            row["num_speculative_tokens"],
            f"{1e3 * row['decode_seconds']:.2f}",
            f"{row['decode_over_bound']:.2f}",
            f"{1e3 * row['verify_seconds']:.2f}",
            f"{row['verify_over_bound']:.2f}",
            *(f"{row[name]:.3f}" for name in ("draft_over_decode", "draft_over_decode_by_bytes", "verify_over_decode")),
            f"{row['acceptance_length']:.2f}",
            f"{row['projected_speedup']:.2f}",
        )
        for row in report["rows"]
    ]
    return (
        f"# Steps at the shape of {report['preset']}, random weights\n\n{report['hardware']}, {report['dtype']}, torch "
        f"{report['torch']}, {report['context']} tokens of context; a copy moves "
        f"{report['bytes_per_second'] / 1e9:,.0f} GB/s. The speedup is a projection, not a measurement: acceptance "
        f"length E by a published {report['acceptance_length']:.2f} ({report['source']}).\n\n"
        f"{markdown_table(header, table)}\n"
    )


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, required=True, help="shape of the target and its head")
    parser.add_argument("--batch_size", type=int, action="append", help="repeatable (default: 1, 8 and 32)")
    # Steps after 448 tokens read 512 positions; those after 512 tokens read 1,024 until a finer bucket pays.
    parser.add_argument("--context", type=int, default=448, help="tokens before the first step (default: 448)")
    parser.add_argument("--blocks", type=int, default=16, help=f"timed blocks of {_BLOCK} steps (default: 16)")
    parser.add_argument("--output", type=Path, help="folder for step-PRESET.json and step-PRESET.md")
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, then print and write the table."""
    preset = PRESETS[arguments.preset]
    longest, deepest = preset.target["max_position_embeddings"], preset.head["n_predict"]
    refuse_below(arguments, context=1, blocks=1)
    refuse((arguments.context >= longest, f"--context {arguments.context}: {arguments.preset} has {longest} positions"))
    sizes = arguments.batch_size or [1, 8, 32]
    refuse((min(sizes) < 1, "--batch_size must be at least 1"))
    if arguments.output:
        make_folder(arguments.output)
    logging.set_verbosity_error()
    rate = bandwidth()
    target = random_target(arguments.preset)
    head = random_head(target, preset.head)
    assert isinstance(head, MLPSpeculator)
    shapes = [(size, length) for size in sizes for length in range(1, deepest + 1)]
    rows = [
        measure_steps(target, head, length, size, arguments.context, arguments.blocks, rate)
        for size, length in tqdm(shapes, desc=arguments.preset, unit="shape")
    ]
    for row in rows:
        row["acceptance_length"] = preset.length_at(row["num_speculative_tokens"])
        row["projected_speedup"] = projected(row)
    report = {
        "preset": arguments.preset,
        "hardware": hardware(target.device),
        "torch": torch.__version__,
        "dtype": dtype_name(target.dtype),
        "context": arguments.context,
        "bytes_per_second": rate,
        "acceptance_length": preset.acceptance_length,
        "source": preset.source,
        "rows": rows,
    }
    if arguments.output:
        write_text(arguments.output / f"step-{arguments.preset}.md", markdown(report))
        write_json(arguments.output / f"step-{arguments.preset}.json", report)
    print(markdown(report))


if __name__ == "__main__":
    sys.exit(main())
