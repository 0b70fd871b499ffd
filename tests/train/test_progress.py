"""The pace of training, and the line that says it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import settled
from transformers import LlamaConfig

from eval.validation import NEW_TOKENS
from speculator.heads.training import IGNORE
from train import progress
from train.checkpoint import METRIC
from train.door.plan import Plan, Speed
from train.door.sizes import Prompt
from train.options.config import RunConfig
from train.progress import Clock, Display, log_line


def paced(monkeypatch, token_at_peak) -> dict[str, float]:
    """Of two steps of 3 seconds, 2 of them the target's, on 40 tokens of each of 2 processes; 30 have a label."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    clock = Clock(torch.device("cpu"), Display(token_at_peak=token_at_peak))
    clock.begin(10, 20)
    labels = torch.zeros(4, 10).index_fill(0, torch.tensor(3), IGNORE)
    for step in (11, 12):
        with clock.steps:
            clock.count({"input_ids": torch.zeros(4, 10), "labels": labels})
            with clock.target:
                now[0] += 2
            now[0] += 1
        clock.passed(step)
        now[0] += 1  # an evaluation, say
    return clock.figures(12, 2)


def test_a_log_has_the_pace_of_the_steps_since_the_last(monkeypatch):
    known = {"step_over_target": 1.5, "tokens_per_second": 2 * 80 / 6, "seconds_left": 5.0 * 8}
    assert paced(monkeypatch, None) == pytest.approx(known)
    # The head computes labelled tokens only: all 80 would flatter.
    assert paced(monkeypatch, (0.02, 0.01)) == pytest.approx({**known, "mfu": (80 * 0.02 + 60 * 0.01) / 6})


@pytest.mark.parametrize("token_at_peak", [None, (0.02, 0.01)])
def test_a_log_line_has_at_most_120_characters_and_no_names_of_metrics(monkeypatch, token_at_peak):
    logs = {
        "loss": 16.5,
        "plain_loss": 12.25,
        "learning_rate": 1e-3,
        "position0/accuracy": 0.25,
        "position1/accuracy": 0.5,
    }
    figures = {**logs, **paced(monkeypatch, token_at_peak), "seconds_left": 99_999.0, "tokens_per_second": 1_234_567.0}
    line = log_line(12_345, 20_000, figures)
    assert len(line) <= 120
    assert ("MFU" in line) is (token_at_peak is not None)
    assert all(part in line for part in ("12345/20000", "loss 16.50, plain 12.25", "25%", "1,234,567 tokens/s", "left"))
    evaluated = {"eval_loss": 2.5, "eval_plain_loss": 2.504, "eval_acceptance_length": 1.25}
    evaluated |= {"eval_acceptance_length_sampled": 1.5, METRIC: 1.375, "eval_forecast_error": 0.012}
    line = log_line(12_345, 20_000, evaluated)
    assert len(line) <= 120
    assert all(part in line for part in ("12345", "loss 2.50,", "1.25", "1.50", "1.38 ± 0.01"))
    assert "_" not in line


def plan(**own) -> Plan:
    """Stage 1: 100 steps of 2 rows, an evaluation every 50; stage 2: 40 steps of 1 row, one every 20."""
    config = RunConfig()
    stage1 = replace(config.stage1, max_steps=100, per_device_train_batch_size=2, eval_steps=50)
    generate = replace(config.stage2.generate, max_rows=64, batch_size=8, max_new_tokens=10)
    stage2 = replace(config.stage2, max_steps=40, per_device_train_batch_size=1, eval_steps=20, generate=generate)
    settings = replace(config.eval, validation_rows=6, validation_prompts=3, max_prompts=4, max_new_tokens=5)
    config = replace(config, stage1=stage1, stage2=replace(stage2, **own), eval=replace(settings, tune_prompts=2))
    target = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4)
    return Plan(settled(config, target))


def test_the_time_of_a_run_is_said_by_phase_after_its_first_steps(monkeypatch):
    # A row takes 3 s in training and 1 s in an evaluation; n rows decode a step in n / 10 s.
    speed = Speed({"stage1": 3.0, "stage2": 3.0}, lambda rows: rows / 10)
    check = 6 * 1 + 2 * NEW_TOKENS * 0.3
    known = plan().knowing(256, [Prompt(40)] * 64, stage1=9)
    assert known.seconds(speed) == pytest.approx(
        {
            "stage1": 600 + 2 * check,
            "generating": 8 * 10 * 0.8,
            "stage2": 120 + 2 * check,
            "measuring": 90 + 2 * 2 * 5 * 0.1 + 2 * 4 * 5 * 5 * 0.1,
        }
    )
    few = plan().knowing(256, [Prompt(40, answers=2)] * 5, stage1=9)
    assert few.seconds(speed)["generating"] == 20 * 0.5
    # 64 texts of 30 + 10 tokens fill 16 rows of 160.
    epochs = plan(epochs=5).knowing(160, [Prompt(30)] * 64, stage1=9)
    assert epochs.seconds(speed)["stage2"] == 5 * 16 * 3 + 4 * check
    assert list(known.seconds(Speed(speed.row, None))) == ["stage1", "stage2"]

    said, now = [], [0.0]
    monkeypatch.setattr(progress, "log", said.append)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    outlook = partial(known.outlook, None, [], "stage1")  # a target that is not decoded here
    clock = Clock(torch.device("cpu"), Display(outlook=outlook))
    clock.begin(0, 100)
    for step in range(1, 6):
        now[0] += 6.0
        clock.passed(step)
    (text,) = said
    assert all(part in text for part in ("0:12:24", "stage1 0:10:12", "--stage1.max_steps"))
    rest = known.outlook(None, [], "stage2", 3.0)  # 40 steps, and two evaluations of 6 rows
    assert "rest of training" in rest
    assert "about 0:02:12 here: stage2 0:02:12 (--stage2.max_steps" in rest


def test_the_first_estimate_takes_seconds_of_short_steps(monkeypatch):
    steps, now = [], [0.0]
    monkeypatch.setattr(progress, "log", lambda text: None)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    clock = Clock(torch.device("cpu"), Display(outlook=steps.append))
    clock.begin(0, 100)
    for step in range(1, 31):
        now[0] += 3.0 if step == 2 else 0.25  # one that something else on the machine held up
        clock.passed(step)
    assert steps == pytest.approx([(3.0 + 8 * 0.25) / 9])
