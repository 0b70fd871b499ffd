"""`python -m benchmarks.linear`: what a matrix product of a few rows costs on this CPU, beside one of one row.

    python -m benchmarks.linear [--size 1024x4096]... [--rows 5]... [--output DIR]
    python -m benchmarks.linear --target examples/stdlib_target

torch's own product and the packed one (`speculator.target.linear`) in turns. Matrices of one size follow each other, as a
model's layers do, so that no cache holds them all. What a verify pass of as many tokens costs over a plain step is the
last two columns, as far as its matrices go. With --target it is measured: by torch's own products, by packed ones
alone, and as was chosen when the target was loaded.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from statistics import median

import torch
from torch import nn
from tqdm import tqdm

from speculator import HeadDrafter, MLPSpeculator, MLPSpeculatorConfig, Sampling, Target
from speculator.device import dtype_name, hardware
from speculator.drafters.costs import StepSeconds, clock
from speculator.drafters.costs import measure as measure_costs
from speculator.errors import OneLineParser, refuse, refuse_below, run_command
from speculator.files import make_folder, write_json, write_text
from speculator.tables import markdown_table
from speculator.target.linear import FAST_DTYPES, TIMED_ROWS, PackedLinear, pack_linears

_BYTES = 2**26  # of all matrices of a size
_SIZES = ("192x512", "192x4096", "1024x1024", "4096x4096")
_DRAFT = 4


def size(text: str) -> tuple[int, int]:
    """INxOUT."""
    inputs, outputs = map(int, text.split("x"))
    if min(inputs, outputs) < 1:
        raise ValueError
    return inputs, outputs


@torch.no_grad()
def measure(inputs: int, outputs: int, counts: list[int], dtype: torch.dtype, blocks: int) -> list[dict]:
    """A line for each number of rows: seconds of a product, the median over the blocks."""
    torch.manual_seed(0)
    number = max(2, _BYTES // (inputs * outputs * dtype.itemsize))
    layers = nn.ModuleList(nn.Linear(inputs, outputs, bias=False, dtype=dtype) for _ in range(number))
    kinds = {"torch": layers.requires_grad_(False), "packed": copy.deepcopy(layers)}
    for layer in pack_linears(kinds["packed"]):
        layer.packs = [True] * len(TIMED_ROWS)
    lines = []
    for rows in counts:
        x = torch.randn(rows, inputs, dtype=dtype)
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for block in range(blocks + 1):
            for name, layers in kinds.items():
                spent, _ = clock(lambda layers=layers, x=x: [layer(x) for layer in layers])
                if block:  # the first packs
                    seconds[name].append(spent / number)
        lines.append(
            {"in": inputs, "out": outputs, "rows": rows} | {name: median(each) for name, each in seconds.items()}
        )
    return lines


def markdown(report: dict) -> str:
    one = {(line["in"], line["out"]): line for line in report["lines"] if line["rows"] == 1}
    lines = [
        "# Matrix products of a few rows on a CPU",
        "",
        f"`python -m benchmarks.linear`: {report['hardware']}, {report['dtype']}, torch {report['torch']}; the median "
        f"of {report['blocks']} blocks in turns.",
        "",
    ]
    header = ("matrix", "rows", "torch's own, µs", "packed, µs", "ratio", "over one row: torch's own", "packed")
    table = []
    for line in report["lines"]:
        first = one[line["in"], line["out"]]
        micros = (f"{1e6 * line[way]:,.0f}" for way in ("torch", "packed"))
        over = (f"{line[way] / first[way]:.2f}" for way in ("torch", "packed"))
        ratio = f"{line['torch'] / line['packed']:.2f}"
        table.append((f"{line['in']} x {line['out']}", line["rows"], *micros, ratio, *over))
    return "\n".join([*lines, markdown_table(header, table), ""])


def passes(target: Target, blocks: int) -> list[dict]:
    """A line for each way to multiply: seconds of a plain step, and what a verify pass costs over it."""
    config = MLPSpeculatorConfig(
        vocab_size=target.vocab_size, emb_dim=target.hidden_size, inner_dim=16, n_predict=_DRAFT
    )
    drafter = HeadDrafter(MLPSpeculator(config).to(target.dtype))
    prompts = torch.randint(target.vocab_size, (1, 64)).tolist()
    layers = [layer for layer in target.model.modules() if isinstance(layer, PackedLinear)]
    ways = {name: [[name == "packed"] * len(TIMED_ROWS)] * len(layers) for name in ("torch's own", "packed")}
    ways["chosen"] = [layer.packs for layer in layers]
    costs = {name: StepSeconds() for name in ways}
    for block in range(blocks + 1):
        for name, packs in ways.items():
            for layer, each in zip(layers, packs, strict=True):
                layer.packs = each
            measure_costs(target, drafter, prompts, Sampling(), 4, costs[name] if block else StepSeconds())
    return [{"products": name} | each.figures(_DRAFT) for name, each in costs.items()]


def passes_table(target: Target, lines: list[dict]) -> str:
    rows = [
        (line["products"], f"{1e3 * line['decode_seconds']:.2f}", f"{line['verify_over_decode']:.2f}") for line in lines
    ]
    title = f"{target.name}, {hardware(target.device)}, {dtype_name(target.dtype)}, torch {torch.__version__}"
    header = ("products", "plain step, ms", "verify pass of five over a plain step")
    return f"{title}\n\n{markdown_table(header, rows)}\n"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.linear", description=__doc__)
    parser.add_argument("--size", type=size, action="append", help=f"INxOUT; repeatable; default: {', '.join(_SIZES)}")
    parser.add_argument(
        "--rows", type=int, action="append", help=f"repeatable; default: {', '.join(map(str, TIMED_ROWS))}"
    )
    parser.add_argument("--target", help="measure whole steps on this model instead")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--output", type=Path, help="folder for linear.json and .md")
    arguments = parser.parse_args(argv)
    return run_command("linear", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the figures."""
    dtype = getattr(torch, arguments.dtype)
    counts = sorted({1, *(arguments.rows or TIMED_ROWS)})
    refuse_below(arguments, blocks=1)
    refuse(
        (counts[0] < 1, "--rows must be at least 1"),
        (dtype not in FAST_DTYPES, f"--dtype {arguments.dtype}: oneDNN does not multiply it on this processor"),
    )
    if arguments.target:
        target = Target.load(arguments.target, dtype=arguments.dtype, device="cpu")
        print(passes_table(target, passes(target, arguments.blocks)))
        return
    if arguments.output:
        make_folder(arguments.output)
    sizes = arguments.size or [size(text) for text in _SIZES]
    report = {
        "hardware": hardware(torch.device("cpu")),
        "torch": torch.__version__,
        "dtype": dtype_name(dtype),
        "blocks": arguments.blocks,
        "lines": [
            line
            for inputs, outputs in tqdm(sizes, desc="products", unit="size")
            for line in measure(inputs, outputs, counts, dtype, arguments.blocks)
        ],
    }
    if arguments.output:
        write_json(arguments.output / "linear.json", report)
        write_text(arguments.output / "linear.md", markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    sys.exit(main())
