"""`python -m benchmarks.regret`: drafts chosen before each step, against every fixed choice, cell by cell.

    python -m benchmarks.regret --target T --speculator S [--suite NAME|FILE]... --output DIR

Writes regret.json, regret.md and regret.png. A cell is a suite, a batch size and a temperature. Its prompts go part by
part through every decoder before the next part comes, in an order that rotates; each has one engine for the cell. Who
ends makes room for who waits, and only steps in which every slot decodes count: rows that drafts let end early would
else leave the others to steps of few. A part has two prompts for each slot, of a single slot one.

The best fixed choice is known in hindsight only: of a cell, and of all cells together. Of many choices the one that
looks best was also lucky, so auto is besides compared with the one that was best in a cell's other parts, part by part.

`--num_samples n` decodes n texts of each prompt, those of a prompt beside each other: they share its prefill, and
lookups look in all of them. A few choices, and the same rows beside other prompts' ("apart"); all steps and the time of
prefills count, and nothing is kept from part to part.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import product

from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import common
from data.sources import PYTHON_SOURCES
from eval.suites import Suite, check_rows, suite_of
from speculator import Engine, HeadDrafter, HybridDrafter, NgramDrafter, Sampling, Target, load_head
from speculator.decoding.request import Request
from speculator.device import synchronize
from speculator.drafters import Drafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.controller import fastest_shape
from speculator.drafters.ngram import MEMORY
from speculator.drafters.tuned import automatic, described
from speculator.errors import UserError, refuse, run_command
from speculator.files import make_folder
from speculator.tables import markdown_table

_COPIES = (2, 4, 8)
_BESIDE = 4
_APART = ", apart"


def decoders(auto: AdaptiveDrafter, greedy: bool, rows: int) -> dict[str, Drafter | None]:
    """Every fixed choice, of the mixed ones that of the head's fastest draft, and the one that goes on choosing."""
    heads: dict[str, Drafter | None] = {}
    for choice in auto.choices:
        name = described(choice.shape)
        heads[f"{name}, another" if name in heads else name] = HeadDrafter(auto.head, choice.shape)
    fastest = HeadDrafter(auto.head, fastest_shape(auto.choices, auto.cost, greedy, rows))
    heads[f"{described(fastest.shape)}, n-gram {_BESIDE}"] = HybridDrafter(fastest, NgramDrafter(_BESIDE))
    return {"none": None, **{f"n-gram {n}": NgramDrafter(n) for n in _COPIES}, **heads, "auto": auto}


def samplers(auto: AdaptiveDrafter, alone: AdaptiveDrafter, rows: int) -> dict[str, Drafter | None]:
    """Who decodes several texts of a prompt: fixed choices, auto, and what knows nothing of its neighbours."""
    fixed = HeadDrafter(auto.head, fastest_shape(auto.choices, auto.cost, False, rows))
    every = {"none": None, f"n-gram {_BESIDE}": NgramDrafter(_BESIDE, memory=MEMORY), described(fixed.shape): fixed}
    return {**every, "none" + _APART: None, "auto" + _APART: alone, "auto": auto}


def measure(
    target: Target,
    every: dict[str, Drafter | None],
    suite: Suite,
    temperature: float,
    count: int,
    batch_size: int,
    samples: int = 1,
) -> dict:
    """Tokens per second and per step of each decoder in a cell."""
    engines = {name: Engine(target, drafter, slots=batch_size) for name, drafter in every.items()}
    parts: dict[str, list[tuple[int, float, int]]] = {name: [] for name in engines}  # tokens, seconds, steps
    eos = target.eos_token_ids if suite.chat else ()
    prompts = [prompt for prompt in suite.prompts for _ in range(samples)]
    rows = [(prompt, Sampling(temperature, seed=number)) for number, prompt in enumerate(prompts)]
    apart = [row for sample in range(samples) for row in rows[sample::samples]]
    for engine in engines.values():  # the first pass through a shape allocates
        engine.generate(prompts[:batch_size], Sampling(temperature), max_new_tokens=min(8, count))
        engine.forget()
    order = list(engines)
    cell = f"{suite.name}, temperature {temperature:g}, batch {batch_size}"
    size = batch_size if batch_size == 1 or samples > 1 else 2 * batch_size
    for start in tqdm(range(0, len(rows), size), desc=cell, unit="part"):
        order = order[1:] + order[:1]
        for name in order:
            engine, part = engines[name], (apart if name.endswith(_APART) else rows)[start : start + size]
            requests = [engine.submit(*row, max_new_tokens=count, eos_token_ids=eos) for row in part]
            if samples > 1:
                parts[name].append(decoded(engine, requests, whole=True))
                engine.forget()
            elif len(part) >= batch_size:
                parts[name].append(decoded(engine, requests))
            else:  # a rest that would never fill the slots
                engine.run()
    sums = {name: [sum(column) for column in zip(*own, strict=True)] for name, own in parts.items()}
    return {
        "suite": suite.name,
        "temperature": temperature,
        "batch_size": batch_size,
        "num_samples": samples,
        "tokens_per_second": {name: tokens / seconds for name, (tokens, seconds, _) in sums.items()},
        "acceptance_length": {name: tokens / steps for name, (tokens, _, steps) in sums.items()},
        "batches": {name: [own[:2] for own in each] for name, each in parts.items()},
    }


def decoded(engine: Engine, requests: Sequence[Request], whole: bool = False) -> tuple[int, float, int]:
    """Tokens, seconds and rows' steps of decoding these requests: of the steps in which every slot decodes; or `whole`:
    of all, prefills included."""
    slots, began = len(engine.scheduler.slots), engine.prefill_seconds

    def so_far() -> tuple[int, float, int]:
        tokens = sum(max(0, len(request.tokens) - 1) for request in requests)  # the first is the prefill's
        return tokens, engine.decode_seconds, sum(len(request.steps) for request in requests)

    sums, more = [0.0, 0.0, 0.0], True
    synchronize()
    while more:
        before = so_far()
        more = engine.step()
        step = [after - earlier for after, earlier in zip(so_far(), before, strict=True)]
        if whole or step[2] == slots:
            sums = [total + own for total, own in zip(sums, step, strict=True)]
    tokens, seconds, steps = sums
    return round(tokens), seconds + (engine.prefill_seconds - began if whole else 0.0), round(steps)


def without_luck(cell: dict) -> float | None:
    """Auto's tokens per second over those of the fixed choice that was the best in the other parts, taken part by part;
    None of one part."""
    batches = cell["batches"]
    count = len(batches["auto"])
    if count == 1:
        return None
    chosen = []
    for left_out in range(count):
        others = {name: _speed([*batches[name][:left_out], *batches[name][left_out + 1 :]]) for name in _fixed(cell)}
        chosen.append(batches[max(others, key=others.__getitem__)][left_out])
    return _speed(batches["auto"]) / _speed(chosen)


def _speed(batches: Sequence[Sequence[float]]) -> float:
    return sum(tokens for tokens, _ in batches) / sum(seconds for _, seconds in batches)


def summary(cells: list[dict]) -> dict:
    """Of each cell auto against the best fixed choice and plain decoding; over all against the best single choice."""
    shared = set.intersection(*(_fixed(cell) for cell in cells))
    relative: dict[str, list[float]] = {name: [] for name in shared}
    for cell in cells:
        speeds = cell["tokens_per_second"]
        cell["best_fixed"] = max(_fixed(cell), key=speeds.__getitem__)
        cell["auto_over_best"] = speeds["auto"] / speeds[cell["best_fixed"]]
        cell["auto_over_best_elsewhere"] = without_luck(cell)
        cell["auto_over_plain"] = speeds["auto"] / speeds["none"]
        apart = {name: speeds["auto"] / speeds[name] for name in speeds if name.endswith(_APART)}
        if apart:
            cell["auto_over_apart"] = apart
        for name in shared:
            relative[name].append(speeds["auto"] / speeds[name])
    over = {name: statistics.geometric_mean(ratios) for name, ratios in relative.items()}
    single = min(over, key=over.__getitem__)
    return {"cells": cells, "best_single": single, "auto_over_best_single": over[single]}


def _fixed(cell: dict) -> set[str]:
    return {name for name in cell["tokens_per_second"] if name != "auto" and not name.endswith(_APART)}


def markdown(report: dict) -> str:
    speeds = ("plain, tokens/s", "best fixed choice", "its tokens/s", "auto's")
    header = ("suite", "temperature", "batch", *speeds, "auto / best", "auto / best of other parts", "auto / plain")
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
            "" if cell["auto_over_best_elsewhere"] is None else f"{cell['auto_over_best_elsewhere']:.2f}",
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
        *(
            f"{cell['suite']}, temperature {cell['temperature']:g}, {cell['num_samples']} texts of each prompt, "
            f"prefills counted: auto has {ratio:.2f} times the tokens/s of `{name}`.\n"
            for cell in report["cells"]
            for name, ratio in cell.get("auto_over_apart", {}).items()
        ),
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
    parser.add_argument("--batch_size", type=int, action="append", help="default: 1, 4 and 16, or as many as samples")
    parser.add_argument("--num_samples", type=int, default=1, help="texts of each prompt, decoded beside each other")
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, write and print the table, and plot it."""
    samples, several = arguments.num_samples, arguments.num_samples > 1
    sizes = arguments.batch_size or ([samples] if several else [1, 4, 16])
    temperatures = arguments.temperature or [0.0, 1.0][several:]
    refuse(
        (min(*sizes, samples) < 1, "--batch_size and --num_samples must be at least 1"),
        (several and not min(temperatures), f"--num_samples {samples} at --temperature 0 would be equal texts"),
    )
    check_rows(max(sizes), arguments.max_prompts * samples)
    target = common.load_target(arguments)
    head = load_head(arguments.speculator, target)
    parts = [suite_of(arguments, name, target) for name in arguments.suite or [PYTHON_SOURCES]]
    cells = []
    for suite, temperature, size in product(parts, temperatures, sizes):
        folder = arguments.speculator
        auto = automatic(folder, target, head, [temperature], size, MEMORY if several else 0)
        alone = automatic(folder, target, head, [temperature], size)
        if auto is None or alone is None:
            raise UserError(
                f"{arguments.speculator} was not tuned at --temperature {temperature:g}: python -m eval tune --target "
                f"{target.name} --speculator {arguments.speculator} --temperature {temperature:g}"
            )
        if not cells:
            make_folder(arguments.output)
        greedy = Sampling(temperature).greedy
        every = samplers(auto, alone, size) if several else decoders(auto, greedy, size)
        cells.append(measure(target, every, suite, temperature, arguments.max_new_tokens, size, samples))
    measured = {"speculator": arguments.speculator, **summary(cells)}
    prompts = [prompt for suite in parts for prompt in suite.prompts]
    common.write(arguments, target, prompts, measured, "regret", markdown)
    plot(cells).savefig(arguments.output / "regret.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())
