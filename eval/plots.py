"""The plots of a report and of the rounds of `speculator adapt`."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from speculator.report import Interval, Report, ReportRow, Round

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eval.report import decoder_lines, drafter_rows, groups, head_lengths, label, plots, reached
from eval.served import Level, Speedups
from speculator.files import write_bytes

_SMALL: Any = dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8)
matplotlib.rcParams.update(_SMALL | {"axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False})

_COLOURS = {
    "head": "#1f6feb",
    "ngram": "#d9822b",
    "draft_model": "#8250df",
    "adaptive": "#1a7f37",
}
_SHADES = ("#1f6feb", "#54aeff", "#0a3069", "#80ccff", "#0550ae", "#b6e3ff")  # draft lengths of one head
_BASELINE = "#9aa4ae"
_COLUMNS = 2


def draw_plots(report: Report, folder: Path) -> None:
    """Write NAME.png for each of `report.plots`: a panel per suite, temperature and batch size, or training curve."""
    lengths = head_lengths(report)
    draw: dict[str, Callable] = {
        "speed": _speed,
        "acceptance": _acceptance,
        "lengths": _lengths,
        "draft_lengths": _draft_lengths,
        "categories": _categories,
        "training": _training,
    }
    for name in plots(report):
        panels: dict[str, list] = groups(report)
        if name == "training":
            panels = {f"{stage}: {what}": points for stage, c in report.training.items() for what, points in c.items()}
        if name == "categories":
            panels = {heading: rows for heading, rows in panels.items() if rows[0].categories}
        columns = min(_COLUMNS, len(panels))
        # Rounded up: 5 panels in 2 columns take 3 lines, and the sixth place stays empty.
        lines = -(-len(panels) // columns)
        width, height = 5.5, max(_height(name, rows) for rows in panels.values())
        figure, axes = plt.subplots(
            lines, columns, figsize=(width * columns, height * lines), squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (heading, rows) in zip(axes.flat, panels.items(), strict=False):
            draw[name](axis, rows, lengths)
            axis.set_title(heading)
        # One legend for all panels, below them.
        found = dict(pair[::-1] for axis in axes.flat for pair in zip(*axis.get_legend_handles_labels(), strict=True))
        if found:
            figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 4))
        _save(figure, folder / f"{name}.png", dpi=150)


def plot_rounds(rounds: Sequence[Round], file: Path) -> None:
    """Write an .svg of what the gate decides by in each round of `adapt`: how much faster the new head is."""
    figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
    numbers = range(1, len(rounds) + 1)
    axis.axhline(0, color=_BASELINE, label="head before the round")
    for loaded, fill, name in ((True, _COLOURS["head"], "new head, in use"), (False, "none", "new head, not in use")):
        among = [n for n in numbers if (rounds[n - 1].outcome == "in use") is loaded]
        suites = [rounds[n - 1].gate.suite for n in among]
        gains = [_shares(each.difference, each.tokens_per_second[0]) for each in suites]
        middle = [value for value, _, _ in gains]
        reach = [[value - low for value, low, _ in gains], [high - value for value, _, high in gains]]
        axis.errorbar(among, middle, reach, fmt="o", color=_COLOURS["head"], markerfacecolor=fill, label=name)
    axis.set(xticks=numbers, xlabel="round", ylabel="change of tokens per second")
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.legend(frameon=False)
    _save(figure, file, metadata={"Date": None})


def _shares(interval: Interval, whole: float) -> tuple[float, float, float]:
    """Return a figure and its bounds as shares of `whole`; without bounds, these are the figure."""
    value, low, high = interval.value, interval.low, interval.high
    return value / whole, (value if low is None else low) / whole, (value if high is None else high) / whole


def _save(figure: Figure, file: Path, **settings: Any) -> None:
    content = io.BytesIO()
    figure.savefig(content, format=file.suffix[1:], **settings)
    write_bytes(file, content.getvalue())
    plt.close(figure)


def _height(name: str, rows: list[ReportRow]) -> float:
    """Return the height in inches of a panel of the plot `name`, with room for all its bars."""
    if name == "speed":
        return 1.0 + 0.36 * len(list(decoder_lines(rows)))
    if name == "categories":
        return 1.0 + 0.14 * len(rows[0].categories) * len(drafter_rows(rows))
    return 3.2


def _colour(row: ReportRow, lengths: set[int]) -> str:
    if row.drafter != "head" or len(lengths) < 2:
        return _COLOURS[row.drafter]
    return _SHADES[sorted(lengths, reverse=True).index(row.num_speculative_tokens) % len(_SHADES)]


def _speed(axis, rows: list[ReportRow], lengths: set[int]) -> None:
    """Draw the speedup of every decoder over plain decoding; the rows were measured together."""
    lines = list(decoder_lines(rows))
    names = [label(row, lengths) if key == "speculative" else name for row, key, name, _ in lines]
    ratios = [ratio for *_, ratio in lines]
    colours = [_colour(row, lengths) if key == "speculative" else _BASELINE for row, key, *_ in lines]
    values = [ratio.value for ratio in ratios]
    bars = axis.barh(range(len(lines)), values, 0.7, xerr=_errors(ratios), capsize=2, color=colours)
    speeds = [row.tokens_per_second[key] for row, key, *_ in lines]
    texts = [f"{value:.2f}x, {speed:.0f} tokens/s" for value, speed in zip(values, speeds, strict=True)]
    axis.bar_label(bars, texts, fontsize=8, padding=4)
    _bars(axis, names)
    axis.margins(x=0.55)
    axis.set_xlim(left=0)


def _acceptance(axis, rows: list[ReportRow], lengths: set[int]) -> None:
    """Draw the acceptance rate by draft position of heads and draft models; lookup has other positions."""
    for row in drafter_rows(rows):
        if row.drafter in ("head", "draft_model"):
            rates = row.acceptance_by_position[: reached(row)]
            places = range(1, len(rates) + 1)
            axis.plot(places, rates, marker="o", color=_colour(row, lengths), label=label(row, lengths))
            for place, rate in zip(places, rates, strict=True):
                axis.annotate(f"{rate:.2f}", (place, rate), (0, 6), textcoords="offset points", ha="center", fontsize=7)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set(ylim=(0, 1.1), xlabel="draft position", ylabel="acceptance rate")


def _lengths(axis, rows: list[ReportRow], lengths: set[int]) -> None:
    """Draw the share of the steps that accept 0, 1, 2, ... draft tokens."""
    rows = drafter_rows(rows)
    most = max(reached(row) for row in rows)
    for row in rows:
        shares = [count / max(1, row.steps) for count in row.accepted_lengths[: most + 1]]
        axis.plot(range(len(shares)), shares, marker="o", color=_colour(row, lengths), label=label(row, lengths))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set(ylim=(0, None), xlabel="accepted draft tokens", ylabel="share of steps")


def _draft_lengths(axis, rows: list[ReportRow], lengths: set[int]) -> None:
    """Draw the measured and the predicted speedup of the head over plain decoding, by its draft length."""
    heads = sorted((row for row in rows if row.drafter == "head"), key=lambda row: row.num_speculative_tokens)
    at = [row.num_speculative_tokens for row in heads]
    ratios = [row.speedup["plain"] for row in heads]
    measured = [ratio.value for ratio in ratios]
    axis.errorbar(at, measured, yerr=_errors(ratios), marker="o", capsize=3, color=_SHADES[0], label="measured")
    predicted = [row.predicted_speedup for row in heads]
    axis.plot(at, predicted, "s--", color=_COLOURS["ngram"], label="predicted, E / (G c + v)")
    axis.axhline(1, color=_BASELINE, linewidth=1)
    axis.set(xticks=at, xlabel="num_speculative_tokens G", ylabel="speedup over plain decoding")
    axis.margins(y=0.25)


def _training(axis, points: list[list[float]], lengths: set[int]) -> None:
    """Draw a curve of the training through the points [step, value]."""
    axis.plot(*zip(*points, strict=True), marker="o" if len(points) < 30 else None, markersize=3, color=_SHADES[0])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set(xlabel="step")


def _categories(axis, rows: list[ReportRow], lengths: set[int]) -> None:
    """Draw the speedup of every drafter over plain decoding by category."""
    rows = drafter_rows(rows)
    names = [part.name for part in rows[0].categories]
    height = 0.8 / len(rows)
    for k, row in enumerate(rows):
        # The bars of a category are centred on its integer: with two decoders of height 0.4 at i - 0.2 and i + 0.2.
        places = [i + (k - (len(rows) - 1) / 2) * height for i in range(len(names))]
        ratios = [part.speedup["plain"] for part in row.categories]
        values, colour = [ratio.value for ratio in ratios], _colour(row, lengths)
        axis.barh(places, values, height, xerr=_errors(ratios), capsize=2, color=colour, label=label(row, lengths))
    _bars(axis, names)


def _bars(axis, names: Sequence[str | None]) -> None:
    """Name the bars of speedups, the first one on top, and draw a line at 1."""
    axis.set(yticks=range(len(names)), yticklabels=names, xlabel="speedup over plain decoding")
    axis.invert_yaxis()
    axis.axvline(1, color=_BASELINE, linewidth=1)


def _errors(intervals: Sequence[Interval]) -> np.ndarray:
    """Return error bars [2, n]: NaN without an interval, and 0 if rounding puts a bound on the value's wrong side."""
    bounds = [(i.value, i.low, i.high) if i.low is not None else (math.nan,) * 3 for i in intervals]
    value, low, high = np.array(bounds).T
    return np.maximum([value - low, high - value], 0)


def plot_load(curves: Mapping[str, Sequence[Level]], file: Path, speedups: Speedups | None = None) -> None:
    """Write a .png of throughput against the speed of one user, and of the speedup at each number of clients.

    `curves` are levels by the server's name. `speedups` are of the second server over the first; None: one server.
    """
    columns = 2 if speedups else 1
    figure, axes = plt.subplots(1, columns, figsize=(5 * columns, 4), layout="constrained", squeeze=False)
    axis = axes[0, 0]
    for name, levels in curves.items():
        for where in dict.fromkeys((level.suite, level.temperature) for level in levels):
            shown = [level for level in levels if (level.suite, level.temperature) == where and level.tpot_ms[0]]
            users, totals = [1e3 / level.tpot_ms[0] for level in shown], [level.tokens_per_second for level in shown]
            axis.plot(users, totals, "o-", label=f"{name}: {where[0]}, temperature {where[1]:g}")
            for level, *point in zip(shown, users, totals, strict=True):
                axis.annotate(str(level.clients), point, textcoords="offset points", xytext=(4, 4), fontsize=7)
    axis.set(xlabel="tokens/s of one user (median), after the first token", ylabel="tokens/s of all users")
    axis.set(xlim=(0, None), ylim=(0, None))
    if speedups:
        axis = axes[0, 1]
        for name, found in speedups.items():
            clients, ratios = [level.clients for level, *_ in found], [ratio for *_, ratio in found]
            axis.errorbar(clients, [each.value for each in ratios], _errors(ratios), fmt="o-", capsize=2, label=name)
        axis.axhline(1, color=_BASELINE, linewidth=1)
        clients = sorted({level.clients for found in speedups.values() for level, *_ in found})
        axis.set_xscale("log", base=2)
        axis.set(xticks=clients, xticklabels=clients, xlabel="clients", ylabel="speed of B over A")
    for axis in axes.flat:
        axis.legend(frameon=False, fontsize=7)
    _save(figure, file, dpi=150)
