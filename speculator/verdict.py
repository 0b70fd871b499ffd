"""The first lines of a report, in the terminal, its files and the head's card: figures, then advice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

from speculator.report import Report, ReportRow
from speculator.tables import DRAFTERS, shown

_ALMOST_NOTHING = 1.15
"""Acceptance length up to which a head accepts almost nothing."""


def headlines(report: Report) -> list[str]:
    """Return sentences on each suite and batch size: the head alone, adaptive drafting, and a verdict with advice.

    A suite without a head has one sentence, about its fastest drafter.
    """
    found: dict[tuple[str, int], list[ReportRow]] = {}
    for row in report.suites:
        if row.drafter != "none":
            found.setdefault((row.name, row.batch_size), []).append(row)
    lines = []
    for (name, batch_size), rows in found.items():
        where = f"{name}, batch size {batch_size}: " if len(found) > 1 else ""
        lines += [where + line for line in _of_suite(rows)]
    return lines


def fastest(rows: list[ReportRow], *drafters: str) -> list[ReportRow]:
    """Return, for each temperature, the row with the largest speedup over plain decoding among some drafters' rows."""
    best: dict[float, ReportRow] = {}
    for row in rows:
        if row.drafter in drafters:
            best[row.temperature] = max(best.get(row.temperature, row), row, key=_speedup)
    return list(best.values())


def _of_suite(rows: list[ReportRow]) -> Iterator[str]:
    """Yield the sentences on the rows of one suite and batch size."""
    heads, adaptive = fastest(rows, "head"), fastest(rows, "adaptive")
    if not heads:
        others = adaptive or fastest(rows, *DRAFTERS)
        yield f"{DRAFTERS[others[0].drafter]} is {_times(others)}"
        return
    lengths = (f"acceptance length {shown(row.length)}, " for row in heads)
    yield f"the head alone: {_times(heads, lengths)}"
    if adaptive:
        yield f"adaptive drafting is {_times(adaptive)}{_off(adaptive)}"
    lengths = len({row.num_speculative_tokens for row in rows if row.drafter == "head"})
    chosen = f"; the length is the fastest of {lengths} on these prompts" if lengths > len(heads) else ""
    yield f"verdict: {verdict(heads, fastest(rows, 'ngram'))}{chosen}"


def _off(rows: list[ReportRow]) -> str:
    """Return a clause on temperatures at which adaptive drafting drafted nothing in most steps; "" without any."""
    off = [
        f"{row.undrafted_share:.0%} of the steps at temperature {row.temperature:g}"
        for row in rows
        if row.undrafted_share > 0.5
    ]
    return f"; at batch size {rows[0].batch_size} it drafted nothing in {' and '.join(off)}" if off else ""


def verdict(heads: list[ReportRow], lookups: list[ReportRow]) -> str:
    """Return a clause that says for whom a head is worth serving, and what to do next, judged by whole answers.

    Args:
        heads: the head's rows of report.json, one per temperature; the one that shows the least gain decides.
        lookups: the rows of n-gram lookup alone; may be empty.
    """
    head = min(heads, key=_shown_gain)
    lookup = next((_speedup(row) for row in lookups if row.temperature == head.temperature), 0.0)
    interval = head.end_to_end_speedup["plain"]
    where = f" at temperature {head.temperature:g}" if len(heads) > 1 else ""
    whom = "for one user at a time" if head.batch_size == 1 else f"at batch size {head.batch_size}"
    helps = f"; n-gram lookup does the work here: alone it is {lookup:.2f} times as fast"
    if max(row.acceptance_length for row in heads) < _ALMOST_NOTHING:
        advice = "the head accepts almost nothing: train it on more text"
    elif interval.low is None:
        found = "may be worth serving" if interval.value >= 1 else "was slower than plain decoding"
        sample = "batch" if head.batch_size > 1 else "prompt"
        advice = f"the head {found}: one {sample} has no interval, so measure more prompts"
    elif interval.value < 1:
        advice = (
            f"the head costs more than it gains here{where}: a drafted token costs {head.cost.draft:.2f} of a "
            "plain step; take a cheaper head, draft fewer tokens, or train on more text"
        )
    elif interval.low <= 1:
        advice = f"the head may be worth serving {whom}: its interval{where} includes 1, so measure more prompts"
        helps = f"; n-gram lookup alone is faster on these prompts ({lookup:.2f})"
    else:
        tokens, nodes = head.num_speculative_tokens, head.nodes
        tree = f", a tree {tokens} deep" if nodes > tokens else ""
        advice = f"worth serving {whom}: {nodes} token{'s' * (nodes != 1)} per draft{tree}"
        helps = f"; n-gram lookup alone is faster on these prompts ({lookup:.2f})"
    return advice + (helps if lookup > max(1.0, interval.value) else "")


def _shown_gain(row: ReportRow) -> tuple[bool, float]:
    """Return a key that sorts rows by what they show: those below 1 first, then by their intervals' lower bounds."""
    interval = row.end_to_end_speedup["plain"]
    return interval.value >= 1, interval.value if interval.low is None else interval.low


def _speedup(row: ReportRow) -> float:
    return row.end_to_end_speedup["plain"].value


def _times(rows: list[ReportRow], before: Iterable[str] = repeat("")) -> str:
    """Return the rows' speedups over plain decoding with their temperatures, each after its text of `before`."""
    parts, unit = [], " times as fast as plain decoding"
    for row, words in zip(rows, before, strict=False):
        decoding, whole = shown(row.speedup["plain"]), shown(row.end_to_end_speedup["plain"])
        parts.append(f"{words}{decoding}{unit}, {whole} with the prefill, at temperature {row.temperature:g}")
        unit = ""
    return "; ".join(parts)
