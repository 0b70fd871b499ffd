"""Two reports side by side: a difference is said to be one where its interval leaves out 0."""

import copy
import json

import pytest

from eval.__main__ import main
from eval.compare import difference, table

ROW = {
    "name": "text",
    "temperature": 0.0,
    "batch_size": 1,
    "drafter": "head",
    "num_speculative_tokens": 3,
    "acceptance_by_position": [0.5, 0.5, 0.5],
    "acceptance_length": 2.0,
    "acceptance_length_interval": {"low": 1.9, "high": 2.1},
    "speedup": {"plain": {"value": 1.5, "low": 1.4, "high": 1.6}},
}
REPORT = {"target": "t", "speculator": "s", "hardware": "cpu", "settings": {"seed": 0}, "suites": [ROW]}


def changed(**values):
    report = copy.deepcopy(REPORT)
    report["suites"][0] |= values
    return report


def test_a_difference_of_independent_figures_by_hand():
    """1.5 (1.3 to 1.6) and 2.0 (1.7 to 2.4): low 0.5 - hypot(0.3, 0.1), high 0.5 + hypot(0.4, 0.2)."""
    gap = difference({"value": 1.5, "low": 1.3, "high": 1.6}, {"value": 2.0, "low": 1.7, "high": 2.4})
    assert gap["value"] == pytest.approx(0.5)
    assert gap["low"] == pytest.approx(0.5 - (0.09 + 0.01) ** 0.5)
    assert gap["high"] == pytest.approx(0.5 + (0.16 + 0.04) ** 0.5)


def test_the_verdict_follows_the_interval():
    same, faster = changed(), changed(speedup={"plain": {"value": 1.9, "low": 1.8, "high": 2.0}})
    assert table(REPORT, same).count("| same |") == 2
    assert "| +0.40 (+0.26 to +0.54) | differs |" in table(REPORT, faster)
    assert "| -0.40 (-0.54 to -0.26) | differs |" in table(faster, REPORT)
    alone = changed(acceptance_length_interval={"low": None, "high": None})
    assert "| +0.00 (one prompt) |  |" in table(REPORT, alone)


def test_what_else_differs_is_said():
    other = {**changed(), "hardware": "gpu", "settings": {"seed": 1}}
    other["suites"].append({**ROW, "temperature": 1.0})
    text = table(REPORT, other)
    assert "hardware: cpu | gpu" in text
    assert "seed: 0 | 1" in text
    assert "1 rows are in one of the reports alone" in text
    assert "rule, head: rejection | block" in table(changed(rule="rejection"), changed(rule="block"))


def test_the_command(tmp_path, capsys):
    for name, report in (("a", REPORT), ("b", changed())):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "| text | 0 | head of 3 | tokens per step |" in capsys.readouterr().out
    (tmp_path / "c.json").write_text(json.dumps({**REPORT, "suites": [{**ROW, "name": "other"}]}))
    (tmp_path / "d.json").write_text('{"rows": []}')
    for file, message in (("c", "in common"), ("d", "is not a report.json"), ("e", "can't read")):
        assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / f"{file}.json")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


NUMBERS = [None, True, "2", [2], {}, float("nan"), float("inf"), 10**400, -(10**400)]


def odd_reports():
    """Other JSON, and reports of which one thing is not as it should be."""
    yield from ([], [REPORT], None, 3, "x", True, {}, {"suites": []}, {"suites": {}}, {"suites": [REPORT]})
    for name in REPORT:
        yield {key: value for key, value in REPORT.items() if key != name}
        yield from ({**REPORT, name: odd} for odd in (None, 3, ["x"], [[]], [None], {"a": []}) if name != "settings")
    yield from ({**REPORT, "settings": odd} for odd in (None, 3, "x", [], [["a", 1]]))
    for name in ("name", "drafter", "temperature", "acceptance_by_position", "acceptance_length", "speedup"):
        yield {**REPORT, "suites": [{key: value for key, value in ROW.items() if key != name}]}
    for name in ("temperature", "batch_size", "num_speculative_tokens", "acceptance_length"):
        yield from (changed(**{name: odd}) for odd in NUMBERS)
    for name in ("name", "drafter"):
        yield from (changed(**{name: odd}) for odd in (None, 1, [], {}, ["x"]))
    for odd in (None, 3, [], "x", {}, {"low": 1.0}, *({"low": odd, "high": 1.0} for odd in NUMBERS)):
        yield changed(acceptance_length_interval=odd)
    for odd in (None, 3, "x", [1], {"plain": 1.5}, {"plain": {}}, {"plain": [1]}):
        yield changed(speedup=odd)
    for name in ("value", "low", "high"):
        yield from (changed(speedup={"plain": {"value": 1, "low": 1, "high": 1, name: odd}}) for odd in NUMBERS)


def test_other_json_is_one_line(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(REPORT))
    texts = [json.dumps(report) for report in odd_reports()]
    texts += ["", "{", "[" * 100_000, '{"suites":' * 50_000, "9" * 5000, "NaN"]
    for text in texts:
        (tmp_path / "b.json").write_text(text)
        for pair in (("a", "b"), ("b", "a")):
            code = main(["compare", *(str(tmp_path / f"{name}.json") for name in pair)])
            assert code == 2, text[:400]
            error = capsys.readouterr().err
            assert "b.json is not a report.json" in error, text[:400]
            assert error.count("\n") == 1
    (tmp_path / "b.json").write_bytes(json.dumps(REPORT).encode("utf-16"))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "not UTF-8" in capsys.readouterr().err
