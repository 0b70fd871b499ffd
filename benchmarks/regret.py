"""`python -m benchmarks.regret`: drafts chosen before each step, against every fixed choice, cell by cell.

    python -m benchmarks.regret --target T --speculator S [--suite NAME|FILE]... --output DIR

Writes regret.json, regret.md and regret.png. A cell is a suite, a batch size and a temperature. Its prompts go batch by
batch through every decoder before the next batch comes, in an order that rotates; each has one engine for the cell. The
best fixed choice is known in hindsight only: of a cell, and of all cells together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import product

from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import common
from data.sources import PYTHON_SOURCES
from eval.suites import Suite, suite_of
from speculator import Engine, HeadDrafter, MixedDrafter, NgramDrafter, Sampling, Target, load_head
from speculator.device import synchronize
from speculator.drafters import Drafter
from speculator.drafters.auto import AutoDrafter
from speculator.drafters.controller import best
from speculator.errors import UserError, refuse, run_command
from speculator.files import make_folder
from speculator.tables import markdown_table
from speculator.tuned import automatic, described

_COPIES = (2, 4, 8)
_BESIDE = 4


def decoders(auto: AutoDrafter, greedy: bool, rows: int) -> dict[str, Drafter | None]:
    """Every fixed choice, of the mixed ones that of the head's fastest draft, and the one that goes on choosing."""
    heads: dict[str, Drafter | None] = {}
    for choice in auto.choices:
        name = described(choice.shape)
        heads[f"{name}, another" if name in heads else name] = HeadDrafter(auto.head, choice.shape)
    fastest = HeadDrafter(auto.head, best(auto.choices, auto.cost, greedy, rows))
    heads[f"{described(fastest.shape)}, n-gram {_BESIDE}"] = MixedDrafter(fastest, NgramDrafter(_BESIDE))
    return {"none": None, **{f"n-gram {n}": NgramDrafter(n) for n in _COPIES}, **heads, "auto": auto}


def measure(target: Target, auto: AutoDrafter, suite: Suite, temperature: float, count: int, batch_size: int) -> dict:
    """Tokens per second of each decoder in a cell."""
    every = decoders(auto, Sampling(temperature).greedy, batch_size)
    engines = {name: Engine(target, drafter, slots=batch_size) for name, drafter in every.items()}
    tokens, seconds = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
    eos = target.eos_token_ids if suite.chat else ()
    for engine in engines.values():  # the first pass through a shape allocates
        engine.generate(suite.prompts[:batch_size], Sampling(temperature), max_new_tokens=min(8, count))
        engine.forget()
    order = list(engines)
    cell = f"{suite.name}, temperature {temperature:g}, batch {batch_size}"
    for start in tqdm(range(0, len(suite.prompts), batch_size), desc=cell, unit="batch"):
        order = order[1:] + order[:1]
        for name in order:
            synchronize()
            own, prompts = Sampling(temperature, seed=start), suite.prompts[start : start + batch_size]
            made = engines[name].generate(prompts, own, max_new_tokens=count, eos_token_ids=eos)
            tokens[name] += sum(len(row) - 1 for row in made.tokens)
            seconds[name] += made.decode_seconds
    speeds = {name: tokens[name] / seconds[name] for name in engines}
    return {"suite": suite.name, "temperature": temperature, "batch_size": batch_size, "tokens_per_second": speeds}


def summary(cells: list[dict]) -> dict:
    """Of each cell auto against the best fixed choice and plain decoding; over all against the best single choice."""
    shared = set.intersection(*(set(cell["tokens_per_second"]) for cell in cells)) - {"auto"}
    relative: dict[str, list[float]] = {name: [] for name in shared}
    for cell in cells:
        speeds = cell["tokens_per_second"]
        cell["best_fixed"] = max(speeds.keys() - {"auto"}, key=speeds.__getitem__)
        cell["auto_over_best"] = speeds["auto"] / speeds[cell["best_fixed"]]
        cell["auto_over_plain"] = speeds["auto"] / speeds["none"]
        for name in shared:
            relative[name].append(speeds["auto"] / speeds[name])
    over = {name: statistics.geometric_mean(ratios) for name, ratios in relative.items()}
    single = min(over, key=over.__getitem__)
    return {"cells": cells, "best_single": single, "auto_over_best_single": over[single]}


def markdown(report: dict) -> str:
    speeds = ("plain, tokens/s", "best fixed choice", "its tokens/s", "auto's", "auto / best", "auto / plain")
    header = ("suite", "temperature", "batch", *speeds)
    table = [
        (
            cell["suite"],
            f"{cell['temperature']:g}",
            cell["batch_size"],
            f"{cell['tokens_per_second']['none']:.0f}",
            cell["best_fixed"],
            f"{cell['tokens_per_second'][cell['best_fixed']]:.0f}",
            f"{cell['tokens_per_second']['auto']:.0f}",
            f"{cell['auto_over_best']:.2f}",
            f"{cell['auto_over_plain']:.2f}",
        )
        for cell in report["cells"]
    ]
    lines = [
        "# Drafts chosen before each step",
        "",
        f"Target `{report['target']}`, head `{report['speculator']}`, {report['hardware']}, {report['dtype']}, at most "
        f"{report['max_new_tokens']} new tokens a prompt.",
        "",
        markdown_table(header, table),
        "",
        f"Against the best single fixed choice over all cells ({report['best_single']}): "
        f"{report['auto_over_best_single']:.2f} times its tokens/s, in the geometric mean.",
        "",
        "![every fixed choice and auto](regret.png)",
        "",
    ]
    return "\n".join(lines)


def plot(cells: list[dict]) -> Figure:
    """Speeds over plain decoding's: a column for each cell."""
    figure = Figure(figsize=(max(6.0, 0.6 * len(cells)), 5), layout="constrained")
    axes = figure.subplots()
    for column, cell in enumerate(cells):
        speeds = {name: speed / cell["tokens_per_second"]["none"] for name, speed in cell["tokens_per_second"].items()}
        auto = speeds.pop("auto")
        axes.scatter([column] * len(speeds), list(speeds.values()), color="#54aeff", s=18, label=_once(column, "fixed"))
        axes.scatter([column], [auto], color="#0a3069", marker="_", s=300, linewidth=2.5, label=_once(column, "auto"))
    axes.axhline(1, color="#57606a", linewidth=0.8)
    names = [f"{cell['suite']}\nT={cell['temperature']:g}, batch {cell['batch_size']}" for cell in cells]
    axes.set_xticks(range(len(cells)), names, rotation=90, fontsize=7)
    axes.set_ylabel("tokens/s over plain decoding's")
    axes.legend()
    return figure


def _once(column: int, label: str) -> str | None:
    return None if column else label


def main(argv: list[str] | None = None) -> int:
    parser = common.build_parser("regret", __doc__, max_prompts=24)
    parser.add_argument("--speculator", required=True, help="folder of a head that `python -m eval tune` has measured")
    parser.add_argument("--suite", action="append", help="name or file; repeatable; default: python-sources")
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 1")
    parser.add_argument("--batch_size", type=int, action="append", help="default: 1, 4 and 16")
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, write and print the table, and plot it."""
    sizes, temperatures = arguments.batch_size or [1, 4, 16], arguments.temperature or [0.0, 1.0]
    refuse((min(sizes) < 1, "--batch_size must be at least 1"))
    target = common.load_target(arguments)
    head = load_head(arguments.speculator, target)
    parts = [suite_of(arguments, name, target) for name in arguments.suite or [PYTHON_SOURCES]]
    cells = []
    for suite, temperature, size in product(parts, temperatures, sizes):
        auto = automatic(arguments.speculator, target, head, [temperature], size)
        if auto is None:
            raise UserError(
                f"{arguments.speculator} was not tuned at --temperature {temperature:g}: python -m eval tune --target "
                f"{target.name} --speculator {arguments.speculator} --temperature {temperature:g}"
            )
        if not cells:
            make_folder(arguments.output)
        cells.append(measure(target, auto, suite, temperature, arguments.max_new_tokens, size))
    measured = {"speculator": arguments.speculator, **summary(cells)}
    prompts = [prompt for suite in parts for prompt in suite.prompts]
    common.write(arguments, target, prompts, measured, "regret", markdown)
    plot(cells).savefig(arguments.output / "regret.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())
