"""Compare two reports of `python -m eval`: the differences B - A, with 95% intervals.

The measurements of the two reports count as independent (MOVER, Zou and Donner 2008), since a report stores intervals
and not the samples behind them. If both decoded the same prompts, the interval is wider than necessary.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from eval.metrics import shown
from eval.report import length_with_interval
from speculator.errors import OneLineParser, UserError, show
from speculator.files import parse_json, read_text
from speculator.tables import markdown_table

_KEY = ("name", "temperature", "batch_size", "drafter", "num_speculative_tokens")


def build_parser() -> OneLineParser:
    """The flags of `compare`."""
    parser = OneLineParser(prog="python -m eval compare", description=__doc__)
    parser.add_argument("a", type=Path, metavar="A/report.json", help="first report")
    parser.add_argument("b", type=Path, metavar="B/report.json", help="second report")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Print the table."""
    a, b = _read(arguments.a), _read(arguments.b)
    try:
        show(table(a, b))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{arguments.a} or {arguments.b} is not a complete report.json: {error}") from None


def table(a: dict, b: dict) -> str:
    """One line for each figure with an interval that both reports have."""
    others = {_key(row): row for row in b["suites"]}
    common = [(row, others[_key(row)]) for row in a["suites"] if _key(row) in others and row["drafter"] != "none"]
    if not common:
        raise UserError("the reports have no suite, temperature, batch size and drafter in common")
    lines = [f"{name}: {a[name]} | {b[name]}" for name in ("target", "speculator", "hardware") if a[name] != b[name]]
    settings = [(name, a["settings"].get(name), b["settings"].get(name)) for name in {**a["settings"], **b["settings"]}]
    lines += [f"{name}: {ours} | {theirs}" for name, ours, theirs in settings if ours != theirs]
    rules = [(row["drafter"], row["rule"], other["rule"]) for row, other in common]
    lines += dict.fromkeys(f"rule, {drafter}: {ours} | {theirs}" for drafter, ours, theirs in rules if ours != theirs)
    header = ("suite", "temperature", "drafter", "figure", "A", "B", "B - A", "")
    rows = []
    for row, other in common:
        batch = f", batch {row['batch_size']}" if row["batch_size"] > 1 else ""
        where = (f"{row['name']}{batch}", f"{row['temperature']:g}", f"{row['drafter']} of {_key(row)[-1]}")
        theirs = _figures(other)
        for name, figure in _figures(row).items():
            if name in theirs:
                gap = difference(figure, theirs[name])
                verdict = "" if gap["low"] is None else "differs" if gap["low"] > 0 or gap["high"] < 0 else "same"
                rows.append((*where, name, shown(figure), shown(theirs[name]), shown(gap, "+.2f"), verdict))
    lines += ["", markdown_table(header, rows)]
    missing = len(a["suites"]) + len(b["suites"]) - 2 * sum(_key(row) in others for row in a["suites"])
    if missing:
        lines += ["", f"{missing} rows are in only one of the reports."]
    return "\n".join(lines)


def difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The difference b - a of two independent figures with its interval, without bounds if one has none.

    low = (b - a) - sqrt((b - b_low)^2 + (a_high - a)^2), and high with the other bounds.
    """
    value = b["value"] - a["value"]
    if a["low"] is None or b["low"] is None:
        return {"value": value, "low": None, "high": None}
    return {
        "value": value,
        "low": value - math.hypot(b["value"] - b["low"], a["high"] - a["value"]),
        "high": value + math.hypot(b["high"] - b["value"], a["value"] - a["low"]),
    }


def _figures(row: dict) -> dict[str, dict[str, Any]]:
    speedups = {f"speedup over {name}": ratio for name, ratio in row["speedup"].items()}
    return {"acceptance length": length_with_interval(row), **speedups}


def _key(row: dict) -> tuple:
    return tuple(row[name] for name in _KEY)


def _read(path: Path) -> dict:
    report = parse_json(read_text(path), str(path))
    if not isinstance(report, dict) or report.get("schema") != 2:
        raise UserError(f'{path} is not a report.json of `python -m eval` with "schema": 2')
    return report
