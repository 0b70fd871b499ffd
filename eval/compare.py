"""What differs between two reports of `python -m eval`: B less A, with 95% intervals.

The interval of a difference is put together from those of the two figures (MOVER, Zou and Donner 2008), as of
independent measurements: where both reports read the same prompts it is wider than it need be.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from eval.metrics import shown
from eval.report import per_step
from speculator.errors import OneLineParser, UserError, show
from speculator.files import parse_json, read_text
from speculator.tables import markdown_table

_KEY = ("name", "temperature", "batch_size", "drafter", "num_speculative_tokens")


def build_parser() -> OneLineParser:
    """The flags of `compare`."""
    parser = OneLineParser(prog="python -m eval compare", description=__doc__)
    parser.add_argument("a", type=Path, metavar="A/report.json")
    parser.add_argument("b", type=Path, metavar="B/report.json")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Print the table."""
    show(table(_read(arguments.a), _read(arguments.b)))


def table(a: dict, b: dict) -> str:
    """A line for every figure with an interval that both reports have.

    Raises:
        UserError: they have no row in common.
    """
    theirs = {_key(row): row for row in b["suites"]}
    common = [(row, theirs[_key(row)]) for row in a["suites"] if _key(row) in theirs and row["drafter"] != "none"]
    if not common:
        raise UserError("the reports have no suite, temperature, batch size and drafter in common")
    lines = [f"{name}: {a[name]} | {b[name]}" for name in ("target", "speculator", "hardware") if a[name] != b[name]]
    settings = {**a["settings"], **b["settings"]}
    lines += [
        f"{name}: {a['settings'].get(name)} | {b['settings'].get(name)}"
        for name in settings
        if a["settings"].get(name) != b["settings"].get(name)
    ]
    rules = [(row["drafter"], row.get("rule"), other.get("rule")) for row, other in common]
    lines += dict.fromkeys(f"rule, {drafter}: {ours} | {other}" for drafter, ours, other in rules if ours != other)
    header = ("suite", "temperature", "drafter", "figure", "A", "B", "B - A", "")
    rows = []
    for ours, other in common:
        batch = f", batch {ours['batch_size']}" if ours.get("batch_size", 1) > 1 else ""
        where = (f"{ours['name']}{batch}", f"{ours['temperature']:g}", f"{ours['drafter']} of {_key(ours)[-1]}")
        for name, figure in _figures(ours).items():
            if name in (found := _figures(other)):
                gap = difference(figure, found[name])
                verdict = "" if gap["low"] is None else "differs" if gap["low"] > 0 or gap["high"] < 0 else "same"
                rows.append((*where, name, shown(figure), shown(found[name]), shown(gap, "+.2f"), verdict))
    lines += ["", markdown_table(header, rows)]
    missing = len(a["suites"]) + len(b["suites"]) - 2 * sum(_key(row) in theirs for row in a["suites"])
    if missing:
        lines += ["", f"{missing} rows are in one of the reports alone."]
    return "\n".join(lines)


def difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """b - a, with the interval of a difference of independent figures; None for its bounds where one has no interval.

    low = (b - a) - sqrt((b - b_low)^2 + (a_high - a)^2), and high with the other ends.
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
    return {"tokens per step": per_step(row), **speedups}


def _key(row: dict) -> tuple:
    defaults = {"batch_size": 1, "num_speculative_tokens": len(row["acceptance_by_position"])}
    return tuple(row.get(name, defaults.get(name)) for name in _KEY)


def _read(path: Path) -> dict:
    """A report, with all that is compared where and what it should be.

    Raises:
        UserError: no such file, or other JSON.
    """
    try:
        text = read_text(path)
    except UserError as error:
        raise UserError(f"can't read {error}") from None
    try:
        report = parse_json(text, "")
        for name in ("target", "speculator", "hardware"):
            _expect(report[name], str)
        _expect(report["settings"], dict)
        for row in _expect(report["suites"], list):
            for name in ("name", "drafter"):
                _expect(row[name], str)
            for name in ("temperature", "batch_size", "num_speculative_tokens"):
                _expect(row.get(name, 1), int, float)
            _expect(row["temperature"], int, float)
            _expect(row["acceptance_by_position"], list)
            for figure in _figures(row).values() if row["drafter"] != "none" else ():
                _expect(figure["value"], int, float)
                if figure["low"] is not None or figure["high"] is not None:
                    _expect(figure["low"], int, float)
                    _expect(figure["high"], int, float)
    except (UserError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is not a report.json of `python -m eval`") from None
    return report


def _expect(value: Any, *kinds: type) -> Any:
    """A value of one of these types; of numbers a finite one that a float can hold."""
    number = isinstance(value, int | float)
    if not isinstance(value, kinds) or isinstance(value, bool) or (number and not abs(value) < 1e300):
        raise ValueError(value)
    return value
