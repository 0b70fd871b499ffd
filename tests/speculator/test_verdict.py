"""What a report says first: the head alone, adaptive drafting, and what to do next."""

import pytest
from reports import report, report_row

from speculator.report import Interval
from speculator.verdict import headlines

ONE_PROMPT = {"plain": Interval(1.9)}


def row(drafter, *figures, **changes):
    return report_row(drafter, *figures, **{"name": "chats", **changes})


def lines(*rows) -> list[str]:
    return headlines(report(row("none", 1.0, 1.0), *rows))


def test_the_verdict_begins_with_the_head_and_then_adaptive_drafting():
    warm = row("head", 1.2, 1.5, temperature=1.0)
    alone, adaptive, _ = lines(row("head", 1.4, 2.26), warm, row("ngram", 1.3), row("adaptive", 1.62))
    assert alone == (
        "the head alone: acceptance length 2.26 (2.16 to 2.36), 1.40 (1.35 to 1.45) times as fast as plain decoding, "
        "1.40 (1.35 to 1.45) with the prefill, at temperature 0; acceptance length 1.50 (1.40 to 1.60), 1.20 (1.15 to "
        "1.25), 1.20 (1.15 to 1.25) with the prefill, at temperature 1"
    )
    speedup = "1.62 (1.57 to 1.67)"
    assert adaptive == (
        f"adaptive drafting is {speedup} times as fast as plain decoding, {speedup} with the prefill, at temperature 0"
    )


def test_the_verdict_says_where_adaptive_drafting_is_off():
    rows = [
        row("adaptive", 1.0, batch_size=16, temperature=t, undrafted_share=share)
        for t, share in ((0.0, 0.4), (1.0, 0.97))
    ]
    assert lines(row("head", 0.8, batch_size=16), *rows)[1].endswith(
        "; at batch size 16 it drafted nothing in 97% of the steps at temperature 1"
    )


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (
            [row("head", 0.92, 1.01), row("ngram", 3.2)],
            "almost nothing: train it on more text; n-gram lookup does",
        ),
        ([row("head", 0.9, 1.8)], "the head costs more than it gains here: a drafted token costs 0.30"),
        ([row("head", 1.03, 1.8)], "may be worth serving for one user at a time: its interval includes 1"),
        ([row("head", 1.9, end_to_end_speedup=ONE_PROMPT)], "one prompt has no interval, so measure more"),
        (
            [row("head", 0.8), row("head", 1.5, temperature=1.0)],
            "the head costs more than it gains here at temperature 0: a drafted",
        ),
        (
            [row("head", 1.5), row("head", 1.04, temperature=1.0)],
            "may be worth serving for one user at a time: its interval at temperature 1 includes 1",
        ),
        (
            [row("head", 1.5, end_to_end_speedup={"plain": Interval(1.2, 0.9, 1.5)})],
            "its interval includes 1",
        ),
        (
            [
                row("head", 1.2),
                row("head", 1.5, temperature=1.0, end_to_end_speedup={"plain": Interval(1.3, 0.9, 1.7)}),
            ],
            "its interval at temperature 1 includes 1",
        ),
        ([row("head", 1.5)], "worth serving for one user at a time: 3 tokens per draft"),
        ([row("head", 1.5, batch_size=8)], "worth serving at batch size 8: 3 tokens per draft"),
        ([row("head", 1.5, nodes=5)], "at a time: 5 tokens per draft, a tree 3 deep"),
        (
            [row("head", 1.3), row("head", 1.5, num_speculative_tokens=5)],
            "5 tokens per draft; the length is the fastest of 2 on",
        ),
        ([row("head", 1.5), row("ngram", 1.8)], "3 tokens per draft; n-gram lookup alone is faster"),
        ([row("head", 1.5), row("ngram", 1.2)], "3 tokens per draft"),
    ],
)
def test_a_verdict_names_the_next_step(rows, verdict):
    said = lines(*rows)[-1]
    assert verdict in said
    assert ("lookup" in said) == ("lookup" in verdict)


def test_without_a_head_the_fastest_drafter_of_each_suite_is_named():
    assert lines(row("ngram", 1.3)) == [
        "n-gram lookup is 1.30 (1.25 to 1.35) times as fast as plain decoding, 1.30 (1.25 to 1.35) with the prefill, "
        "at temperature 0"
    ]
    several = lines(row("head", 1.5), row("head", 1.5, name="code"))
    assert [line.partition(":")[0] for line in several] == ["chats, batch size 1"] * 2 + ["code, batch size 1"] * 2
