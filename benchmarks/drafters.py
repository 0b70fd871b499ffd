"""Compare every drafter, draft shape and accept rule on the same prompts.

    python -m benchmarks.drafters --target T --speculator S [--draft_model M] [--suite NAME|FILE] --output DIR

Writes drafters.json and drafters.md. Every batch of prompts goes through all decoders, in rotating order, before the
next batch starts. The table shows means over batches, so differences between decoders are means of paired differences.
Intervals are 95% paired bootstraps over batches. Under `match` every text should be that of plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from data.mixture import PYTHON_SOURCES
from eval.flags import add_flags
from eval.intervals import paired_bootstrap
from eval.metrics import speedup
from eval.suites import Suite, check_flags, check_rows, first_turns
from eval.timing import Engines, Timed, time_ours
from speculator import (
    Candidates,
    Chain,
    Drafter,
    DraftModelDrafter,
    HeadDrafter,
    NgramDrafter,
    Sampling,
    Target,
    Tree,
    load_head,
)
from speculator.acceptance import Acceptance
from speculator.checkpoints import head_folder
from speculator.cli import model_flags
from speculator.device import dtype_name, hardware
from speculator.drafters.price import LONGEST_PATH
from speculator.drafters.tuning import adaptive_drafter, read_tuning
from speculator.errors import OneLineParser, run_command
from speculator.files import make_folder, write_json, write_text
from speculator.heads import Speculator
from speculator.report import Interval
from speculator.tables import markdown_table, shown

_REFERENCE = "head chain"  # the decoder with which the others are compared
_TREES = (((2, 2), 4), ((4, 2, 1), 8), ((4, 3, 2, 1), 12))  # branches and nodes


@dataclass
class Decoder:
    """One row of the table. At temperature 0 there is one rule: decoders that name another one are left out."""

    name: str
    drafter: Drafter | None
    rule: str | None = None


def decoders(target: Target, head: Speculator, model: Target | None) -> list[Decoder]:
    """Plain decoding, the head in every shape, n-gram lookup, and the draft model if there is one."""
    n = head.n_predict
    wide = (3, 2, *[1] * (n - 2))[:n]
    table = [Decoder("none", None), Decoder(_REFERENCE, HeadDrafter(head))]
    table += [Decoder(f"head chain of {length}", HeadDrafter(head, length)) for length in range(1, min(n, 4))]
    table += [
        Decoder(f"head chain of {length}, block rule", HeadDrafter(head, length), "block")
        for length in sorted({*range(1, min(n, 4)), n})
    ]
    table += [
        Decoder("head chain, rejection rule", HeadDrafter(head), "rejection"),
        Decoder("head chain, greedy draft", HeadDrafter(head, Chain(n, sampled=False))),
        Decoder("head, two candidates", HeadDrafter(head, Candidates((2,)))),
        *(
            Decoder(f"head tree of {nodes}", HeadDrafter(head, Tree(branches, nodes)))
            for branches, nodes in _TREES
            if len(branches) <= n
        ),
        Decoder("head candidates", HeadDrafter(head, Candidates(wide))),
        Decoder("head candidates, multi_candidate rule", HeadDrafter(head, Candidates(wide)), "multi_candidate"),
        Decoder("n-gram", NgramDrafter(LONGEST_PATH)),
    ]
    if model is not None:
        table += [
            Decoder("draft model chain", DraftModelDrafter(model, target, n)),
            Decoder("draft model chain, block rule", DraftModelDrafter(model, target, n), "block"),
            Decoder("draft model candidates", DraftModelDrafter(model, target, Candidates(wide))),
        ]
    return table


def measure(
    target: Target, table: list[Decoder], suite: Suite, temperature: float, count: int, batch_size: int
) -> list[dict]:
    """Measure acceptance length and decode-only speedup over plain decoding for every decoder."""
    table = [decoder for decoder in table if temperature or not decoder.rule]
    timed = [Timed() for _ in table]
    counted: list[list[Acceptance]] = [[] for _ in table]
    engines: Engines = {}
    stop_at = sorted(target.eos_token_ids)

    def decode(decoder: Decoder, batch: list[list[int]], sampling: Sampling, new_tokens: int, out: Timed) -> None:
        time_ours(target, decoder.drafter, batch, sampling, new_tokens, out, engines, decoder.rule, stop_at)

    for decoder in table:
        decode(decoder, suite.prompts[:batch_size], Sampling(temperature), 8, Timed())  # warm-up
    order = list(range(len(table)))
    starts = range(0, len(suite.prompts), batch_size)
    for start in tqdm(starts, desc=f"temperature {temperature:g}", unit="batch"):
        order = order[1:] + order[:1]
        for i in order:
            before = len(timed[i].steps)
            prompts, sampling = suite.prompts[start : start + batch_size], Sampling(temperature, seed=start)
            decode(table[i], prompts, sampling, count, timed[i])
            counted[i].append(Acceptance.of(timed[i].steps[before:]))
    reference = next(i for i, decoder in enumerate(table) if decoder.name == _REFERENCE)
    rows = []
    for i, decoder in enumerate(table):
        rule = "-" if decoder.drafter is None else decoder.rule or decoder.drafter.rules[0]
        pairs = zip(counted[i], counted[reference], strict=True)
        differences = [a.length - b.length for a, b in pairs if a.steps and b.steps]
        rows.append(
            {
                "decoder": decoder.name,
                "rule": "greedy" if temperature == 0 and decoder.drafter else rule,
                "temperature": temperature,
                "acceptance_length": Acceptance.of(timed[i].steps).length,
                "tokens_per_step_over_head_chain": vars(paired_bootstrap(differences, statistics.fmean)),
                "tokens_per_second": timed[i].tokens_per_second,
                "speedup": vars(speedup(timed[i], timed[0])),
                "identical_to_plain": sum(a == b for a, b in zip(timed[i].tokens, timed[0].tokens, strict=True)),
            }
        )
    return rows


def markdown(report: dict) -> str:
    header = ("temperature", "decoder", "rule", "acceptance length", "minus head chain", "tokens/s", "speedup", "texts")
    table = [
        (
            f"{row['temperature']:g}",
            row["decoder"],
            row["rule"],
            f"{row['acceptance_length']:.2f}",
            shown(Interval(**row["tokens_per_step_over_head_chain"]), "+.2f"),
            f"{row['tokens_per_second']:.1f}",
            shown(Interval(**row["speedup"])),
            str(row["identical_to_plain"]),
        )
        for row in report["rows"]
    ]
    conditions = (
        f"Target `{report['target']}`, {report['hardware']}, {report['threads']} threads, {report['dtype']}, batch "
        f"size {report['batch_size']}, {report['prompts']} prompts of {report['suite']}, at most "
        f"{report['max_new_tokens']} new tokens each. *Texts* counts those that equal plain decoding's."
    )
    return f"# Drafters, shapes and rules\n\n{conditions}\n\n{markdown_table(header, table)}\n"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.drafters", description=__doc__)
    add_flags(parser, max_prompts=24)
    parser.add_argument("--speculator", required=True, help="folder of a trained head")
    parser.add_argument("--draft_model", help="hub id or folder of a small causal LM with the target's tokenizer")
    parser.add_argument("--suite", default=PYTHON_SOURCES, help="prompts, as in `python -m eval`")
    parser.add_argument("--temperature", type=float, action="append", help="repeatable (default: 0, 0.7 and 1)")
    parser.add_argument("--skip", action="append", default=[], help="a decoder to leave out; repeatable")
    parser.add_argument("--batch_size", type=int, default=1, help="prompts decoded at a time (default: 1)")
    parser.add_argument("--output", type=Path, required=True, help="folder for the report")
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, then write and print the table."""
    check_flags(arguments)
    check_rows(arguments.batch_size, arguments.max_prompts)
    target = model_flags.load_target(arguments)
    head = load_head(arguments.speculator, target)
    model = Target.load(arguments.draft_model, dtype=arguments.dtype) if arguments.draft_model else None
    suite = first_turns(arguments, arguments.suite, target)
    table, tuning = decoders(target, head, model), read_tuning(head_folder(arguments.speculator), head)
    rows = []
    for temperature in arguments.temperature or [0.0, 0.7, 1.0]:
        adaptive = adaptive_drafter(head, target, tuning, temperatures=[temperature], batch_size=arguments.batch_size)
        every = [decoder for decoder in (*table, Decoder("adaptive", adaptive)) if decoder.name not in arguments.skip]
        rows += measure(target, every, suite, temperature, arguments.max_new_tokens, arguments.batch_size)
    report = {
        "target": target.name,
        "speculator": arguments.speculator,
        "suite": suite.name,
        "hardware": hardware(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": dtype_name(target.dtype),
        "batch_size": arguments.batch_size,
        "prompts": len(suite.prompts),
        "max_new_tokens": arguments.max_new_tokens,
        "rows": rows,
    }
    make_folder(arguments.output)
    write_text(arguments.output / "drafters.md", markdown(report))
    write_json(arguments.output / "drafters.json", report)
    print(markdown(report))


if __name__ == "__main__":
    sys.exit(main())
