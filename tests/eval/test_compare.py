"""`eval compare`: figures differ where the interval of the difference excludes 0."""

import copy
import json

import pytest

from eval.__main__ import main
from eval.compare import difference, pairs, table

ROW = {
    "name": "text",
    "temperature": 0.0,
    "batch_size": 1,
    "drafter": "head",
    "rule": "block",
    "num_speculative_tokens": 3,
    "nodes": 3,
    **{"prompts": 4, "turns": 4, "max_new_tokens": 8, "chat": True, "digest": "a"},
    "acceptance_by_position": [0.5, 0.5, 0.5],
    "acceptance_length": 2.0,
    "acceptance_length_interval": {"low": 1.9, "high": 2.1},
    "speedup": {"plain": {"value": 1.5, "low": 1.4, "high": 1.6}},
}
REPORT = {"schema": 2, "target": "t", "speculator": "s", "hardware": "cpu", "suites": [ROW]}
REPORT |= {"versions": {"torch": "2"}, "settings": {"seed": 0}}


def changed(**values):
    report = copy.deepcopy(REPORT)
    report["suites"][0] |= values
    return report


def test_a_difference_of_independent_figures_equals_one_by_hand():
    """1.5 (1.3 to 1.6) and 2.0 (1.7 to 2.4): low 0.5 - hypot(0.3, 0.1), high 0.5 + hypot(0.4, 0.2)."""
    gap = difference({"value": 1.5, "low": 1.3, "high": 1.6}, {"value": 2.0, "low": 1.7, "high": 2.4})
    assert gap["value"] == pytest.approx(0.5)
    assert gap["low"] == pytest.approx(0.5 - (0.09 + 0.01) ** 0.5)
    assert gap["high"] == pytest.approx(0.5 + (0.16 + 0.04) ** 0.5)


def test_the_verdict_follows_the_interval():
    same, faster = changed(), changed(speedup={"plain": {"value": 1.9, "low": 1.8, "high": 2.0}})
    assert table(REPORT, same).count("| not shown |") == 2
    assert "| +0.40 (+0.26 to +0.54) | differs |" in table(REPORT, faster)
    assert "| -0.40 (-0.54 to -0.26) | differs |" in table(faster, REPORT)
    alone = changed(acceptance_length_interval={"low": None, "high": None})
    assert "| +0.00 (one sample) |  |" in table(REPORT, alone)


def test_the_command_prints_a_line_per_figure(tmp_path, capsys):
    for name, report in (("a", REPORT), ("b", changed())):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "| text | 0 | head of 3 | acceptance length |" in capsys.readouterr().out


def test_rows_pair_by_suite_temperature_batch_size_and_decoder():
    """The length of adaptive drafting and of n-gram lookup is a bound, and two heads may differ in theirs."""
    adaptive = [{**ROW, "drafter": "adaptive", "num_speculative_tokens": n} for n in (5, 7)]
    assert list(pairs(adaptive[:1], adaptive[1:])) == [tuple(adaptive)]
    text = table(changed(drafter="adaptive"), changed(drafter="adaptive", num_speculative_tokens=7))
    assert "| adaptive |" in text
    assert "| head of 3 and 7 |" in table(REPORT, changed(num_speculative_tokens=7))
    short, long = ROW, {**ROW, "num_speculative_tokens": 5}
    assert list(pairs([short, long], [long])) == [(long, long)]
    assert not list(pairs([short], [{**ROW, "temperature": 1.0}]))
    assert not list(pairs([{**ROW, "drafter": "none"}], [{**ROW, "drafter": "none"}]))


def test_folders_of_reports_and_of_runs_are_accepted(tmp_path, capsys):
    for folder in ("report", "run/eval"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "report.json").write_text(json.dumps(REPORT))
    assert main(["compare", str(tmp_path / "report"), str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path), str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [("prompts", (32, 8)), ("turns", (64, 16)), ("max_new_tokens", (128, 48)), ("chat", (True, False))],
)
def test_rows_that_were_measured_under_other_conditions_have_no_verdict(name, values):
    faster = {"speedup": {"plain": {"value": 1.9, "low": 1.8, "high": 2.0}}}
    text = table(changed(**{name: values[0]}), changed(**{name: values[1]}, **faster))
    assert f"{name} of text: {values[0]} | {values[1]}" in text.splitlines()
    assert text.count("| other conditions |") == 2
    assert "differs" not in text


def test_other_questions_under_the_same_name_have_no_verdict():
    ours, theirs = changed(digest="a"), changed(digest="b")
    text = table(ours, theirs)
    assert "digest of text: a | b" in text.splitlines()
    assert text.count("| other conditions |") == 2
    for other in (changed(digest="a"), theirs | {"target": "u"}):  # another target has another tokenizer
        assert table(ours, other).count("| not shown |") == 2


def test_other_versions_and_settings_are_named():
    ours, theirs = ({**REPORT, "versions": {"torch": number}, "settings": {"seed": number}} for number in (1, 2))
    assert {"torch: 1 | 2", "seed: 1 | 2"} <= set(table(ours, theirs).splitlines())
