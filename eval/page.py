"""report.html: one self-contained page with sortable tables, plots, and completions coloured by drafter."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.metrics import shown
from eval.report import HOW_TO_READ, drafter_rows, facts, head_lengths, label, length_with_interval, plots
from eval.traces import Trace
from speculator.errors import printable
from speculator.files import write_text
from speculator.tables import BASELINES, DRAFTERS

Cell = tuple[str, float | None]
"""Text of a table cell, and the number that it sorts by."""


def write_page(report: dict, traces: Sequence[Trace], folder: Path) -> None:
    """Write report.html, with the plots that are in the folder."""
    pictures = {name: (folder / f"{name}.png").read_bytes() for name in plots(report)}
    write_text(folder / "report.html", page(report, traces, pictures))


def page(report: dict, traces: Sequence[Trace], pictures: dict[str, bytes]) -> str:
    """The page's HTML. Jinja escapes every text of a model, a file or a name."""
    lengths, captions = head_lengths(report), plots(report)
    prompts = [list(group) for _, group in groupby(traces, lambda t: (t.row["name"], t.row["temperature"], t.prompt))]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return environment.get_template("page.html").render(
        facts=facts(report),
        warnings=report["warnings"],
        how_to_read=HOW_TO_READ,
        decoders=list(_decoders(report, lengths)),
        categories=list(_categories(report, lengths)),
        plots=[(captions[name], base64.b64encode(picture).decode()) for name, picture in pictures.items()],
        drafters=DRAFTERS,
        prompts=prompts,
        label=lambda row: label(row, lengths),
    )


def _number(value: float | None, form: str = ".2f") -> Cell:
    return ("", None) if value is None else (f"{value:{form}}", value)


def _interval(interval: dict | None) -> Cell:
    return (shown(interval), interval["value"]) if interval else ("", None)


def _measurement(row: dict) -> dict[str, Cell]:
    return {
        "suite": (row["name"], None),
        "temperature": _number(row["temperature"], "g"),
        "batch size": _number(row["batch_size"], "d"),
    }


def _decoders(report: dict, lengths: set[int]) -> Iterator[dict[str, Cell]]:
    """One line for each decoder, by column."""
    baselines = [name for name in BASELINES if any(name in row["tokens_per_second"] for row in report["suites"])]
    for row in report["suites"]:
        plain = row["drafter"] == "none"
        for key in [name for name in baselines if name in row["tokens_per_second"]] if plain else ["speculative"]:
            ratios = {name: ("1", 1.0) if key == name else ("", None) for name in baselines}
            if not plain:
                ratios = {name: _interval(row["speedup"].get(name)) for name in baselines}
            acceptance = _number(1.0 if key == "plain" else None) if plain else _interval(length_with_interval(row))
            cost: dict[str, float] = row.get("cost", {})
            yield {
                **_measurement(row),
                "decoder": (BASELINES[key] if plain else label(row, lengths), None),
                "rule": ("" if plain else row["rule"], None),
                "acceptance length": acceptance,
                "tokens/s": _number(row["tokens_per_second"][key], ".1f"),
                "end-to-end tokens/s": _number(row["end_to_end_tokens_per_second"][key], ".1f"),
                "time to first token, ms": _number(1e3 * row["time_to_first_token"][key], ".1f"),
                **{f"speedup over {BASELINES[name]}": ratio for name, ratio in ratios.items()},
                "predicted speedup": _number(row.get("predicted_speedup")),
                "draft cost c": _number(cost.get("draft"), ".3f"),
                "verify cost v": _number(cost.get("verify")),
            }


def _categories(report: dict, lengths: set[int]) -> Iterator[dict[str, Any]]:
    for row in drafter_rows(report["suites"]):
        for part in row.get("categories", ()):
            yield {
                **_measurement(row),
                "category": (part["name"], None),
                "turns": _number(part["turns"], "d"),
                "decoder": (label(row, lengths), None),
                "acceptance length": _interval(length_with_interval(part)),
                "tokens/s": _number(part["tokens_per_second"]["speculative"], ".1f"),
                "speedup over plain decoding": _interval(part["speedup"]["plain"]),
            }
