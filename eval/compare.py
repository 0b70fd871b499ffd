"""`speculator eval compare`: see `eval.flags.compare`.

Rows of other prompts, turns, limits of new tokens or settings, or with and without a chat template, have no verdict.
Nor have speeds on other hardware.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from eval import served
from eval.intervals import difference, length, paired_difference, ratio
from eval.report import UNFINISHED
from eval.suites import FILTERS
from speculator.errors import UserError, refuse, show
from speculator.report import Interval, Report, ReportRow, read_record, read_report
from speculator.tables import markdown_table, shown
from speculator.terminal import log

_KEY = ("name", "temperature", "batch_size", "drafter")
_NAMES = ("target", "speculator", "hardware", "git_commit")
_CONDITIONS = ("prompts", "turns", "max_new_tokens", "chat")
_SETTINGS = ("dtype", "as", *FILTERS)
"""Settings of a report that are conditions too."""
_LENGTH = "acceptance length"
_CONTENT = "digest"
"""A condition too, unless the target is another, which has other tokens for the same questions."""
_BOUNDED = ("adaptive", "ngram")
"""Decoders for which `num_speculative_tokens` is a bound, and not the length of each draft."""


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator eval compare`: print what differs between the reports A and B, and a table of their figures."""
    files = [served.path_of(path) for path in (arguments.a, arguments.b)]
    if not all(files):
        alone = any(file and not (file.parent / "report.json").is_file() for file in files)
        refuse((alone, f"{arguments.a} and {arguments.b}: one is of a server, and the other is not"))
        return show(table(_read(arguments.a), _read(arguments.b)))
    from eval.plots import plot_load

    a, b = (read_record(served.Served, file) for file in files if file)
    text, speedups = served.compare(a, b)
    plot = arguments.b.parent / "compared.png" if arguments.b.is_file() else arguments.b / "compared.png"
    plot_load({f"A, {a.server}": a.suites, f"B, {b.server}": b.suites}, plot, speedups)
    show(f"{text}\nplot: {plot}")


def table(a: Report, b: Report) -> str:
    """Return as text what differs between two reports, and a table of the figures that both have with an interval.

    Raises a UserError if no row of one has a counterpart in the other.
    """
    common = list(pairs(a.suites, b.suites))
    if not common:
        raise UserError("the reports have no suite, temperature, batch size and decoder in common")
    lines = _changes(_values(a, _NAMES), _values(b, _NAMES))
    lines += [f"fingerprint of {line}" for line in _changes(a.fingerprints, b.fingerprints)]
    lines += _changes(a.versions, b.versions) + _changes(a.settings, b.settings)
    same = all(a.settings.get(name) == b.settings.get(name) for name in _SETTINGS)
    names = _CONDITIONS if a.target != b.target else (*_CONDITIONS, _CONTENT)
    for row, other in common:
        lines += _changes({f"rule, {row.drafter}": row.rule}, {f"rule, {row.drafter}": other.rule})
        lines += _changes(_conditions(row, names), _conditions(other, names))
    lines = list(dict.fromkeys(lines))
    header = ("suite", "temperature", "decoder", "figure", "A", "B", "B - A", "")
    rows = []
    for row, other in common:
        batch = f", batch {row.batch_size}" if row.batch_size > 1 else ""
        where = (f"{row.name}{batch}", f"{row.temperature:g}", _decoder(row, other))
        equal = same and _conditions(row, names) == _conditions(other, names)
        for name, figure, its, gap in _figures(row, other, paired=equal and row.digest == other.digest):
            if not equal:
                verdict = "other conditions"
            elif name != _LENGTH and a.hardware != b.hardware:
                verdict = "other hardware"
            elif gap.low is None or gap.high is None:
                verdict = ""
            else:
                verdict = "differs" if gap.low > 0 or gap.high < 0 else "not shown"
            rows.append((*where, name, shown(figure), shown(its), shown(gap, "+.2f"), verdict))
    lines += ["", markdown_table(header, rows)]
    missing = sum(row.drafter != "none" for report in (a, b) for row in report.suites) - 2 * len(common)
    if missing:
        lines += ["", f"{missing} rows are in only one of the reports."]
    return "\n".join(lines)


def _changes(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    return [f"{name}: {a.get(name)} | {b.get(name)}" for name in {**a, **b} if a.get(name) != b.get(name)]


def _conditions(row: ReportRow, names: Sequence[str]) -> dict[str, object]:
    """Return {description: value} of what must be equal before a difference of two rows can come from the heads."""
    return {f"{name} of {row.name}": value for name, value in _values(row, names).items()}


def _values(record: Report | ReportRow, names: Sequence[str]) -> dict[str, object]:
    return {name: getattr(record, name) for name in names}


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
        by_length = {row.num_speculative_tokens: row for row in theirs[key]}
        yield from ((row, by_length[n]) for row in ours[key] if (n := row.num_speculative_tokens) in by_length)


def _grouped(rows: list[ReportRow]) -> dict[tuple, list[ReportRow]]:
    found: dict[tuple, list[ReportRow]] = {}
    for row in rows:
        if row.drafter != "none":
            found.setdefault(tuple(_values(row, _KEY).values()), []).append(row)
    return found


def _decoder(row: ReportRow, other: ReportRow) -> str:
    """Return the name of both rows' decoder, with the draft lengths where they are fixed."""
    if row.drafter in _BOUNDED:
        return row.drafter
    drafts = dict.fromkeys(map(_draft, (row, other)))
    return f"{row.drafter} of {' and '.join(drafts)}"


def _draft(row: ReportRow) -> str:
    """Return the draft of a row as a phrase: the length of a chain, or "a tree of 8 tokens, 3 deep"."""
    depth, nodes = row.num_speculative_tokens, row.nodes
    return f"a tree of {nodes} tokens, {depth} deep" if nodes > depth else str(depth)


def _figures(row: ReportRow, other: ReportRow, paired: bool) -> Iterator[tuple[str, Interval, Interval, Interval]]:
    """Yield (name in the table, figure of `row`, of `other`, difference) of each figure that both rows have.

    If `paired`, both decoded the same prompts, and figures that the samples in a report give are compared by prompt.
    """
    samples = list(zip(row.samples, other.samples, strict=True)) if paired else []
    with_steps = [(a, b) for a, b in samples if a[-1] and b[-1]]
    gap = paired_difference(with_steps, length) if with_steps else difference(row.length, other.length)
    yield _LENGTH, row.length, other.length, gap
    for name, theirs in other.speedup.items():
        if ours := row.speedup.get(name):
            yield f"speedup over {name}", ours, theirs, difference(ours, theirs)
    ours, theirs = row.end_to_end_speedup["plain"], other.end_to_end_speedup["plain"]
    gap = paired_difference(samples, ratio) if samples else difference(ours, theirs)
    yield "speedup of whole answers", ours, theirs, gap


def _read(path: Path) -> Report:
    """Return the content of a report.json, given its path, its folder, or the folder of a run."""
    if path.is_dir():
        places = [path / "report.json", path / "eval" / "report.json"]
        folder, path = path, next((place for place in places if place.is_file()), places[0])
        unfinished = next((each for place in places if (each := place.parent / UNFINISHED).is_file()), None)
        refuse((unfinished and not path.is_file(), f"no report.json in {folder}; {unfinished} has what was measured"))
        if unfinished:
            log(f"warning: {unfinished} is of a measurement that is not finished, and {path.name} of one before")
    return read_report(path)
