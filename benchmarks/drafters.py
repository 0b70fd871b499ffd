"""`python -m benchmarks.drafters`: every drafter, shape and rule on the same prompts, against plain decoding in turns.

    python -m benchmarks.drafters --target T --speculator S [--draft_model M] --output DIR

Writes drafters.json and drafters.md. A batch of prompts goes through every decoder before the next batch comes, in an
order that rotates. Of a row `acceptance_length` is over all its steps, as in every report; the table has means over
batches, as a difference of decoders is the mean of those that each batch shows. Intervals are 95% paired bootstraps
over batches.
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
    Paths,
    Sampling,
    Target,
    Tree,
    load_head,
)
from speculator.decoding.request import acceptance_length
from speculator.errors import UserError, refuse_below, run_command
from speculator.heads import Speculator
from speculator.tables import markdown_table


@dataclass
class Decoder:
    """One line of the table."""

    name: str
    drafter: Drafter | None
    rule: str | None = None


def decoders(target: Target, head: Speculator, model: Target | None) -> list[Decoder]:
    """What is compared: the head in every shape, n-gram lookup, and the draft model if there is one."""
    n = head.n_predict
    branches = (4, 3, 2, 2)[:n]
    wide = (3, 2, *[1] * (n - 2))[:n]
    table = [
        Decoder("none", None),
        Decoder("head chain", HeadDrafter(head)),
        Decoder("head chain, rejection rule", HeadDrafter(head), "rejection"),
        Decoder("head chain, greedy draft", HeadDrafter(head, Chain(n, sampled=False))),
        Decoder("head tree", HeadDrafter(head, Tree(branches, nodes=3 * len(branches)))),
        Decoder("head paths", HeadDrafter(head, Paths((4, 3, 2, 1)[:n], paths=4))),
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
    """A row for each decoder: tokens per step and decode-only speedup over plain decoding, with intervals."""
    timed = [Timed() for _ in table]
    steps: list[list[float]] = [[] for _ in table]
    engines: Engines = {}

    def once(decoder: Decoder, batch: list[list[int]], sampling: Sampling, new: int, out: Timed) -> None:
        time_ours(target, decoder.drafter, batch, sampling, new, out, engines, decoder.rule)

    for decoder in table:
        once(decoder, prompts[:batch_size], Sampling(temperature), 8, Timed())
    order = list(range(len(table)))
    for start in tqdm(range(0, len(prompts), batch_size), desc=f"temperature {temperature:g}", unit="batch"):
        order = order[1:] + order[:1]
        for i in order:
            before = len(timed[i].steps)
            sampling = Sampling(temperature, seed=start)
            once(table[i], prompts[start : start + batch_size], sampling, count, timed[i])
            steps[i].append(acceptance_length(timed[i].steps[before:]))
    chain = next(i for i, decoder in enumerate(table) if decoder.name == "head chain")
    rows = []
    for i, decoder in enumerate(table):
        rule = "-" if decoder.drafter is None else decoder.rule or next(iter(decoder.drafter.rules), "as drafted")
        rows.append(
            {
                "decoder": decoder.name,
                "rule": "greedy" if temperature == 0 and decoder.drafter else rule,
                "temperature": temperature,
                "batch_size": batch_size,
                "nodes": decoder.drafter.nodes if decoder.drafter else 0,
                "acceptance_length": acceptance_length(timed[i].steps),
                "mean_tokens_per_step": statistics.fmean(steps[i]),
                "tokens_per_step_over_head_chain": _difference(steps[i], steps[chain]),
                "tokens_per_second": timed[i].tokens_per_second,
                "speedup": speedup(timed[i], timed[0]),
            }
        )
    return rows


def _difference(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Mean difference over batches, with its interval."""
    return paired_bootstrap([a - b for a, b in zip(ours, theirs, strict=True)], statistics.fmean)


def markdown(report: dict) -> str:
    header = ("temperature", "decoder", "rule", "tokens per step", "less the head chain's", "tokens/s", "speedup")
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
    lines = [
        "# Drafters, shapes and rules",
        "",
        f"Target `{report['target']}`, {report['hardware']}, {report['dtype']}, batch size {report['batch_size']}, "
        f"{report['prompts']} prompts of {report['prompt_tokens']} tokens, {report['max_new_tokens']} new ones each.",
        "Tokens per step are means over batches, and so are their differences from the head chain's. Speedup is",
        "decode-only, over plain decoding by the same loop. Intervals are 95%.",
        "",
        markdown_table(header, table),
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = common.build_parser("drafters", __doc__, max_prompts=24)
    parser.add_argument("--speculator", required=True, help="folder of a trained head")
    parser.add_argument("--draft_model", help="hub id or folder of a small causal LM with the target's tokenizer")
    parser.add_argument(
        "--decoder",
        action="append",
        help="a line of the table, beside plain decoding and the head's chain; default: all",
    )
    parser.add_argument("--temperature", type=float, action="append", help="default: 0, 0.7 and 1")
    parser.add_argument("--batch_size", type=int, default=1)
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, write and print the table."""
    refuse_below(arguments, batch_size=1)
    target = common.load_target(arguments)
    head = load_head(arguments.speculator, target)
    common.check_steps(arguments, head.n_predict)
    model = Target.load(arguments.draft_model, dtype=arguments.dtype) if arguments.draft_model else None
    table = decoders(target, head, model)
    names = [decoder.name for decoder in table]
    for name in arguments.decoder or []:
        if name not in names:
            raise UserError(f"no decoder {name!r}: there are {', '.join(names)}")
    if arguments.decoder:
        table = [decoder for decoder in table if decoder.name in ("none", "head chain", *arguments.decoder)]
    prompts = common.load_prompts(arguments, target)
    rows = [
        row
        for temperature in arguments.temperature or [0.0, 0.7, 1.0]
        for row in measure(target, table, prompts, temperature, arguments.max_new_tokens, arguments.batch_size)
    ]
    measured = {
        "speculator": arguments.speculator,
        "draft_model": arguments.draft_model,
        "batch_size": arguments.batch_size,
        "rows": rows,
    }
    common.write(arguments, target, prompts, measured, "drafters", markdown)


if __name__ == "__main__":
    sys.exit(main())
