"""Compare every drafter, draft shape and accept rule on the same prompts.

    python -m benchmarks.drafters --target T --speculator S [--draft_model M] --output DIR

Writes drafters.json and drafters.md. Every batch of prompts goes through all decoders, in rotating order, before the
next batch starts. The table shows means over batches, so differences between decoders are means of paired differences.
Intervals are 95% paired bootstraps over batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass

from tqdm import tqdm

from benchmarks import common
from eval.metrics import paired_bootstrap, shown, speedup
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
from speculator.decoding.request import acceptance_length
from speculator.errors import refuse_below, run_command
from speculator.heads import Speculator
from speculator.tables import markdown_table


@dataclass
class Decoder:
    """One row of the table."""

    name: str
    drafter: Drafter | None
    rule: str | None = None


def decoders(target: Target, head: Speculator, model: Target | None) -> list[Decoder]:
    """Plain decoding, the head in every shape, n-gram lookup, and the draft model if there is one."""
    n = head.n_predict
    branches = (4, 3, 2, 2)[:n]
    wide = (3, 2, *[1] * (n - 2))[:n]
    table = [
        Decoder("none", None),
        Decoder("head chain", HeadDrafter(head)),
        Decoder("head chain, rejection rule", HeadDrafter(head), "rejection"),
        Decoder("head chain, greedy draft", HeadDrafter(head, Chain(n, sampled=False))),
        Decoder("head tree", HeadDrafter(head, Tree(branches, nodes=3 * len(branches)))),
        Decoder("head candidates", HeadDrafter(head, Candidates(wide))),
        Decoder("head candidates, replacement", HeadDrafter(head, Candidates(wide, replacement=True))),
        Decoder("n-gram", NgramDrafter(n)),
    ]
    if model is not None:
        table += [
            Decoder("draft model chain", DraftModelDrafter(model, target, n)),
            Decoder("draft model chain, rejection rule", DraftModelDrafter(model, target, n), "rejection"),
            Decoder("draft model candidates", DraftModelDrafter(model, target, Candidates(wide))),
        ]
    return table


def measure(
    target: Target, table: list[Decoder], prompts: list[list[int]], temperature: float, count: int, batch_size: int
) -> list[dict]:
    """Measure acceptance length and decode-only speedup over plain decoding for every decoder."""
    timed = [Timed() for _ in table]
    lengths: list[list[float]] = [[] for _ in table]
    engines: Engines = {}

    def decode(decoder: Decoder, batch: list[list[int]], sampling: Sampling, new_tokens: int, out: Timed) -> None:
        time_ours(target, decoder.drafter, batch, sampling, new_tokens, out, engines, decoder.rule)

    for decoder in table:
        decode(decoder, prompts[:batch_size], Sampling(temperature), 8, Timed())  # warm-up
    order = list(range(len(table)))
    for start in tqdm(range(0, len(prompts), batch_size), desc=f"temperature {temperature:g}", unit="batch"):
        order = order[1:] + order[:1]
        for i in order:
            before = len(timed[i].steps)
            decode(table[i], prompts[start : start + batch_size], Sampling(temperature, seed=start), count, timed[i])
            lengths[i].append(acceptance_length(timed[i].steps[before:]))
    chain = next(i for i, decoder in enumerate(table) if decoder.name == "head chain")
    rows = []
    for i, decoder in enumerate(table):
        rule = "-" if decoder.drafter is None else decoder.rule or decoder.drafter.rules[0]
        differences = [a - b for a, b in zip(lengths[i], lengths[chain], strict=True)]
        rows.append(
            {
                "decoder": decoder.name,
                "rule": "greedy" if temperature == 0 and decoder.drafter else rule,
                "temperature": temperature,
                "acceptance_length": acceptance_length(timed[i].steps),
                "mean_tokens_per_step": statistics.fmean(lengths[i]),
                "tokens_per_step_over_head_chain": paired_bootstrap(differences, statistics.fmean),
                "tokens_per_second": timed[i].tokens_per_second,
                "speedup": speedup(timed[i], timed[0]),
            }
        )
    return rows


def markdown(report: dict) -> str:
    """Render the report as a table."""
    header = ("temperature", "decoder", "rule", "acceptance length", "minus head chain", "tokens/s", "speedup")
    table = [
        (
            f"{row['temperature']:g}",
            row["decoder"],
            row["rule"],
            f"{row['mean_tokens_per_step']:.2f}",
            shown(row["tokens_per_step_over_head_chain"], "+.2f"),
            f"{row['tokens_per_second']:.0f}",
            shown(row["speedup"]),
        )
        for row in report["rows"]
    ]
    conditions = (
        f"Target `{report['target']}`, {report['hardware']}, {report['dtype']}, batch size {report['batch_size']}, "
        f"{report['prompts']} prompts of {report['prompt_tokens']} tokens, {report['max_new_tokens']} new tokens each."
    )
    return f"# Drafters, shapes and rules\n\n{conditions}\n\n{markdown_table(header, table)}\n"


def main(argv: list[str] | None = None) -> int:
    parser = common.build_parser("drafters", __doc__, max_prompts=24)
    parser.add_argument("--speculator", required=True, help="folder of a trained head")
    parser.add_argument("--draft_model", help="hub id or folder of a small causal LM with the target's tokenizer")
    parser.add_argument("--temperature", type=float, action="append", help="repeatable (default: 0, 0.7 and 1)")
    parser.add_argument("--batch_size", type=int, default=1, help="prompts decoded at a time (default: 1)")
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, then write and print the table."""
    refuse_below(arguments, batch_size=1)
    target = common.load_target(arguments)
    head = load_head(arguments.speculator, target)
    model = Target.load(arguments.draft_model, dtype=arguments.dtype) if arguments.draft_model else None
    table = decoders(target, head, model)
    prompts = common.load_prompts(arguments, target)
    rows = [
        row
        for temperature in arguments.temperature or [0.0, 0.7, 1.0]
        for row in measure(target, table, prompts, temperature, arguments.max_new_tokens, arguments.batch_size)
    ]
    measured = {"speculator": arguments.speculator, "batch_size": arguments.batch_size, "rows": rows}
    common.write(arguments, target, prompts, measured, "drafters", markdown)


if __name__ == "__main__":
    sys.exit(main())
