"""Compare continuous batching with static batches of the same engine.

    python -m benchmarks.engine [--target examples/stdlib_target] [--speculator S] [--requests 64] [--slots 8]

Ragged: answers have 16 to 256 tokens, so a static batch waits for its longest row. Equal: all answers have 128 tokens,
so both ways should cost the same. The two ways take turns; the ratio of tokens per second, prefill included, is the
median over turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

from transformers.utils import logging

from eval.suites import load_suite
from speculator import Drafter, Engine, HeadDrafter, Sampling, Target, load_head
from speculator.device import hardware
from speculator.errors import OneLineParser, refuse_below, run_command
from speculator.tables import markdown_table


def decoding(
    target: Target, drafter: Drafter | None, slots: int, prompts: list, limits: list[int], group: int
) -> Callable[[], int]:
    """Return a function that decodes all prompts, `group` of them per call of the engine, and counts the tokens."""
    engine = Engine(target, drafter, slots=slots)

    def work() -> int:
        tokens = 0
        for start in range(0, len(prompts), group):
            engine.forget()
            chunk, counts = prompts[start : start + group], limits[start : start + group]
            made = engine.generate(chunk, Sampling(), max_new_tokens=counts, eos_token_ids=()).check()
            tokens += sum(map(len, made.tokens))
        return tokens

    return work


def compare(ours: Callable[[], int], static: Callable[[], int], turns: int) -> tuple[float, float, float]:
    """Median tokens per second of both, and the median of their ratios."""
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            tokens = (ours, static)[which]()
            if turn:  # the first turn warms up
                rates[which].append(tokens / (time.perf_counter() - started))
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    return statistics.median(rates[0]), statistics.median(rates[1]), statistics.median(ratios)


def run(arguments: argparse.Namespace) -> None:
    """Measure and print the table."""
    refuse_below(arguments, requests=1, slots=1, turns=1)
    logging.set_verbosity_error()
    target, slots = Target.load(arguments.target), arguments.slots
    suite = load_suite("python-sources", target, prompt_tokens=64, max_prompts=arguments.requests, max_new_tokens=256)
    prompts = [suite.prompts[i % len(suite.prompts)] for i in range(arguments.requests)]
    draw = random.Random(0)
    limits = {"ragged": [draw.randint(16, 256) for _ in prompts], "equal": [128] * len(prompts)}
    head = load_head(arguments.speculator, target) if arguments.speculator else None
    print(f"{target.name}, {hardware(target.device)}, {len(prompts)} requests, {slots} slots, greedy\n")
    table = []
    for name, drafter in {"none": None, **({"head": HeadDrafter(head)} if head else {})}.items():
        for work, counts in limits.items():
            ours = decoding(target, drafter, slots, prompts, counts, len(prompts))
            static = decoding(target, drafter, slots, prompts, counts, slots)
            table.append((work, name, *(f"{value:.2f}" for value in compare(ours, static, arguments.turns))))
    print(markdown_table(("work", "drafter", "engine, tokens/s", "static, tokens/s", "ratio"), table))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--target", default="examples/stdlib_target", help="hub id or folder of the target")
    parser.add_argument("--speculator", help="folder of a trained head (default: plain decoding only)")
    parser.add_argument("--requests", type=int, default=64, help="number of requests (default: 64)")
    parser.add_argument("--slots", type=int, default=8, help="requests decoded at a time (default: 8)")
    parser.add_argument("--turns", type=int, default=5, help="timings of each way (default: 5)")
    arguments = parser.parse_args(argv)
    return run_command("engine", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
