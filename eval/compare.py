"""`speculator eval compare`: see `eval.flags.compare`.

Rows of other prompts, turns or limits of new tokens, or with and without a chat template, have no verdict.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from eval.report import UNFINISHED
from speculator.errors import UserError, refuse, show
from speculator.files import parse_json, read_text
from speculator.report import Interval, Report, ReportRow
from speculator.tables import length_with_interval, markdown_table, shown
from speculator.terminal import log

_KEY: tuple[Literal["name", "temperature", "batch_size", "drafter"], ...]
_KEY = "name", "temperature", "batch_size", "drafter"
_NAMES: tuple[Literal["target", "speculator", "hardware"], ...] = ("target", "speculator", "hardware")
_CONDITIONS = ("prompts", "turns", "max_new_tokens", "chat")
_CONTENT = "digest"
"""A condition too, unless the target is another, which has other tokens for the same questions."""
_LENGTH: Final = "num_speculative_tokens"
_BOUNDED = ("adaptive", "ngram")
"""Decoders for which that is a bound, and not the length of each draft."""


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator eval compare`: print what differs between the reports A and B, and a table of their figures."""
    a, b = _read(arguments.a), _read(arguments.b)
    try:
        show(table(a, b))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{arguments.a} or {arguments.b} is not a complete report.json: {error}") from None


def table(a: Report, b: Report) -> str:
    """Return as text what differs between two reports, and a table of the figures that both have with an interval.

    Raises a UserError if no row of one has a counterpart in the other.

    Args:
        a, b: contents of report.json.
    """
    common = list(pairs(a["suites"], b["suites"]))
    if not common:
        raise UserError("the reports have no suite, temperature, batch size and decoder in common")
    lines = _changes({name: a[name] for name in _NAMES}, {name: b[name] for name in _NAMES})
    lines += _changes(a["versions"], b["versions"]) + _changes(a["settings"], b["settings"])
    names = _CONDITIONS if a["target"] != b["target"] else (*_CONDITIONS, _CONTENT)
    for row, other in common:
        lines += _changes({f"rule, {row['drafter']}": row["rule"]}, {f"rule, {row['drafter']}": other["rule"]})
        lines += _changes(_conditions(row, names), _conditions(other, names))
    lines = list(dict.fromkeys(lines))
    header = ("suite", "temperature", "decoder", "figure", "A", "B", "B - A", "")
    rows = []
    for row, other in common:
        batch = f", batch {row['batch_size']}" if row["batch_size"] > 1 else ""
        where = (f"{row['name']}{batch}", f"{row['temperature']:g}", _decoder(row, other))
        theirs = _figures(other)
        for name, figure in _figures(row).items():
            if name in theirs:
                gap = difference(figure, theirs[name])
                low, high = gap["low"], gap["high"]
                verdict = "" if low is None or high is None else "differs" if low > 0 or high < 0 else "not shown"
                verdict = verdict if _conditions(row, names) == _conditions(other, names) else "other conditions"
                rows.append((*where, name, shown(figure), shown(theirs[name]), shown(gap, "+.2f"), verdict))
    lines += ["", markdown_table(header, rows)]
    missing = sum(row["drafter"] != "none" for report in (a, b) for row in report["suites"]) - 2 * len(common)
    if missing:
        lines += ["", f"{missing} rows are in only one of the reports."]
    return "\n".join(lines)


def _changes(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    """Return a line for each key whose values differ."""
    return [f"{name}: {a.get(name)} | {b.get(name)}" for name in {**a, **b} if a.get(name) != b.get(name)]


def _conditions(row: ReportRow, names: Sequence[str]) -> dict[str, object]:
    """Return {description: value} of what must be equal before a difference of two rows can come from the heads.

    `names` are keys of a row.
    """
    values: Mapping[str, object] = row
    return {f"{name} of {row['name']}": values[name] for name in names}


def pairs(a: list[ReportRow], b: list[ReportRow]) -> Iterator[tuple[ReportRow, ReportRow]]:
    """Yield (row of `a`, row of `b`) with the same suite, temperature, batch size and drafter.

    Plain decoding is left out. If a report has several draft lengths of a drafter, its rows pair with those of the same
    length.
    """
    ours, theirs = _grouped(a), _grouped(b)
    for key in (key for key in ours if key in theirs):
        if len(ours[key]) == len(theirs[key]) == 1:
            yield ours[key][0], theirs[key][0]
            continue
        by_length = {row[_LENGTH]: row for row in theirs[key]}
        yield from ((row, by_length[row[_LENGTH]]) for row in ours[key] if row[_LENGTH] in by_length)


def _grouped(rows: list[ReportRow]) -> dict[tuple, list[ReportRow]]:
    """Return the rows by their values of `_KEY`, without plain decoding."""
    found: dict[tuple, list[ReportRow]] = {}
    for row in rows:
        if row["drafter"] != "none":
            found.setdefault(tuple(row[name] for name in _KEY), []).append(row)
    return found


def _decoder(row: ReportRow, other: ReportRow) -> str:
    """Return the name of both rows' decoder, with the draft lengths where they are fixed."""
    if row["drafter"] in _BOUNDED:
        return row["drafter"]
    drafts = dict.fromkeys(map(_draft, (row, other)))
    return f"{row['drafter']} of {' and '.join(drafts)}"


def _draft(row: ReportRow) -> str:
    """Return the draft of a row as a phrase: the length of a chain, or "a tree of 8 tokens, 3 deep"."""
    depth = row[_LENGTH]
    nodes = row["nodes"]
    return f"a tree of {nodes} tokens, {depth} deep" if nodes > depth else str(depth)


def difference(a: Interval, b: Interval) -> Interval:
    """Return the difference b - a of two independent figures; all three are {"value", "low", "high"}.

    Without the bounds of one figure, the difference has None as "low" and "high". Else
    low = (b - a) - sqrt((b - b_low)^2 + (a_high - a)^2), and high with the other bounds.
    """
    value = b["value"] - a["value"]
    if a["low"] is None or a["high"] is None or b["low"] is None or b["high"] is None:
        return {"value": value, "low": None, "high": None}
    return {
        "value": value,
        # Squares of the distances to the bounds add up as variances do; A's upper bound makes the difference small.
        "low": value - math.hypot(b["value"] - b["low"], a["high"] - a["value"]),
        "high": value + math.hypot(b["high"] - b["value"], a["value"] - a["low"]),
    }


def _figures(row: ReportRow) -> dict[str, Interval]:
    """Return a row's figures with an interval, {"value", "low", "high"} each, by their names in the table."""
    speedups = {f"speedup over {name}": ratio for name, ratio in row["speedup"].items()}
    whole = row.get("end_to_end_speedup")  # not in reports of older versions
    answers = {"speedup of whole answers": whole["plain"]} if whole else {}
    return {"acceptance length": length_with_interval(row), **speedups, **answers}


def _read(path: Path) -> Report:
    """Return the content of a report.json, given its path, its folder, or the folder of a run.

    Raises a UserError for another file, or a report of another version.
    """
    if path.is_dir():
        places = [path / "report.json", path / "eval" / "report.json"]
        folder, path = path, next((place for place in places if place.is_file()), places[0])
        unfinished = next((each for place in places if (each := place.parent / UNFINISHED).is_file()), None)
        refuse((unfinished and not path.is_file(), f"no report.json in {folder}; {unfinished} has what was measured"))
        if unfinished:
            log(f"warning: {unfinished} is of a measurement that is not finished, and {path.name} of one before")
    report = parse_json(read_text(path), str(path))
    if (report.get("schema") if isinstance(report, dict) else None) != 2:
        raise UserError(f'{path} is not a report.json of `speculator eval` with "schema": 2')
    return report
