"""`eval compare`: figures differ where the interval of the difference excludes 0."""

from dataclasses import replace

import pytest
from reports import around, report, report_row

from eval.__main__ import main
from eval.compare import difference, pairs, table
from speculator.report import Bounds, Interval, write_record

ROW = report_row("head")
REPORT = report(ROW)
FASTER = {"speedup": {"plain": around(1.9)}}


def changed(**values):
    return report(replace(ROW, **values))


def test_a_difference_of_independent_figures_equals_one_by_hand():
    """1.5 (1.3 to 1.6) and 2.0 (1.7 to 2.4): low 0.5 - hypot(0.3, 0.1), high 0.5 + hypot(0.4, 0.2)."""
    gap = difference(Interval(1.5, 1.3, 1.6), Interval(2.0, 1.7, 2.4))
    assert gap.value == pytest.approx(0.5)
    assert gap.low == pytest.approx(0.5 - (0.09 + 0.01) ** 0.5)
    assert gap.high == pytest.approx(0.5 + (0.16 + 0.04) ** 0.5)


def test_the_verdict_follows_the_interval():
    same, faster = changed(), changed(**FASTER)
    assert table(REPORT, same).count("| not shown |") == 3
    assert "| +0.40 (+0.33 to +0.47) | differs |" in table(REPORT, faster)
    assert "| -0.40 (-0.47 to -0.33) | differs |" in table(faster, REPORT)
    alone = changed(acceptance_length_interval=Bounds(None, None))
    assert "| +0.00 (one sample) |  |" in table(REPORT, alone)


def test_the_same_prompts_are_compared_one_by_one():
    """The speeds of four prompts differ tenfold, and each is 10% faster in the second report."""
    samples = [[40, 1.0 * k, 40, 1.5 * k, 10, 20] for k in (1, 2, 4, 10)]
    faster = [[tokens, seconds / 1.1, *rest] for tokens, seconds, *rest in samples]
    wide = {"plain": around(1.5, 0.4)}
    ours, theirs = (changed(samples=each, end_to_end_speedup=wide) for each in (samples, faster))
    (line,) = (line for line in table(ours, theirs).splitlines() if "whole answers" in line)
    assert line.endswith("| +0.15 (+0.15 to +0.15) | differs |")
    others = changed(samples=faster, end_to_end_speedup=wide, digest="b")
    (line,) = (line for line in table(ours, others).splitlines() if "whole answers" in line)
    assert "| +0.00 (-0.57 to +0.57) | other conditions |" in line


def test_rows_pair_by_suite_temperature_batch_size_and_decoder():
    """The length of adaptive drafting and of n-gram lookup is a bound, and two heads may differ in theirs."""
    adaptive = [replace(ROW, drafter="adaptive", num_speculative_tokens=n) for n in (5, 7)]
    assert list(pairs(adaptive[:1], adaptive[1:])) == [tuple(adaptive)]
    text = table(changed(drafter="adaptive"), changed(drafter="adaptive", num_speculative_tokens=7))
    assert "| adaptive |" in text
    assert "| head of 3 and 7 |" in table(REPORT, changed(num_speculative_tokens=7))
    short, long = ROW, replace(ROW, num_speculative_tokens=5)
    assert list(pairs([short, long], [long])) == [(long, long)]
    assert not list(pairs([short], [replace(ROW, temperature=1.0)]))
    assert not list(pairs([replace(ROW, drafter="none")], [replace(ROW, drafter="none")]))


def test_folders_of_reports_and_of_runs_are_accepted(tmp_path, capsys):
    for folder in ("report", "run/eval"):
        (tmp_path / folder).mkdir(parents=True)
        write_record(tmp_path / folder / "report.json", REPORT)
    assert main(["compare", str(tmp_path / "report" / "report.json"), str(tmp_path / "run")]) == 0
    assert "| text | 0 | head of 3 | acceptance length |" in capsys.readouterr().out
    assert main(["compare", str(tmp_path), str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [("prompts", (32, 8)), ("turns", (64, 16)), ("max_new_tokens", (128, 48)), ("chat", (True, False))],
)
def test_rows_that_were_measured_under_other_conditions_have_no_verdict(name, values):
    text = table(changed(**{name: values[0]}), changed(**{name: values[1]}, **FASTER))
    assert f"{name} of text: {values[0]} | {values[1]}" in text.splitlines()
    assert text.count("| other conditions |") == 3
    assert "differs" not in text


def test_other_questions_under_the_same_name_have_no_verdict():
    ours, theirs = changed(digest="a"), changed(digest="b")
    text = table(ours, theirs)
    assert "digest of text: a | b" in text.splitlines()
    assert text.count("| other conditions |") == 3
    for other in (changed(digest="a"), replace(theirs, target="u")):  # another target has another tokenizer
        assert table(ours, other).count("| not shown |") == 3


def test_other_versions_settings_and_heads_under_the_same_name_are_named():
    changes = ({"versions": {"torch": n}, "settings": {"seed": n}, "fingerprints": {"head": n}} for n in "ab")
    text = table(*(replace(REPORT, **each, git_commit=str(each["versions"]["torch"])) for each in changes))
    assert {f"{name}: a | b" for name in ("torch", "seed", "fingerprint of head", "git_commit")} <= {*text.splitlines()}


def test_other_settings_and_speeds_on_other_hardware_have_no_verdict():
    faster = changed(**FASTER)
    text = table(REPORT, replace(faster, hardware="gpu"))
    assert [text.count(f"| {verdict} |") for verdict in ("other hardware", "not shown", "differs")] == [2, 1, 0]
    for name in ("dtype", "top_p", "as"):
        assert table(REPORT, replace(faster, settings={name: 1})).count("| other conditions |") == 3


def test_a_report_of_another_version_is_named(tmp_path, capsys):
    write_record(tmp_path / "report.json", replace(REPORT, schema=2))
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert 'is not a report.json of `speculator eval` with "schema": 3' in capsys.readouterr().err
