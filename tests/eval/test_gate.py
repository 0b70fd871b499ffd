"""`eval gate`: a new head is accepted if it is faster beyond doubt and has not forgotten the guard suite."""

import json

import numpy as np
import pytest
from conftest import exit_code, tiny_head

from eval import gate, timing
from eval.__main__ import main
from eval.intervals import paired_bootstrap
from eval.suites import Suite
from speculator import Generation, Sampling, Step, UserError
from speculator.report import Guard, HeadsCompared, Interval


def suite_of(low, high=3.0):
    return HeadsCompared("s", 9, [10.0, 12.0], Interval(2.0, low, high), [2.0, 2.5])


def guard_of(change):
    return None if change is None else Guard("g", 2.0, 2.0, Interval(change + 0.01, change, change + 0.02), -0.05)


@pytest.mark.parametrize(
    ("low", "change", "verdict"),
    [(0.1, None, True), (-0.1, None, False), (None, None, False), (0.1, -0.04, True), (0.1, -0.06, False)],
)
def test_the_verdict_needs_a_clear_gain_and_no_loss_on_the_guard(low, change, verdict):
    assert gate.accepted(suite_of(low), guard_of(change)) is verdict


def test_the_guard_has_the_interval_of_paired_prompts(target, monkeypatch):
    """Ten prompts of 12 steps: the old head accepts 1 of 2 tokens, and the new one 0 or 2."""
    steps = {
        "old": [[Step(2, 1, 2)] * 12] * 10,
        "new": [[Step(2, 2 * (n % 2), 1 + 2 * (n % 2))] * 12 for n in range(10)],
    }
    made = iter(steps.values())
    monkeypatch.setattr(gate, "HeadDrafter", lambda head: head)
    monkeypatch.setattr(gate, "generate", lambda *_, **__: Generation([], next(made)))
    found = gate.compare_on_guard(target, ["old", "new"], Suite("g", [[1]] * 10), Sampling(), 8, 0.05)
    assert (found.old, found.new, found.change.value) == (2, 2, 0)
    assert -0.45 < found.change.low < -0.3, "half of 0.5 / sqrt(10) twice, and t of 9 degrees is 2.26"
    assert not gate.accepted(suite_of(0.1), found), "the point alone would pass"


@pytest.mark.parametrize("gain", [0.02, 0.12])
def test_the_power_that_the_gate_prints_is_that_of_its_interval(gain, monkeypatch):
    monkeypatch.setattr("eval.intervals._RESAMPLES", 100)
    draw, shown, chances = np.random.default_rng(0), 0, []
    for _ in range(200):
        samples = [(*row[:3], row[3] / (1 + gain)) for row in equal_heads(draw, 16)]
        difference = paired_bootstrap(samples, gate._difference)
        speed = sum(row[0] for row in samples) / sum(row[1] for row in samples)
        chances.append(gate.power(difference, speed, gain))
        shown += difference.low > 0
    assert np.mean(chances) == pytest.approx(shown / 200, abs=0.09)


def test_the_difference_is_of_speeds_over_all_prompts_and_not_of_their_mean():
    for last, difference in ((9.5, 0), (4.5, 100 / 5 - 100 / 10)):
        assert gate._difference([(10, 1.0, 10, 0.5), (90, 9.0, 90, last)]) == pytest.approx(difference)


@pytest.mark.parametrize("flags", [["--guard", ""], ["--guard_head", "x"], ["--num_speculative_tokens", "3"]])
def test_a_flag_that_has_no_effect_is_refused(flags, capsys):
    """An empty shell variable would accept a head on speed alone."""
    assert exit_code(main, ["gate", "old", "new", "--target", "t", "--suite", "s", *flags]) == 2
    assert flags[0].removesuffix("_head") in capsys.readouterr().err


def equal_heads(draw, count):
    """Draw timings of two equal heads: answers differ in length and speed, and the machine is sometimes slower."""
    tokens, speed = draw.integers(20, 129, count), 20 * np.exp(draw.normal(0, 0.25, count))
    slower = [np.exp(draw.normal(0, 0.05, count)) * (1 + 0.3 * (draw.random(count) < 0.05)) for _ in range(2)]
    old, new = (tokens / speed * factor for factor in slower)
    return list(zip(tokens.tolist(), old.tolist(), tokens.tolist(), new.tolist(), strict=True))


def false_acceptances(count, draws):
    """Return how often the gate accepts an equal head."""
    draw, taken = np.random.default_rng(count), 0
    for _ in range(draws):
        difference = paired_bootstrap(equal_heads(draw, count), gate._difference)
        taken += gate.accepted(HeadsCompared("s", count, [], difference, []), None)
    return taken


@pytest.mark.parametrize("count", [2, 10, 64, *(pytest.param(count, marks=pytest.mark.soak) for count in (5, 16))])
def test_the_gate_accepts_an_equal_head_as_seldom_as_its_interval_says(count, monkeypatch):
    """2.5% of 400 draws are 10; 22 or more have a probability below 0.1%. Percentiles of two prompts accept 100."""
    monkeypatch.setattr("eval.intervals._RESAMPLES", 100)
    assert 1 <= false_acceptances(count, 400) < 22


@pytest.fixture
def heads(target_folder, tmp_path):
    """A folder with two equal heads."""
    head = tiny_head(vocab_size=300)
    head.save_pretrained(tmp_path / "old")
    head.save_pretrained(tmp_path / "same")
    return tmp_path


def test_as_another_server_each_head_drafts_as_deep_as_it_would_there(target_folder, heads, text_file, monkeypatch):
    tiny_head(vocab_size=300, n_predict=2).save_pretrained(heads / "new")
    seen, samplings = [], []

    def compare(target, drafters, suite, sampling, count):
        seen.extend(drafters)
        samplings.append(sampling.temperature)
        raise UserError("seen")

    monkeypatch.setattr("eval.gate.compare", compare)
    argv = ["--target", str(target_folder), "--suite", str(text_file), "--max_prompts", "1", "--prompt_tokens", "16"]
    argv += ["--max_new_tokens", "8"]
    assert main(["gate", str(heads / "old"), str(heads / "new"), *argv, "--as", "vllm"]) == 2
    asked = ["--as", "vllm", "--num_speculative_tokens", "1"]
    assert main(["gate", str(heads / "old"), str(heads / "new"), *argv, *asked]) == 2
    assert [drafter.nodes for drafter in seen] == [3, 2, 1, 1]
    assert samplings == [1.0, 1.0], "as in requests that name no temperature"


def timed(seconds):
    """Return `time_ours` on a machine where each answer of the old and the new head takes so many seconds."""
    order = []

    def time_ours(target, drafter, prompts, sampling, count, out, *rest, **more):
        timing.time_ours(target, drafter, prompts, sampling, count, out, *rest, **more)
        order.extend([drafter] if drafter not in order else [])
        out.batches[-1].decode_seconds = seconds[order.index(drafter)]

    return time_ours


def test_the_command_rejects_a_head_that_is_not_faster_and_writes_the_figures(
    target_folder, heads, text_file, monkeypatch, capsys
):
    argv = ["gate", str(heads / "old"), str(heads / "same"), "--target", str(target_folder), "--suite", str(text_file)]
    argv += ["--guard", str(text_file), "--max_prompts", "3", "--prompt_tokens", "16", "--max_new_tokens", "8"]
    for seconds, verdict in (([1.0, 1.1], "rejected"), ([1.1, 1.0], "accepted")):
        monkeypatch.setattr("eval.gate.time_ours", timed(seconds))
        assert main([*argv, "--output", str(heads / "gate.json")]) == (verdict == "rejected")
        figures = json.loads((heads / "gate.json").read_text())
        assert (figures["accepted"], figures["guard"]["change"]["low"]) == (verdict == "accepted", 0)
        assert figures["suite"]["difference"]["low"] <= figures["suite"]["difference"]["high"]
        out = capsys.readouterr().out
        assert (out.count("\n"), out.partition(":")[0]) == (1, verdict)
    monkeypatch.undo()
    main([*argv, "--as", "vllm", "--output", str(heads / "gate.json")])
    old, new = json.loads((heads / "gate.json").read_text())["suite"]["acceptance_length"]
    assert old == new, "as vLLM, both draft the same chains"
    capsys.readouterr()
    assert main(["gate", str(heads / "old"), str(heads / "none"), *argv[3:]]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("eval gate: ")
