"""report.md, and how tables, plots and the page label the rows of report.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from data.tally import CUT_SHARE, cut_answers
from speculator.report import Interval, Report, ReportRow
from speculator.tables import BASELINES, DRAFTERS, markdown_table, shown
from speculator.verdict import headlines

TOLERANCE = 0.15  # relative difference of predicted and measured speedup above which the report warns
HOW_TO_READ = (
    "The acceptance length is the mean number of tokens per verification step, the bonus token included. Tokens per "
    "second and speedups leave out the prefill; those of whole answers include it. A figure is followed by its 95% "
    "interval (paired bootstrap over prompts, or over batches at a larger batch size). Draft cost c and verify cost v "
    "are in units of one plain decoding step."
)
_TRANSFORMERS = [name for name in BASELINES if name != "plain"]


def label(row: ReportRow, lengths: set[int]) -> str:
    """Return the name of a row's drafter; if there are several `lengths` (`head_lengths`), a head's has its own."""
    if row.drafter == "head" and len(lengths) > 1:
        return f"{DRAFTERS['head']}, {row.num_speculative_tokens} tokens"
    tree = f", tree of {row.nodes}" if _is_tree(row) and row.drafter != "adaptive" else ""
    return DRAFTERS[row.drafter] + tree


def _is_tree(row: ReportRow) -> bool:
    return row.nodes > row.num_speculative_tokens


def drafter_rows(rows: list[ReportRow]) -> list[ReportRow]:
    """Return the rows whose decoder drafts: all but plain decoding."""
    return [row for row in rows if row.drafter != "none"]


def facts(report: Report) -> dict[str, str]:
    """Return the facts at the top of a report as {title: text}, and why each missing baseline did not run."""
    settings = report.settings
    assisted: Any = settings["hf_assisted"] or {}
    own = ", ".join(f"{name} {value}" for name, value in assisted.items())
    return {
        "target": report.target,
        "speculator": report.speculator,
        "hardware": f"{report.hardware}; {settings['dtype']}, batch size {settings['batch_size']}",
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        **({BASELINES["hf_assisted"]: f"{own}; all other settings are transformers' own"} if own else {}),
        **{f"not run: {name}": reason for name, reason in report.not_run.items()},
    }


UNFINISHED = "unfinished.json"
"""What report.json would be if the measurement ended now: there while it runs, and after it broke off."""


def groups(report: Report) -> dict[str, list[ReportRow]]:
    """Return {heading: rows of its table}: rows share a table if suite, temperature and batch size are the same."""
    found: dict[str, list[ReportRow]] = {}
    several = len({row.batch_size for row in report.suites}) > 1
    for row in report.suites:
        batch = f", batch size {row.batch_size}" if several else ""
        found.setdefault(f"{row.name}, temperature {row.temperature:g}{batch}", []).append(row)
    return found


def decoder_lines(rows: list[ReportRow]) -> Iterator[tuple[ReportRow, str, str | None, Interval]]:
    """Yield one line per decoder of rows that were measured together, the fastest first.

    A line is (row of report.json, key of the decoder's speed in the row's "tokens_per_second", name of the baseline or
    None for a drafter, speedup over plain decoding, which has no bounds for a baseline).
    """
    found: list[tuple[ReportRow, str, str | None, Interval]] = []
    for row in rows:
        speeds = row.tokens_per_second
        if row.drafter != "none":
            found.append((row, "speculative", None, row.speedup["plain"]))
            continue
        for key in (key for key in BASELINES if key in speeds):
            value = speeds[key] / speeds["plain"] if speeds["plain"] else 1.0
            found.append((row, key, BASELINES[key], Interval(value)))
    return iter(sorted(found, key=lambda line: -line[-1].value))


def reached(row: ReportRow) -> int:
    """Return how many draft positions were verified: one more than the most accepted tokens, if the draft has one."""
    most = max((n for n, steps in enumerate(row.accepted_lengths) if steps), default=0)
    return min(most + 1, row.num_speculative_tokens)


def head_lengths(report: Report) -> set[int]:
    """Return the head's draft lengths in a report, if several were measured together; else an empty set."""
    heads = [{row.num_speculative_tokens for row in rows if row.drafter == "head"} for rows in groups(report).values()]
    return set.union(*heads) if max(map(len, heads)) > 1 else set()


def plots(report: Report) -> dict[str, str]:
    """Return the captions of the report's plots, by the name of the plot."""
    names = {
        "speed": "speedup over plain decoding, with 95% intervals",
        "acceptance": "acceptance rate of drafted tokens by position, given that the one before was accepted",
        "lengths": "accepted draft tokens per step",
    }
    if len(head_lengths(report)) > 1:
        names["draft_lengths"] = "speedup by num_speculative_tokens"
    if any(row.categories for row in report.suites):
        names["categories"] = "speedup by category, with 95% intervals"
    if report.training:
        names["training"] = "loss, and measured acceptance length of greedy decoding, by training step"
    return names


def markdown(report: Report) -> str:
    """Return the text of report.md: one table for each suite, temperature and batch size."""
    quoted = ("target", "speculator")
    lines = [
        "# Speculative decoding report",
        "",
        *(f"- {name}: `{fact}`" if name in quoted else f"- {name}: {fact}" for name, fact in facts(report).items()),
        "",
        *(f"**{line[0].upper()}{line[1:]}.**\n" for line in headlines(report)),
        *([*(f"- **warning**: {line}" for line in report.warnings), ""] if report.warnings else []),
        HOW_TO_READ,
    ]
    lengths = head_lengths(report)
    for heading, rows in groups(report).items():
        lines += ["", f"## {heading}", "", _prompts(rows[0]), "", _table(rows, lengths), ""]
        lines += [_details(row, lengths) for row in drafter_rows(rows)]
        lines += _categories(drafter_rows(rows), lengths)
    lines += ["", *(f"![{caption}]({name}.png)" for name, caption in plots(report).items()), ""]
    return "\n".join(lines)


def _prompts(row: ReportRow) -> str:
    turns = f", {row.turns} turns" if row.turns != row.prompts else ""
    return f"{row.prompts} prompts{turns}, at most {row.max_new_tokens} new tokens per answer, up to EOS."


def _table(rows: list[ReportRow], lengths: set[int]) -> str:
    """Return the Markdown table of rows that were measured together; `lengths` are those of `head_lengths`."""
    baselines = [name for name in _TRANSFORMERS if name in rows[0].tokens_per_second]
    header = ["decoder", "acceptance length", "tokens/s", "end-to-end tokens/s", "time to first token, ms"]
    header += ["peak memory, MB", *(f"speedup over {BASELINES[name]}" for name in ("plain", *baselines))]
    header.append("speedup of whole answers")
    lines = []
    for row in rows:
        if row.drafter != "none":
            ratios = [shown(row.speedup[name]) for name in ("plain", *baselines)]
            ratios.append(shown(row.end_to_end_speedup["plain"]))
            lines.append(_line(label(row, lengths), shown(row.length), row, "speculative", ratios))
            continue
        for name in ("plain", *baselines):
            ratios = ["1" if other == name else "" for other in ("plain", *baselines, "plain")]
            lines.append(_line(BASELINES[name], "1.00" if name == "plain" else "", row, name, ratios))
    return markdown_table(header, lines)


def _line(name: str, acceptance_length: str, row: ReportRow, key: str, ratios: list[str]) -> list[str]:
    """Return a decoder's cells in `_table`; `key` is its key in "tokens_per_second", `ratios` its cells of speedups."""
    memory = row.peak_memory_bytes[key]
    return [
        name,
        acceptance_length,
        f"{row.tokens_per_second[key]:.1f}",
        f"{row.end_to_end_tokens_per_second[key]:.1f}",
        f"{1e3 * row.time_to_first_token[key]:.1f}",
        f"{memory / 1e6:.0f}" if memory else "",
        *ratios,
    ]


def _details(row: ReportRow, lengths: set[int]) -> str:
    """Return a list item with a drafter's rule, acceptance rates, costs and predicted speedup."""
    rates = ", ".join(f"{rate:.2f}" for rate in row.acceptance_by_position[: reached(row)])
    cost = row.cost
    parts = [
        f"- {label(row, lengths)}: rule {row.rule}",
        f"acceptance rate of each position, given the one before, {rates}",
        f"draft cost c {cost.draft:.3f} per position, verify cost v {cost.verify:.2f}",
        f"predicted speedup {row.predicted_speedup:.2f}, measured {row.speedup['plain'].value:.2f}",
    ]
    if part := row.spread:
        parts.append(
            f"of whole answers, the speedup is {part.p5:.2f}, {part.p50:.2f} and {part.p95:.2f} at the 5th, "
            f"50th and 95th percentile, and {part.slower:.0%} get slower"
        )
    for what, found in (("context length", row.acceptance_by_context), ("new tokens", row.acceptance_along_answer)):
        if len(found) > 1:
            buckets = (f"{part.acceptance_length:.2f} below {part.below}" for part in found)
            parts.append(f"acceptance length by {what} {', '.join(buckets)}")
    if log := row.server_log:
        rates = ", ".join(f"{accepted / max(1, log.drafts):.3f}" for accepted in log.accepted_per_position)
        parts.append(
            f"a server logs a mean acceptance length of {log.mean_acceptance_length:.2f}, and unconditional "
            f"acceptance rates per position of {rates} ({log.drafts} drafts of {log.drafted_tokens} tokens)"
        )
    if same := row.identical_to_greedy:
        parts.append(
            f"{same.identical} of {same.of} completions identical to transformers' greedy ones in {same.dtype}"
        )
    return "; ".join(parts) + "."


def _categories(rows: list[ReportRow], lengths: set[int]) -> list[str]:
    """Return the lines of a table by category of rows that were measured together; [] without categories."""
    if not any(row.categories for row in rows):
        return []
    header = ("category", "turns", "decoder", "acceptance length", "tokens/s", "speedup over plain decoding")
    lines = [
        (
            part.name,
            part.turns,
            label(row, lengths),
            shown(part.length),
            f"{part.tokens_per_second['speculative']:.1f}",
            shown(part.speedup["plain"]),
        )
        for parts in zip(*(row.categories for row in rows), strict=True)
        for row, part in zip(rows, parts, strict=True)
    ]
    return ["", markdown_table(header, lines)]


def warnings(rows: Sequence[ReportRow]) -> list[str]:
    """Return warnings, a line each: wrong predictions, contexts beyond training, omitted prompts, cut answers."""
    lines = []
    for row in rows:
        where = f"{row.name}, temperature {row.temperature:g}, batch size {row.batch_size}"
        where += f", {row.drafter} of {row.num_speculative_tokens}"
        if row.drafter != "none":
            predicted, measured = row.predicted_speedup, row.speedup["plain"].value
            if abs(predicted / measured - 1) > TOLERANCE:
                lines.append(
                    f"{where}: predicted speedup {predicted:.2f} and measured speedup {measured:.2f} differ by more "
                    f"than {TOLERANCE:.0%}. The usual cause is other work on the machine; rerun on an idle one"
                )
        beyond = [bucket for bucket in row.acceptance_by_context if bucket.beyond_trained_length]
        if beyond:
            steps = sum(bucket.steps for bucket in beyond)
            mean = sum(bucket.steps * bucket.acceptance_length for bucket in beyond) / steps
            lines.append(
                f"{where}: {steps} of {row.steps} steps are beyond the context length of "
                f"{beyond[0].from_} tokens that the head was trained on; acceptance length {mean:.2f} "
                f"there, {row.acceptance_length:.2f} overall"
            )
        if row.drafter == "none":
            lines += [
                f"{row.name}: {count} {what} left out, because they do not fit the target's context"
                for what, count in row.left_out.items()
                if count
            ]
            if seen := row.tuned_on:
                lines.append(
                    f"{row.name}: decoding.json was tuned on {seen} of its {row.prompts} prompts, so figures of "
                    "tuned and adaptive drafts are too good; tune on others (speculator eval tune --suite)"
                )
            if cut := cut_answers({**vars(row), "answers": row.turns}, share=CUT_SHARE):
                where = f"{row.name}, temperature {row.temperature:g}"
                lines.append(f"{where}: {cut}; what follows in longer answers is not measured")
    return list(dict.fromkeys(lines))
