"""`python -m eval.bench_peers`: this loop against transformers' own speculative decoding, same models, same prompts.

    python -m eval.bench_peers --target T --draft_model M --output DIR

Plain decoding against `generate`, with its own cache and with a static one, compiled (on a GPU, or with --compiled);
n-gram lookup against `prompt_lookup_num_tokens`, the draft model against `assistant_model`, at one fixed draft length.
Greedy. The decoders take turns on every prompt; texts are compared token by token. Writes peers.json and peers.md.
"""

from __future__ import annotations

import argparse
import sys

import transformers

from eval import bench
from eval.bootstrap import shown
from eval.decoders import BASELINES, OPTIONAL, decoders
from eval.measuring import measure_suite
from eval.speed import speedup
from eval.suites import Suite
from speculator import Sampling, Target
from speculator.decoding.generate import tokens_per_step
from speculator.decoding.session import Session
from speculator.decoding.step import capturable
from speculator.errors import refuse_below, run_command

_PAIRS = (
    ("none", "hf_generate"),
    ("none", "hf_compiled"),
    ("ngram", "hf_prompt_lookup"),
    ("model", "hf_assisted"),
)
_OURS = {"none": "plain", "ngram": "n-gram", "model": "draft model"}


def measure(target: Target, model: Target, assistant, prompts: list[list[int]], length: int, count: int) -> list[dict]:
    """Tokens per second of each decoder, ratios of ours to theirs with intervals, and how many texts are identical."""
    ours = {"plain": None, "n-gram": NgramDrafter(length), "draft model": ModelDrafter(model, target, length)}
    # A fixed draft length on their side too: no confidence threshold, no schedule.
    fixed = {"num_assistant_tokens": length, "num_assistant_tokens_schedule": "constant"}
    assistant.generation_config.update(**fixed, assistant_confidence_threshold=0.0)
    theirs: dict[str, dict] = {
        "hf plain": {},
        "hf prompt lookup": {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": 3},
        "hf assistant": {"assistant_model": assistant, **fixed},
    }
    timed = {name: Timed() for pair in _PAIRS for name in pair}
    session = Session(target)

    def once(name: str, prompt: list[int], new: int, out: Timed) -> None:
        if name in ours:
            time_ours(target, ours[name], [prompt], Sampling(), new, out, session=session)
        else:
            time_transformers(target, [prompt], Sampling(), new, out, **theirs[name])

    for name in timed:
        once(name, prompts[0], count if name in ours and capturable(target, ours[name]) else 8, Timed())
    order = list(timed)
    for prompt in tqdm(prompts, unit="prompt"):
        order = order[1:] + order[:1]
        for name in order:
            once(name, prompt, count, timed[name])
    rows = []
    for mine, name in _PAIRS:
        if name not in measured.timed:
            continue
        a, b = measured.timed[mine], measured.timed[name]
        rows.append(
            {
                "ours": _OURS[mine],
                "theirs": name,
                "tokens_per_step": tokens_per_step(a.steps),
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
    return rows, {BASELINES[name]: reason for name, reason in measured.skipped.items()}


def markdown(report: dict) -> str:
    lines = [
        "# Against transformers' own speculative decoding",
        "",
        f"Target `{report['target']}`, {report['hardware']}, {report['dtype']}, transformers {report['transformers']}, "
        f"{report['prompts']} prompts, {report['max_new_tokens']} new tokens each, draft length "
        f"{report['draft_length']}, temperature 0.",
        "Decode-only tokens per second; the ratio with its 95% interval.",
        *(f"Not run: {name}: {reason}." for name, reason in report["not_run"].items()),
        "",
        "| ours | theirs | tokens per step | ours, tokens/s | theirs, tokens/s | ratio | identical texts |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        speed, theirs = row["tokens_per_second"], BASELINES[row["theirs"]]
        lines.append(
            f"| {row['ours']} | {theirs} | {row['tokens_per_step']:.2f} | {speed['ours']:.0f} | {speed['theirs']:.0f} "
            f"| {shown(row['ratio'])} | {row['identical']} of {row['of']} |"
        )
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> int:
    parser = bench.build_parser("bench_peers", __doc__, max_prompts=16)
    parser.add_argument("--draft_model", required=True, help="hub id or folder of a small LM with the same tokenizer")
    parser.add_argument("--draft_length", type=int, default=4)
    parser.add_argument("--compiled", action="store_true", help="compile transformers' on a CPU too, which takes long")
    arguments = parser.parse_args(argv)
    return run_command("bench_peers", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, write and print the table."""
    refuse_below(arguments, draft_length=1)
    bench.check_steps(arguments, arguments.draft_length)
    target = bench.load_target(arguments)
    model = Target.load(arguments.draft_model, dtype=arguments.dtype)
    prompts = bench.load_prompts(arguments, target)
    compiled = arguments.compiled or target.device.type == "cuda"
    rows, skipped = measure(target, model, prompts, arguments.draft_length, arguments.max_new_tokens, compiled)
    measured = {
        "draft_model": model.name,
        "transformers": transformers.__version__,
        "draft_length": arguments.draft_length,
        "not_run": skipped,
        "rows": rows,
    }
    bench.write(arguments, target, prompts, measured, "peers", markdown)


if __name__ == "__main__":
    sys.exit(main())
