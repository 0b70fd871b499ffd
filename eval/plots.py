"""The report's pictures, legible on a light and a dark page: a card of their own colour."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_COLOURS = {"head": "#1f6feb", "ngram": "#d9822b", "model": "#8250df", "none": "#57606a", "hf_generate": "#9aa4ae"}
_LABELS = {
    "head": "speculator",
    "ngram": "n-gram lookup",
    "model": "draft model",
    "none": "plain, same loop",
    "hf_generate": "transformers generate",
}


def draw_plots(report: dict, folder: Path) -> None:
    """acceptance.png and speed.png: a panel per suite and temperature."""
    panels: dict[tuple[str, float], dict[str, dict]] = {}
    for row in report["suites"]:
        panels.setdefault((row["name"], row["temperature"]), {})[row["drafter"]] = row
    for name, draw in (("acceptance", _acceptance), ("speed", _speed)):
        figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.4), squeeze=False, sharey=True)
        for axis, ((suite, temperature), rows) in zip(axes[0], panels.items(), strict=True):
            draw(axis, rows)
            axis.set_title(f"{suite}, temperature {temperature:g}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)


def _acceptance(axis, rows: dict[str, dict]) -> None:
    drafting = {name: row for name, row in rows.items() if row["acceptance_by_position"]}
    width = 0.8 / max(1, len(drafting))
    for k, (name, row) in enumerate(drafting.items()):
        values = row["acceptance_by_position"]
        places = [i + 1 + (k - (len(drafting) - 1) / 2) * width for i in range(len(values))]
        label = f"{_LABELS[name]} ({row['tokens_per_step']:.2f} tokens per step)"
        bars = axis.bar(places, values, width, color=_COLOURS[name], label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=7)
    axis.set_xticks(range(1, 1 + max(len(row["acceptance_by_position"]) for row in drafting.values())))
    axis.set_xlabel("draft position")
    axis.set_ylabel("kept, given that the one before was")
    axis.set_ylim(0, 1.15)
    axis.legend(fontsize=7, loc="upper right")


def _speed(axis, rows: dict[str, dict]) -> None:
    baseline = next(iter(rows.values()))["tokens_per_second"]
    speeds = {"hf_generate": baseline["hf_generate"], "none": baseline["same_loop"]}
    speeds |= {name: row["tokens_per_second"]["speculative"] for name, row in rows.items() if name != "none"}
    names = list(speeds)
    errors = [[0.0] * len(names), [0.0] * len(names)]
    for k, name in enumerate(names):
        if name in rows and "speedup" in rows[name]:
            ratio = rows[name]["speedup"]["same_loop"]
            errors[0][k] = (ratio["value"] - ratio["low"]) * baseline["same_loop"]
            errors[1][k] = (ratio["high"] - ratio["value"]) * baseline["same_loop"]
    bars = axis.bar(range(len(names)), speeds.values(), yerr=errors, capsize=3, color=[_COLOURS[n] for n in names])
    axis.bar_label(
        bars, [f"{speeds[n]:.0f} ({speeds[n] / baseline['same_loop']:.2f}x)" for n in names], fontsize=8, padding=3
    )
    axis.set_xticks(range(len(names)), [_LABELS[n].replace(" ", "\n", 1) for n in names], fontsize=8)
    axis.set_ylabel("tokens per second, decoding alone")
    axis.margins(y=0.15)
