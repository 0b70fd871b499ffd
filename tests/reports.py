"""Rows and reports of made-up figures."""

from dataclasses import replace

from speculator.report import SCHEMA, Bounds, Cost, Interval, Report, ReportRow


def around(value: float, reach: float = 0.05) -> Interval:
    return Interval(value, value - reach, value + reach)


def report_row(drafter: str = "head", times: float = 1.5, length: float = 2.0, **changes) -> ReportRow:
    """Return a row; it decodes, and gives whole answers, `times` as fast as plain decoding."""
    drafts = drafter != "none"
    made = ReportRow(
        name="text", turns=4, steps=10, acceptance_length=length,
        acceptance_length_interval=Bounds(length - 0.1, length + 0.1), accepted_per_step=length - 1,
        undrafted_share=0.0, acceptance_by_position=[0.75, 0.5], accepted_lengths=[4, 3, 3],
        tokens_per_second={"speculative": 61.5, "plain": 41.0},
        end_to_end_tokens_per_second={"speculative": 61.5, "plain": 41.0},
        speedup={"plain": around(times)} if drafts else {},
        end_to_end_speedup={"plain": around(times)} if drafts else {},
        spread=None, prompts=4, digest="a", left_out={}, chat=True, temperature=0.0, batch_size=1, max_new_tokens=8,
        tuned_on=0, cut=0, drafter=drafter, num_speculative_tokens=3 * drafts, nodes=3 * drafts, rule="block",
        cost=Cost(0.3, 1.1), acceptance_by_context=[], time_to_first_token={"speculative": 0.1, "plain": 0.1},
        peak_memory_bytes={"speculative": 1, "plain": 1}, identical_to_greedy=None, server_log=None, rows_busy=1.0,
        predicted_speedup=times, categories=[], samples=[],
    )  # fmt: skip
    if "num_speculative_tokens" in changes:
        changes = {"nodes": changes["num_speculative_tokens"], **changes}
    return replace(made, **changes)


def report(*rows: ReportRow, **changes) -> Report:
    made = Report(
        schema=SCHEMA, target="t", speculator="s", fingerprints={}, git_commit=None, argv=[], date="", hardware="cpu",
        versions={"torch": "2"}, settings={"seed": 0}, not_run={}, warnings=[], suites=list(rows),
    )  # fmt: skip
    return replace(made, **changes)
