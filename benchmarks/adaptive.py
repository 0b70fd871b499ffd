"""`python -m benchmarks.adaptive`: adaptive drafting against plain decoding and every chain of the same head.

    python -m benchmarks.adaptive --target T --speculator S [--suite NAME|FILE] [--batch_size N]... [--temperature X]...

Prints a table: tokens per second of every decoder. The prompts of a suite go group by group through all decoders, in an
order that rotates. A group has two prompts per slot, and only steps in which every slot decodes count, because drafts
that let rows end early would leave the others to steps of fewer rows.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product

from tqdm import tqdm

from data.mixture import PYTHON_SOURCES
from eval.flags import add_flags
from eval.suites import Suite, check_flags, check_rows, first_turns
from speculator import Engine, HeadDrafter, Sampling, Target, load_head
from speculator.cli import model_flags
from speculator.drafters import Drafter
from speculator.drafters.tuning import adaptive_drafter, read_tuning
from speculator.errors import OneLineParser, run_command
from speculator.tables import markdown_table


def measure(
    target: Target, drafters: dict[str, Drafter | None], suite: Suite, temperature: float, rows: int, count: int
) -> dict[str, float]:
    """Tokens per second of each decoder."""
    engines = {name: Engine(target, drafter, slots=rows) for name, drafter in drafters.items()}
    sums = {name: [0, 0.0] for name in engines}
    size, order = 2 * rows, list(engines)
    for engine in engines.values():  # the first steps of a shape allocate
        engine.generate(suite.prompts[:rows], Sampling(temperature), max_new_tokens=8)
    groups = range(0, len(suite.prompts) - size + 1, size)
    for start in tqdm(groups, desc=f"{rows} rows, temperature {temperature:g}", unit="group"):
        order = order[1:] + order[:1]
        for name in order:
            tokens, seconds = decode(engines[name], suite, range(start, start + size), temperature, rows, count)
            sums[name][0] += tokens
            sums[name][1] += seconds
    return {name: tokens / seconds for name, (tokens, seconds) in sums.items()}


def decode(
    engine: Engine, suite: Suite, prompts: range, temperature: float, rows: int, count: int
) -> tuple[int, float]:
    """Tokens and seconds of the decoding steps in which every slot is in use."""
    eos = engine.target.eos_token_ids if suite.chat else ()
    began = engine.decode_seconds
    requests = [
        engine.submit(suite.prompts[i], Sampling(temperature, seed=i), max_new_tokens=count, eos_token_ids=eos)
        for i in prompts
    ]
    while engine.step() and sum(not request.finish_reason for request in requests) >= rows:
        pass
    tokens = sum(max(0, len(request.tokens) - 1) for request in requests)  # the first one is the prefill's
    for request in requests:
        request.cancel()
    return tokens, engine.decode_seconds - began


def main(argv: list[str] | None = None) -> int:
    """Run as a command."""
    parser = OneLineParser(prog="python -m benchmarks.adaptive", description=__doc__)
    add_flags(parser, max_prompts=32)
    parser.add_argument("--speculator", required=True, help="folder of a trained head")
    parser.add_argument("--suite", default=PYTHON_SOURCES, help="prompts (default: python-sources)")
    parser.add_argument("--batch_size", type=int, action="append", help="rows; repeatable (default: 1 and 8)")
    parser.add_argument("--temperature", type=float, action="append", help="repeatable (default: 0 and 1)")
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure every batch size and temperature, and print the table."""
    check_flags(arguments)
    sizes, temperatures = arguments.batch_size or [1, 8], arguments.temperature or [0.0, 1.0]
    check_rows(2 * max(sizes), arguments.max_prompts)
    target = model_flags.load_target(arguments)
    head = load_head(arguments.speculator, target)
    suite = first_turns(arguments, arguments.suite, target)
    tuning = read_tuning(arguments.speculator, head)
    table = []
    for rows, temperature in product(sizes, temperatures):
        drafters: dict[str, Drafter | None] = {"plain": None}
        drafters |= {f"chain of {length}": HeadDrafter(head, length) for length in range(1, head.n_predict + 1)}
        drafters["adaptive"] = adaptive_drafter(head, target, tuning, temperatures=[temperature], batch_size=rows)
        speeds = measure(target, drafters, suite, temperature, rows, arguments.max_new_tokens)
        best = max(speed for name, speed in speeds.items() if name != "adaptive")
        figures = [f"{speed:.1f}" for speed in speeds.values()]
        table.append([rows, f"{temperature:g}", *figures, f"{speeds['adaptive'] / best:.3f}"])
    print(markdown_table(["rows", "temperature", *drafters, "adaptive / best fixed"], table))


if __name__ == "__main__":
    sys.exit(main())
