"""The report: report.json for scripts, report.md for people."""

from __future__ import annotations

import json
from pathlib import Path

from speculator.files import write_text

_LABELS = {"head": "speculator", "ngram": "n-gram lookup", "model": "draft model", "none": "plain decoding, same loop"}


def write(report: dict, folder: Path) -> None:
    """Write both files, each whole or not at all; report.json last, since it marks an evaluation as done."""
    for name, text in (("report.md", markdown(report)), ("report.json", json.dumps(report, indent=1))):
        write_text(folder / name, text)


def markdown(report: dict) -> str:
    """A table per suite and temperature, with every baseline that ran."""
    settings = report["settings"]
    lines = [
        "# Speculative decoding report",
        "",
        f"- target: `{report['target']}`",
        f"- speculator: `{report['speculator']}`",
        f"- hardware: {report['hardware']}; {settings['dtype']}, batch size {settings['batch_size']}",
        f"- versions: {', '.join(f'{name} {v}' for name, v in report['versions'].items())}",
        "",
        "Tokens per step count the token that the target gives itself. Tokens per second leave out the prefill. A",
        "speedup is followed by its 95% interval (paired bootstrap over prompts).",
    ]
    groups: dict[tuple, list[dict]] = {}
    for row in report["suites"]:
        groups.setdefault((row["name"], row["temperature"], row["prompts"], row["max_new_tokens"]), []).append(row)
    for (name, temperature, prompts, count), rows in groups.items():
        lines += [
            "",
            f"## {name}, temperature {temperature:g}",
            "",
            f"{prompts} prompts, {count} new tokens each.",
            "",
            "| decoder | tokens per step | tokens/s | speedup over the same loop | over transformers generate |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            speeds = row["tokens_per_second"]
            if row["drafter"] == "none":
                lines.append(f"| {_LABELS['none']} | 1.00 | {speeds['same_loop']:.1f} | 1 | |")
                lines.append(f"| transformers generate | 1.00 | {speeds['hf_generate']:.1f} | | 1 |")
            else:
                ratios = row["speedup"]
                lines.append(
                    f"| {_LABELS[row['drafter']]} | {row['tokens_per_step']:.2f} | {speeds['speculative']:.1f} "
                    f"| {_interval(ratios['same_loop'])} | {_interval(ratios['hf_generate'])} |"
                )
        lines.append("")
        lines += [_details(row) for row in rows if row["drafter"] != "none"]
    lines += ["", "![acceptance by position](acceptance.png)", "![tokens per second](speed.png)", ""]
    return "\n".join(lines)


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _details(row: dict) -> str:
    by_position = ", ".join(f"{value:.2f}" for value in row["acceptance_by_position"])
    cost = row["cost"]
    text = (
        f"- {_LABELS[row['drafter']]}: acceptance by position {by_position}; one drafted token costs "
        f"{cost['draft_over_decode']:.3f} plain steps and a verify pass {cost['verify_over_decode']:.2f}, "
        f"which predicts a speedup of {row['predicted_speedup']:.2f}"
    )
    if "identical_to_greedy" in row:
        same = row["identical_to_greedy"]
        text += f"; {same['identical']} of {same['of']} texts identical to transformers' greedy ones in {same['dtype']}"
    return text + "."
