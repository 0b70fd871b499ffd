"""`python -m benchmarks.engine`: requests that join as others end, against static batches of the same engine.

    python -m benchmarks.engine [--target examples/stdlib_target] [--speculator S] [--requests 64] [--slots 8]

Ragged: the answers end after 16 to 256 tokens; a static batch lasts as long as its longest. Equal: all end after 128,
so the two should cost the same. One at a time: in an engine of many slots, against one of a single slot. Each piece of
work is decoded both ways in turns; the ratio of tokens per second, prefills included, is the median over the turns.
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

Work = Callable[[], int]


def decoding(
    target: Target, drafter: Drafter | None, slots: int, prompts: list, limits: list[int], at_once: int
) -> Work:
    """So many at a time, the next ones when all of them have ended; of more than there are slots each joins when one is
    free.
    """
    engine = Engine(target, drafter, slots=slots)

    def work() -> int:
        tokens = 0
        for start in range(0, len(prompts), at_once):
            engine.forget()
            part, own = prompts[start : start + at_once], limits[start : start + at_once]
            made = engine.generate(part, Sampling(), max_new_tokens=own, eos_token_ids=())
            tokens += sum(map(len, made.tokens))
        return tokens

    return work


def ratio(ours: Work, theirs: Work, turns: int) -> tuple[float, float, float]:
    """Tokens per second of both, and the median of their ratio over turns in which either comes first."""
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            tokens = (ours, theirs)[which]()
            if turn:  # the first warms up
                rates[which].append(tokens / (time.perf_counter() - started))
    both = [a / b for a, b in zip(*rates, strict=True)]
    return statistics.median(rates[0]), statistics.median(rates[1]), statistics.median(both)


def run(arguments: argparse.Namespace) -> None:
    """Measure and print the table."""
    refuse_below(arguments, requests=1, slots=1, turns=1, prompt_tokens=1)
    logging.set_verbosity_error()
    target = Target.load(arguments.target)
    suite = load_suite(
        arguments.suite,
        target,
        prompt_tokens=arguments.prompt_tokens,
        max_prompts=arguments.requests,
        max_new_tokens=256,
    )
    prompts = [suite.prompts[i % len(suite.prompts)] for i in range(arguments.requests)]
    draw = random.Random(0)
    ragged = [draw.randint(16, 256) for _ in prompts]
    equal, slots = [128] * len(prompts), arguments.slots
    few = prompts[: max(1, len(prompts) // 8)]
    head = load_head(arguments.speculator, target) if arguments.speculator else None
    print(f"{target.name}, {hardware(target.device)}, {len(prompts)} requests, {slots} slots, greedy\n")
    table = []
    for name, drafter in {"none": None, **({"head": HeadDrafter(head)} if head else {})}.items():
        works = {
            "ragged": (prompts, ragged, len(prompts), slots),
            "equal": (prompts, equal, len(prompts), slots),
            "one at a time": (few, equal, 1, 1),
        }
        for work, (asked, limits, joining, static) in works.items():
            ours = decoding(target, drafter, slots, asked, limits, joining)
            theirs = decoding(target, drafter, static, asked, limits, static)
            a, b, gain = ratio(ours, theirs, arguments.turns)
            table.append((work, name, f"{a:.1f}", f"{b:.1f}", f"{gain:.2f}"))
    print(markdown_table(("work", "drafter", "engine, tokens/s", "static, tokens/s", "ratio"), table))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--target", default="examples/stdlib_target", help="default: the embedded target")
    parser.add_argument("--speculator", help="folder of a trained head; default: plain decoding alone")
    parser.add_argument("--suite", default="python-sources", help="a suite's name or file; default: python-sources")
    parser.add_argument("--requests", type=int, default=64, help="default: 64")
    parser.add_argument("--slots", type=int, default=8, help="default: 8")
    parser.add_argument("--prompt_tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--turns", type=int, default=5, help="timings of each; default: 5")
    arguments = parser.parse_args(argv)
    return run_command("engine", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
