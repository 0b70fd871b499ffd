"""`python -m benchmarks.peers`: this loop against transformers' own speculative decoding, same models, same prompts.

    python -m benchmarks.peers --target T --draft_model M --output DIR

Plain decoding against `generate`, with its own cache and with a static one, compiled (on a GPU, or with --compiled);
n-gram lookup against `prompt_lookup_num_tokens`, the draft model against `assistant_model`, at one fixed draft length.
Greedy. The decoders take turns on every prompt; texts are compared token by token. Writes peers.json and peers.md.
"""

from __future__ import annotations

import argparse
import sys

import transformers

from benchmarks import common
from eval.decoders import OPTIONAL, decoders, measure_suite
from eval.metrics import shown, speedup
from eval.suites import Suite
from speculator import Sampling, Target
from speculator.decoding.request import acceptance_length
from speculator.errors import refuse_below, run_command
from speculator.tables import BASELINES, markdown_table

_PAIRS = (
    ("none", "hf_generate"),
    ("none", "hf_compiled"),
    ("ngram", "hf_prompt_lookup"),
    ("draft_model", "hf_assisted"),
)
_OURS = {"none": "plain", "ngram": "n-gram", "draft_model": "draft model"}


def measure(
    target: Target, model: Target, prompts: list[list[int]], length: int, count: int, compiled: bool
) -> tuple[list[dict], dict[str, str]]:
    """Tokens per second of each pair, ratios of ours to theirs with intervals, and how many texts are identical.

    Gives also what did not run, and why.
    """
    baselines = [name for name in OPTIONAL if compiled or name != "hf_compiled"]
    table, _ = decoders(target, None, [length], model, baselines, batch_size=1)
    measured = measure_suite(target, table, Suite("prompts", prompts), Sampling(), count)
    rows = []
    for mine, name in _PAIRS:
        if name not in measured.timed:
            continue
        a, b = measured.timed[mine], measured.timed[name]
        rows.append(
            {
                "ours": _OURS[mine],
                "theirs": name,
                "acceptance_length": acceptance_length(a.steps),
                "tokens_per_second": {"ours": a.tokens_per_second, "theirs": b.tokens_per_second},
                "end_to_end_tokens_per_second": {
                    "ours": a.end_to_end_tokens_per_second,
                    "theirs": b.end_to_end_tokens_per_second,
                },
                "ratio": speedup(a, b),
                "identical": sum(x == y for x, y in zip(a.tokens, b.tokens, strict=True)),
                "of": len(a.tokens),
            }
        )
    return rows, {BASELINES[name]: reason for name, reason in measured.not_run.items()}


def markdown(report: dict) -> str:
    header = ("ours", "theirs", "tokens per step", "ours, tokens/s", "theirs, tokens/s", "ratio", "identical texts")
    table = [
        (
            row["ours"],
            BASELINES[row["theirs"]],
            f"{row['acceptance_length']:.2f}",
            *(f"{row['tokens_per_second'][whose]:.0f}" for whose in ("ours", "theirs")),
            shown(row["ratio"]),
            f"{row['identical']} of {row['of']}",
        )
        for row in report["rows"]
    ]
    lines = [
        "# Against transformers' own speculative decoding",
        "",
        f"Target `{report['target']}`, {report['hardware']}, {report['dtype']}, transformers {report['transformers']}, "
        f"{report['prompts']} prompts, {report['max_new_tokens']} new tokens each, draft length "
        f"{report['num_speculative_tokens']}, temperature 0.",
        "Decode-only tokens per second; the ratio with its 95% interval.",
        *(f"Not run: {name}: {reason}." for name, reason in report["not_run"].items()),
        "",
        markdown_table(header, table),
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = common.build_parser("peers", __doc__, max_prompts=16)
    parser.add_argument("--draft_model", required=True, help="hub id or folder of a small LM with the same tokenizer")
    parser.add_argument("--num_speculative_tokens", type=int, default=4)
    parser.add_argument("--compiled", action="store_true", help="compile transformers' on a CPU too, which takes long")
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, write and print the table."""
    refuse_below(arguments, num_speculative_tokens=1)
    common.check_steps(arguments, arguments.num_speculative_tokens)
    target = common.load_target(arguments)
    model = Target.load(arguments.draft_model, dtype=arguments.dtype)
    prompts = common.load_prompts(arguments, target)
    compiled = arguments.compiled or target.device.type == "cuda"
    rows, skipped = measure(
        target, model, prompts, arguments.num_speculative_tokens, arguments.max_new_tokens, compiled
    )
    measured = {
        "draft_model": model.name,
        "transformers": transformers.__version__,
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "not_run": skipped,
        "rows": rows,
    }
    common.write(arguments, target, prompts, measured, "peers", markdown)


if __name__ == "__main__":
    sys.exit(main())
