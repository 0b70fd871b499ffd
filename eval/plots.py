"""The report's pictures, legible on a light and a dark page: a card of their own colour."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from eval.report import drafter_rows, groups, head_lengths, label, per_step, plots
from speculator.files import write_bytes
from speculator.tables import BASELINES

_COLOURS = {
    "head": "#1f6feb",
    "ngram": "#d9822b",
    "model": "#8250df",
    "early_exit": "#1a7f37",
    "ngram_corpus": "#bf8700",
    "hybrid": "#0a7d8c",
}
_SHADES = ("#1f6feb", "#54aeff", "#0a3069", "#80ccff", "#0550ae", "#b6e3ff")  # of one head's draft lengths
_PLAIN = "#57606a"
_OTHERS = "#1a7f37"  # drafters by other names
_THEIRS = "#9aa4ae"
_SHORT = {
    "plain": "plain,\nsame loop",
    "hf_generate": "HF\ngenerate",
    "hf_compiled": "HF static,\ncompiled",
    "hf_prompt_lookup": "HF prompt\nlookup",
    "hf_assisted": "HF\nassisted",
}
_COLUMNS = 3


def draw_plots(report: dict, folder: Path) -> None:
    """A .png for each of `report.plots`: a panel per suite, temperature and batch size."""
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
        width, height = _size(name, panels, lengths)
        figure, axes = plt.subplots(lines, columns, figsize=(width * columns, height * lines), squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (heading, rows) in zip(axes.flat, panels.items(), strict=False):
            draw[name](axis, rows, lengths)
            axis.set_title(heading, fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=150)
        write_bytes(folder / f"{name}.png", drawn.getvalue())
        plt.close(figure)


def _columns(panels: dict[str, list[dict]]) -> int:
    """A line of panels for each suite, where a suite has several."""
    each = len(panels) // len({rows[0]["name"] for rows in panels.values()})
    return min(_COLUMNS, each if each > 1 else len(panels))


def _size(name: str, panels: dict[str, list[dict]], lengths: set[int]) -> tuple[float, float]:
    """Inches of a panel: wide enough for its bars."""
    if name == "speed":
        bars = max(len(_bars(rows, lengths)) for rows in panels.values())
        return max(4.6, 0.95 * bars), 3.4
    if name == "categories":
        return 4.6, max(3.0, 0.5 + 0.42 * max(len(rows[0]["categories"]) for rows in panels.values()))
    return 4.6, 3.4


def _colour(row: dict, lengths: set[int]) -> str:
    if row["drafter"] != "head" or len(lengths) < 2:
        return _COLOURS.get(row["drafter"], _OTHERS)
    return _SHADES[sorted(lengths, reverse=True).index(row["num_speculative_tokens"]) % len(_SHADES)]


def _side_by_side(axis, rows: list[dict], lengths: set[int], values: Callable[[dict], list[float]], first: int) -> None:
    """A group of bars at each place, one bar a drafter; of one head's chains the longest."""
    longest = max((row["num_speculative_tokens"] for row in rows if row["drafter"] == "head"), default=0)
    rows = [row for row in rows if row["drafter"] != "head" or row["num_speculative_tokens"] == longest]
    width = 0.8 / len(rows)
    for k, row in enumerate(rows):
        heights = values(row)
        places = [i + first + (k - (len(rows) - 1) / 2) * width for i in range(len(heights))]
        name = f"{label(row, lengths)} ({row['acceptance_length']:.2f} tokens per step)"
        bars = axis.bar(places, heights, width, color=_colour(row, lengths), label=name)
        axis.bar_label(bars, fmt="%.2f", fontsize=6)
    axis.set_xticks(range(first, first + max(len(values(row)) for row in rows)))
    axis.legend(fontsize=7, loc="upper right")


def _acceptance(axis, rows: list[dict], lengths: set[int]) -> None:
    _side_by_side(axis, drafter_rows(rows), lengths, lambda row: row["acceptance_by_position"], first=1)
    axis.set_xlabel("draft position")
    axis.set_ylabel("accepted, given that the one before was", fontsize=9)
    _up_to_one(axis)


def _up_to_one(axis) -> None:
    """Shares, with room for the legend above them."""
    axis.set_ylim(0, 1.35)
    axis.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])


def _lengths(axis, rows: list[dict], lengths: set[int]) -> None:
    def shares(row: dict) -> list[float]:
        return [count / max(1, row["steps"]) for count in row["accepted_lengths"]]

    _side_by_side(axis, drafter_rows(rows), lengths, shares, first=0)
    axis.set_xlabel("drafted tokens accepted in a step")
    axis.set_ylabel("share of steps")
    _up_to_one(axis)


def _bars(rows: list[dict], lengths: set[int]) -> list[tuple[str, float, dict | None, str]]:
    """Name, tokens per second, interval of the ratio to the plain loop, colour."""
    speeds = rows[0]["tokens_per_second"]
    bars = [(_SHORT[n], speeds[n], None, _PLAIN if n == "plain" else _THEIRS) for n in BASELINES if n in speeds]
    for row in drafter_rows(rows):
        name = label(row, lengths).replace(" ", "\n", 1)
        bars.append((name, row["tokens_per_second"]["speculative"], row["speedup"]["plain"], _colour(row, lengths)))
    return bars


def _speed(axis, rows: list[dict], lengths: set[int]) -> None:
    bars, plain = _bars(rows, lengths), rows[0]["tokens_per_second"]["plain"]
    errors = _errors([interval for _, _, interval, _ in bars], plain)
    drawn = axis.bar(range(len(bars)), [b[1] for b in bars], yerr=errors, capsize=3, color=[b[3] for b in bars])
    over = [f"\n({speed / plain:.2f}x)" if plain else "" for _, speed, _, _ in bars]
    names = [f"{speed:.0f}{ratio}" for (_, speed, _, _), ratio in zip(bars, over, strict=True)]
    axis.bar_label(drawn, names, fontsize=7, padding=2)
    axis.set_xticks(range(len(bars)), [b[0] for b in bars], fontsize=7)
    axis.set_ylabel("tokens per second, decoding alone")
    axis.margins(y=0.2)


def _draft_lengths(axis, rows: list[dict], lengths: set[int]) -> None:
    heads = sorted((row for row in rows if row["drafter"] == "head"), key=lambda row: row["num_speculative_tokens"])
    at = [row["num_speculative_tokens"] for row in heads]
    ratios = [row["speedup"]["plain"] for row in heads]
    axis.errorbar(
        at,
        [r["value"] for r in ratios],
        yerr=_errors(ratios, 1),
        marker="o",
        capsize=3,
        color=_SHADES[0],
        label="measured",
    )
    predicted = [row["predicted_speedup"] for row in heads]
    axis.plot(at, predicted, "s--", color=_COLOURS["ngram"], label="predicted, E / (G c + v)")
    axis.axhline(1, color=_THEIRS, linewidth=1)
    axis.set_xticks(at)
    axis.set_xlabel("draft length G")
    axis.set_ylabel("speedup over the same loop")
    axis.margins(y=0.25)
    axis.legend(fontsize=8)


def _categories(axis, rows: list[dict], lengths: set[int]) -> None:
    rows = drafter_rows(rows)
    names = [part["name"] for part in rows[0]["categories"]]
    height = 0.8 / len(rows)
    for k, row in enumerate(rows):
        places = [i + (k - (len(rows) - 1) / 2) * height for i in range(len(names))]
        means = [per_step(part) for part in row["categories"]]
        values, colour = [mean["value"] for mean in means], _colour(row, lengths)
        axis.barh(places, values, height, xerr=_errors(means, 1), capsize=2, color=colour, label=label(row, lengths))
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("tokens per step")
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(rows))


def _errors(intervals: Sequence[dict | None], scale: float) -> np.ndarray:
    """What matplotlib calls yerr; nothing where there is no interval.

    Of few prompts that are alike a bound may be on the wrong side of the value, by a rounding.
    """
    none = {"value": math.nan, "low": math.nan, "high": math.nan}
    known = [interval if interval and interval["low"] is not None else none for interval in intervals]
    below, above = ([i["value"] - i["low"] for i in known], [i["high"] - i["value"] for i in known])
    return np.maximum([below, above], 0) * scale
