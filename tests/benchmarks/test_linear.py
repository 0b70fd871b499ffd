"""The table of matrix products says what was measured."""

import json

import pytest

from benchmarks import linear
from benchmarks.linear import main, markdown
from speculator import Target
from speculator.target.linear import FAST_DTYPES, TIMED_ROWS, PackedLinear

pytestmark = pytest.mark.skipif(not FAST_DTYPES, reason="no oneDNN here")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))


def test_both_products_are_timed_on_every_size_and_count(tmp_path, monkeypatch, capsys):
    timed = []

    def clock(work):
        timed.append(type(work.__defaults__[0][0]))
        return float(len(timed)), None

    monkeypatch.setattr(linear, "clock", clock)
    monkeypatch.setattr(linear, "_BYTES", 1)
    flags = ["--size", "512x640", "--size", "8x8", "--rows", "3", "--blocks", "3", "--output", str(tmp_path)]
    assert main(flags) == 0
    report = json.loads((tmp_path / "linear.json").read_text())
    assert [(line["in"], line["out"], line["rows"]) for line in report["lines"]] == [
        (inputs, outputs, rows) for inputs, outputs in ((512, 640), (8, 8)) for rows in (1, 3)
    ]
    assert [each is PackedLinear for each in timed] == [False, True] * (len(timed) // 2)
    first = report["lines"][0]
    # Blocks of two: the first, which packs, is left out; the median of the others, over two matrices.
    assert (first["torch"], first["packed"]) == (5 / 2, 6 / 2)
    assert (tmp_path / "linear.md").read_text() in capsys.readouterr().out


def test_ratios_are_to_the_same_size(capsys):
    lines = [
        {"in": 4, "out": 4, "rows": 1, "torch": 1e-6, "packed": 2e-6},
        {"in": 4, "out": 4, "rows": 5, "torch": 6e-6, "packed": 3e-6},
    ]
    text = markdown({"hardware": "h", "torch": "t", "dtype": "float32", "blocks": 1, "lines": lines})
    assert "| 4 x 4 | 5 | 6 | 3 | 2.00 | 6.00 | 1.50 |" in text


def test_steps_of_a_target_are_timed_by_each_way_in_turns(target_folder, monkeypatch, capsys):
    turns = []

    def measure(target: Target, drafter, prompts, sampling, blocks, costs):
        assert drafter.num_speculative_tokens == 4
        turns.append(next(layer.packs for layer in target.model.modules() if isinstance(layer, PackedLinear)))
        for part in (costs.plain, costs.draft, costs.verify):
            part.append(float(len(turns)))

    monkeypatch.setattr(linear, "measure_costs", measure)
    assert main(["--target", str(target_folder), "--blocks", "2"]) == 0
    assert turns == [[False] * len(TIMED_ROWS), [True] * len(TIMED_ROWS), None] * 3
    table = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in table.splitlines()[-4:-1]] == ["torch's own", "packed", "chosen"]


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--blocks", "0"], ["--size", "4"], ["--size", "0x4"]])
def test_flags_that_cannot_be_are_one_line(flags, capsys):
    try:
        code = main(flags)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
