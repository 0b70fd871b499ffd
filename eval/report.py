"""The report: report.json for scripts, report.md for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.metrics import shown
from speculator.files import write_json, write_text
from speculator.tables import BASELINES, DRAFTERS, markdown_table

PARTED = 0.15  # prediction and measurement: something in the loop then costs what it should not
_TRANSFORMERS = [name for name in BASELINES if name != "plain"]


def label(row: dict, lengths: set[int]) -> str:
    """How a table or a plot calls a drafter: with its draft length where several are side by side."""
    several = row["drafter"] == "head" and len(lengths) > 1
    shape = f", tree of {row['nodes']}" if _is_tree(row) and row["drafter"] != "auto" else ""
    shape = f", {row['num_speculative_tokens']} tokens" if several else shape
    return DRAFTERS.get(row["drafter"], row["drafter"]) + shape


def per_step(part: dict) -> dict[str, float | None]:
    """Tokens per step of a row or a category, with its interval."""
    interval = part.get("acceptance_length_interval", {"low": None, "high": None})
    return {"value": part["acceptance_length"], **interval}


def drafter_rows(rows: list[dict]) -> list[dict]:
    """Those of the drafters."""
    return [row for row in rows if row["drafter"] != "none"]


def facts(report: dict) -> dict[str, str]:
    """What was measured, where and by what; and what was not run, with the reason."""
    return {
        "target": report["target"],
        "speculator": report["speculator"],
        "hardware": f"{report['hardware']}; {report['settings']['dtype']}, "
        f"batch size {report['settings']['batch_size']}",
        "versions": ", ".join(f"{name} {v}" for name, v in report["versions"].items()),
        **{f"not run: {name}": reason for name, reason in report["not_run"].items()},
    }


def _is_tree(row: dict) -> bool:
    return row["nodes"] > row["num_speculative_tokens"]


def write(report: dict, folder: Path) -> None:
    """Write both files, each whole or not at all; report.json last, since it marks an evaluation as done."""
    write_text(folder / "report.md", markdown(report))
    write_json(folder / "report.json", report)


def groups(report: dict) -> dict[str, list[dict]]:
    """The rows that were measured together, by a heading."""
    found: dict[str, list[dict]] = {}
    sizes = {row["batch_size"] for row in report["suites"]}
    for row in report["suites"]:
        batch = f", batch size {row['batch_size']}" if len(sizes) > 1 else ""
        found.setdefault(f"{row['name']}, temperature {row['temperature']:g}{batch}", []).append(row)
    return found


def head_lengths(report: dict) -> set[int]:
    """The draft lengths of the head that were measured side by side; none where each table has one."""
    heads = [
        {row["num_speculative_tokens"] for row in rows if row["drafter"] == "head"} for rows in groups(report).values()
    ]
    return set.union(*heads) if max(map(len, heads)) > 1 else set()


def markdown(report: dict) -> str:
    """A table per suite, temperature and batch size, with every baseline that ran."""
    names = ("target", "speculator")
    lines = [
        "# Speculative decoding report",
        "",
        *(f"- {name}: `{fact}`" if name in names else f"- {name}: {fact}" for name, fact in facts(report).items()),
        *(f"- **warning**: {line}" for line in report["warnings"]),
        "",
        "Tokens per step count the token that the target gives itself. Tokens per second leave out the prefill. A",
        "figure is followed by its 95% interval (paired bootstrap over prompts).",
    ]
    lengths = head_lengths(report)
    for heading, rows in groups(report).items():
        lines += ["", f"## {heading}", "", _what(rows[0]), "", _table(rows, lengths), ""]
        lines += [_details(row, lengths) for row in drafter_rows(rows)]
        lines += _categories(rows, lengths)
    lines += ["", *(f"![{alt}]({name}.png)" for name, alt in plots(report).items()), ""]
    return "\n".join(lines)


def plots(report: dict) -> dict[str, str]:
    """The pictures that a report has: their names and what they show."""
    names = {"acceptance": "acceptance by position", "speed": "tokens per second", "lengths": "accepted lengths"}
    if len(head_lengths(report)) > 1:
        names["draft_lengths"] = "speedup against draft length"
    if any("categories" in row for row in report["suites"]):
        names["categories"] = "tokens per step by category"
    return names


def _what(row: dict) -> str:
    turns = f", {row['turns']} turns" if row["turns"] != row["prompts"] else ""
    how = "answers to the chat template, until the target ends them" if row["chat"] else "new tokens each"
    count = f"at most {row['max_new_tokens']}" if row["chat"] else f"{row['max_new_tokens']}"
    return f"{row['prompts']} prompts{turns}, {count} {how}."


def _table(rows: list[dict], lengths: set[int]) -> str:
    speeds = rows[0]["tokens_per_second"]
    theirs = [name for name in _TRANSFORMERS if name in speeds]
    columns = ["decoder", "tokens per step", "tokens/s", "end to end", "first token, ms", "peak memory, MB"]
    columns += ["speedup over the same loop", *(f"over {BASELINES[name]}" for name in theirs)]
    lines = []
    for row in rows:
        if row["drafter"] == "none":
            ratios = ["1", *[""] * len(theirs)]
            lines.append(_line(BASELINES["plain"], "1.00", row, "plain", ratios))
            for name in theirs:
                own = ["", *("1" if other == name else "" for other in theirs)]
                lines.append(_line(BASELINES[name], "", row, name, own))
        else:
            ratios = [shown(row["speedup"][name]) for name in ("plain", *theirs)]
            lines.append(_line(label(row, lengths), shown(per_step(row)), row, "speculative", ratios))
    return markdown_table(columns, lines)


def _line(name: str, per_step: str, row: dict, key: str, ratios: list[str]) -> list[str]:
    memory = row["peak_memory_bytes"][key]
    return [
        name,
        per_step,
        f"{row['tokens_per_second'][key]:.1f}",
        f"{row['end_to_end_tokens_per_second'][key]:.1f}",
        f"{1e3 * row['time_to_first_token'][key]:.1f}",
        f"{memory / 1e6:.0f}" if memory else "",
        *ratios,
    ]


def _details(row: dict, lengths: set[int]) -> str:
    by_position = ", ".join(f"{value:.2f}" for value in row["acceptance_by_position"])
    cost, measured = row["cost"], row["speedup"]["plain"]["value"]
    if _is_tree(row):
        what, price = f"a draft of {row['nodes']} tokens", row["num_speculative_tokens"] * cost["draft_over_decode"]
    else:
        what, price = "one drafted token", cost["draft_over_decode"]
    text = (
        f"- {label(row, lengths)}: rule {row['rule']}; {row['accepted_per_step']:.2f} drafted tokens accepted per "
        f"step, by position {by_position}; {what} costs {price:.3f} plain steps and a verify pass "
        f"{cost['verify_over_decode']:.2f}, which predicts a speedup of {row['predicted_speedup']:.2f} (measured "
        f"{measured:.2f})"
    )
    if len(row["acceptance_by_context"]) > 1:
        buckets = (f"{b['acceptance_length']:.2f} below {b['below']}" for b in row["acceptance_by_context"])
        text += f"; tokens per step by length of context: {', '.join(buckets)}"
    if "identical_to_greedy" in row:
        same = row["identical_to_greedy"]
        text += f"; {same['identical']} of {same['of']} texts identical to transformers' greedy ones in {same['dtype']}"
    return text + "."


def _categories(rows: list[dict], lengths: set[int]) -> list[str]:
    rows = drafter_rows(rows)
    if not any("categories" in row for row in rows):
        return []
    header = ("category", "turns", "decoder", "tokens per step", "tokens/s", "speedup over the same loop")
    lines = []
    for parts in zip(*(row["categories"] for row in rows), strict=True):
        for row, part in zip(rows, parts, strict=True):
            speed, ratio = part["tokens_per_second"]["speculative"], shown(part["speedup"]["plain"])
            cells = (part["name"], part["turns"], label(row, lengths), shown(per_step(part)), f"{speed:.1f}", ratio)
            lines.append(cells)
    return ["", markdown_table(header, lines)]


def warnings(rows: Sequence[dict]) -> list[str]:
    """What a reader of the figures should know, a line each."""
    lines = []
    for each in rows:
        where = f"{each['name']}, temperature {each['temperature']:g}, batch size {each['batch_size']}"
        where += f", {each['drafter']} of {each['num_speculative_tokens']}"
        ratio = each.get("predicted_over_measured", 1.0)
        if abs(ratio - 1) > PARTED:
            lines.append(
                f"{where}: predicted speedup {each['predicted_speedup']:.2f}, measured "
                f"{each['speedup']['plain']['value']:.2f}: they part by more than {PARTED:.0%}, so something in "
                "the loop costs what it should not, or the machine was busy"
            )
        beyond = [bucket for bucket in each["acceptance_by_context"] if bucket["beyond_trained_length"]]
        if beyond:
            steps = sum(bucket["steps"] for bucket in beyond)
            mean = sum(bucket["steps"] * bucket["acceptance_length"] for bucket in beyond) / steps
            lines.append(
                f"{where}: {steps} of {each['steps']} steps lie beyond the {beyond[0]['from']} tokens of context that "
                f"the head was trained on; {mean:.2f} tokens per step there, {each['acceptance_length']:.2f} overall"
            )
        for what, count in each["left_out"].items():
            if count and each["drafter"] == "none":
                lines.append(f"{each['name']}: {count} {what} left out: longer than the target's context has room for")
    return list(dict.fromkeys(lines))
