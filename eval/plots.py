"""The plots of a report, drawn from report.json."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from eval.report import drafter_rows, groups, head_lengths, label, length_with_interval, plots
from speculator.files import write_bytes
from speculator.tables import BASELINES

_COLOURS = {
    "head": "#1f6feb",
    "ngram": "#d9822b",
    "draft_model": "#8250df",
    "hybrid": "#0a7d8c",
    "adaptive": "#1a7f37",
}
_SHADES = ("#1f6feb", "#54aeff", "#0a3069", "#80ccff", "#0550ae", "#b6e3ff")  # draft lengths of one head
_PLAIN, _TRANSFORMERS = "#57606a", "#9aa4ae"
_SHORT = {
    "plain": "plain",
    "hf_generate": "HF\ngenerate",
    "hf_compiled": "HF static,\ncompiled",
    "hf_prompt_lookup": "HF prompt\nlookup",
    "hf_assisted": "HF\nassisted",
}
_COLUMNS = 3


def draw_plots(report: dict, folder: Path) -> None:
    """Write one .png for each of `report.plots`, with a panel for each suite, temperature and batch size."""
    lengths = head_lengths(report)
    draw: dict[str, Callable] = {
        "acceptance": _acceptance,
        "speed": _speed,
        "lengths": _lengths,
        "draft_lengths": _draft_lengths,
        "categories": _categories,
    }
    for name in plots(report):
        panels = groups(report)
        if name == "categories":
            panels = {heading: rows for heading, rows in panels.items() if "categories" in rows[0]}
        columns = _columns(panels)
        lines = -(-len(panels) // columns)
        width, height = _size(name, panels)
        figure, axes = plt.subplots(lines, columns, figsize=(width * columns, height * lines), squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (heading, rows) in zip(axes.flat, panels.items(), strict=False):
            draw[name](axis, rows, lengths)
            axis.set_title(heading, fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        content = io.BytesIO()
        figure.savefig(content, dpi=150)
        write_bytes(folder / f"{name}.png", content.getvalue())
        plt.close(figure)


def _columns(panels: dict[str, list[dict]]) -> int:
    """Panels per line: those of one suite, or all if every suite has one."""
    per_suite = len(panels) // len({rows[0]["name"] for rows in panels.values()})
    return min(_COLUMNS, per_suite if per_suite > 1 else len(panels))


def _size(name: str, panels: dict[str, list[dict]]) -> tuple[float, float]:
    """Inches of a panel that make room for all its bars."""
    rows = max(panels.values(), key=len)
    if name == "speed":
        bars = len(rows) - 1 + max(len(rows[0]["tokens_per_second"]) - 1 for rows in panels.values())
        return max(4.6, 0.95 * bars), 3.4
    if name == "categories":
        return 4.6, max(3.0, 0.5 + 0.42 * max(len(rows[0]["categories"]) for rows in panels.values()))
    return 4.6, 3.4


def _colour(row: dict, lengths: set[int]) -> str:
    if row["drafter"] != "head" or len(lengths) < 2:
        return _COLOURS[row["drafter"]]
    return _SHADES[sorted(lengths, reverse=True).index(row["num_speculative_tokens"]) % len(_SHADES)]


def _grouped_bars(axis, rows: list[dict], lengths: set[int], values: Callable[[dict], list[float]], first: int) -> None:
    """Draw one bar per drafter at each position; the head is represented by its longest chain."""
    longest = max((row["num_speculative_tokens"] for row in rows if row["drafter"] == "head"), default=0)
    rows = [row for row in rows if row["drafter"] != "head" or row["num_speculative_tokens"] == longest]
    width = 0.8 / len(rows)
    for k, row in enumerate(rows):
        heights = values(row)
        places = [i + first + (k - (len(rows) - 1) / 2) * width for i in range(len(heights))]
        name = f"{label(row, lengths)} (acceptance length {row['acceptance_length']:.2f})"
        bars = axis.bar(places, heights, width, color=_colour(row, lengths), label=name)
        axis.bar_label(bars, fmt="%.2f", fontsize=6)
    axis.set_xticks(range(first, first + max(len(values(row)) for row in rows)))
    axis.legend(fontsize=7, loc="upper right")
    axis.set_ylim(0, 1.35)  # the legend is above the bars
    axis.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])


def _acceptance(axis, rows: list[dict], lengths: set[int]) -> None:
    _grouped_bars(axis, drafter_rows(rows), lengths, lambda row: row["acceptance_by_position"], first=1)
    axis.set_xlabel("draft position")
    axis.set_ylabel("acceptance rate")


def _lengths(axis, rows: list[dict], lengths: set[int]) -> None:
    def shares(row: dict) -> list[float]:
        return [count / max(1, row["steps"]) for count in row["accepted_lengths"]]

    _grouped_bars(axis, drafter_rows(rows), lengths, shares, first=0)
    axis.set_xlabel("accepted draft tokens")
    axis.set_ylabel("share of steps")


def _speed(axis, rows: list[dict], lengths: set[int]) -> None:
    speeds = rows[0]["tokens_per_second"]
    plain, drafters = speeds["plain"], drafter_rows(rows)
    baselines = [name for name in BASELINES if name in speeds]
    names = [_SHORT[name] for name in baselines] + [label(row, lengths).replace(" ", "\n", 1) for row in drafters]
    heights = [speeds[name] for name in baselines] + [row["tokens_per_second"]["speculative"] for row in drafters]
    colours = [_PLAIN if name == "plain" else _TRANSFORMERS for name in baselines]
    colours += [_colour(row, lengths) for row in drafters]
    errors = _errors([None] * len(baselines) + [row["speedup"]["plain"] for row in drafters], plain)
    bars = axis.bar(range(len(names)), heights, yerr=errors, capsize=3, color=colours)
    texts = [f"{speed:.0f}" + (f"\n({speed / plain:.2f}x)" if plain else "") for speed in heights]
    axis.bar_label(bars, texts, fontsize=7, padding=2)
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_ylabel("tokens per second, without prefill")
    axis.margins(y=0.2)


def _draft_lengths(axis, rows: list[dict], lengths: set[int]) -> None:
    heads = sorted((row for row in rows if row["drafter"] == "head"), key=lambda row: row["num_speculative_tokens"])
    at = [row["num_speculative_tokens"] for row in heads]
    ratios = [row["speedup"]["plain"] for row in heads]
    measured, errors = [ratio["value"] for ratio in ratios], _errors(ratios, 1)
    axis.errorbar(at, measured, yerr=errors, marker="o", capsize=3, color=_SHADES[0], label="measured")
    predicted = [row["predicted_speedup"] for row in heads]
    axis.plot(at, predicted, "s--", color=_COLOURS["ngram"], label="predicted, E / (G c + v)")
    axis.axhline(1, color=_TRANSFORMERS, linewidth=1)
    axis.set_xticks(at)
    axis.set_xlabel("draft length G")
    axis.set_ylabel("speedup over plain decoding")
    axis.margins(y=0.25)
    axis.legend(fontsize=8)


def _categories(axis, rows: list[dict], lengths: set[int]) -> None:
    rows = drafter_rows(rows)
    names = [part["name"] for part in rows[0]["categories"]]
    height = 0.8 / len(rows)
    for k, row in enumerate(rows):
        places = [i + (k - (len(rows) - 1) / 2) * height for i in range(len(names))]
        means = [length_with_interval(part) for part in row["categories"]]
        values, colour = [mean["value"] for mean in means], _colour(row, lengths)
        axis.barh(places, values, height, xerr=_errors(means, 1), capsize=2, color=colour, label=label(row, lengths))
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("acceptance length")
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(rows))


def _errors(intervals: Sequence[dict | None], scale: float) -> np.ndarray:
    """Error bars for matplotlib; NaN where there is no interval.

    A bound may be on the wrong side of the value by a rounding error, which matplotlib rejects.
    """
    none = {"value": math.nan, "low": math.nan, "high": math.nan}
    known = [interval if interval and interval["low"] is not None else none for interval in intervals]
    below, above = ([i["value"] - i["low"] for i in known], [i["high"] - i["value"] for i in known])
    return np.maximum([below, above], 0) * scale
