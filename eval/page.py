"""report.html: one self-contained page with a headline, tables by suite, plots, and completions coloured by drafter."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.report import (
    HOW_TO_READ,
    Line,
    category_cells,
    decoder_cells,
    decoder_lines,
    details,
    drafter_rows,
    facts,
    groups,
    head_lengths,
    label,
    plots,
)
from eval.traces import Trace
from speculator.errors import printable
from speculator.files import write_text
from speculator.report import Report
from speculator.tables import BASELINES, DRAFTERS
from speculator.verdict import headlines

COLUMNS = {
    "decoder": "What proposes the tokens; a baseline in grey proposes none, or is transformers' own.",
    "category": "Category of the prompts.",
    "temperature": "Sampling temperature; 0 decodes greedily.",
    "speedup": "Decoding speed relative to plain decoding by the same engine, with its 95% interval.",
    "whole answers": "The same with the prefill, as a user sees it.",
    "acceptance length": "Mean number of tokens per verification step, the bonus token included. Plain decoding has 1.",
    "tokens/s": "New tokens per second, without the prefill.",
    "predicted": "Speedup that the acceptance length E and the costs predict: E / (G c + v).",
    "batch size": "Prompts decoded together.",
    "rule": "Accept rule. All rules keep the target's distribution.",
    "end-to-end tokens/s": "New tokens per second, with the prefill.",
    "first token, ms": "Time to the first token, which the prefill gives.",
    "peak memory, MB": "Peak memory of the process while decoding, with all decoders loaded.",
    "draft cost c": "Cost of a drafted token in plain steps; of adaptive drafting and lookup, over the longest draft.",
    "verify cost v": "Cost of a verification, in plain decoding steps.",
    "turns": "Answers in this category.",
}
"""Columns, and what a reader sees who points at them."""
_MAIN = ("decoder", "category", "temperature", "speedup", "whole answers", "acceptance length", "tokens/s", "predicted")


def write_page(report: Report, traces: Sequence[Trace], folder: Path) -> None:
    """Write report.html into a folder, with the plots that `draw_plots` wrote there."""
    pictures = {name: (folder / f"{name}.png").read_bytes() for name in plots(report)}
    write_text(folder / "report.html", page(report, traces, pictures))


def page(report: Report, traces: Sequence[Trace], pictures: dict[str, bytes]) -> str:
    """Return the page's HTML, with `traces`, those of one prompt together, and PNG files by plot (`report.plots`)."""
    lengths, captions = head_lengths(report), plots(report)
    prompts = [list(group) for _, group in groupby(traces, lambda t: (t.row.name, t.row.temperature, t.prompt))]
    steps = [step for trace in traces for step in trace.steps]
    sources = {piece.source for step in steps for piece in (*step.accepted, *step.rejected)}
    suites: dict[str, tuple[list[Line], list[Line], list[str]]] = {}
    # Every line of a suite has the same columns, also where a baseline could not run.
    ran: dict[str, set[str]] = {}
    for row in report.suites:
        ran.setdefault(row.name, set()).update(row.tokens_per_second)
    for heading, rows in groups(report).items():
        name = rows[0].name
        decoders, categories, more = suites.setdefault(name, ([], [], []))
        others = [each for each in BASELINES if each in ran[name] - {"plain"}]
        decoders += [decoder_cells(*line, lengths, others) for line in decoder_lines(rows)]
        categories += [category_cells(row, part, lengths) for row in drafter_rows(rows) for part in row.categories]
        more += [f"{heading}, {details(row, lengths)}" for row in drafter_rows(rows)]
    several = len({row.batch_size for row in report.suites}) > 1
    return fill_template(
        "page.html",
        headlines=headlines(report),
        facts=facts(report),
        warnings=report.warnings,
        how_to_read=HOW_TO_READ,
        explained=COLUMNS,
        main=(*_MAIN, "batch size") if several else _MAIN,
        suites=suites,
        plots=[(captions[name], base64.b64encode(picture).decode()) for name, picture in pictures.items()],
        sources={name: title for name, title in DRAFTERS.items() if name in sources},
        prompts=prompts,
        label=lambda row: label(row, lengths),
    )


def fill_template(name: str, **values: Any) -> str:
    """Return a template of the folder eval, such as "page.html", filled with values; texts are escaped for HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return environment.get_template(name).render(**values)
