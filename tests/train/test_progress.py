"""The pace of training, and the line that says it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import settled

from eval.validation import NEW_TOKENS
from speculator.heads.training import IGNORE
from train import duration, progress
from train.checkpoint import METRIC
from train.config import RunConfig
from train.plan import GeneratedText
from train.progress import Clock, Display, StepsBar, log_line


def paced(monkeypatch, token_at_peak) -> dict[str, float]:
    """Of two steps of 3 seconds, 2 of them the target's, on 40 tokens of each of 2 processes; 30 have a label."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    clock = Clock(torch.device("cpu"), token_at_peak)
    clock.begin(10)
    labels = torch.zeros(4, 10).index_fill(0, torch.tensor(3), IGNORE)
    for _ in range(2):
        with clock.steps:
            clock.count({"input_ids": torch.zeros(4, 10), "labels": labels})
            with clock.target:
                now[0] += 2
            now[0] += 1
        now[0] += 1  # an evaluation, say
    return clock.figures(12, 20, 2)


def test_a_log_has_the_pace_of_the_steps_since_the_last(monkeypatch):
    known = {"step_over_target": 1.5, "tokens_per_second": 2 * 80 / 6, "seconds_left": 4.0 * 8}
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


def inputs(own_prompts) -> SimpleNamespace:
    """Stage 1: 100 steps of 2 rows, an evaluation every 50; stage 2: 40 steps of 1 row, one every 20."""
    config = RunConfig()
    stage1 = replace(config.stage1, max_steps=100, per_device_train_batch_size=2, eval_steps=50)
    generate = replace(config.stage2.generate, max_rows=64, batch_size=8, max_new_tokens=10)
    stage2 = replace(config.stage2, max_steps=40, per_device_train_batch_size=1, eval_steps=20, generate=generate)
    settings = replace(config.eval, max_new_tokens=5, tune_prompts=2)
    config = replace(config, stage1=stage1, stage2=stage2, eval=settings)
    suites = {"validation": SimpleNamespace(prompts=[[1]] * 3), "held-out": SimpleNamespace(prompts=[[1]] * 4)}
    lists = {"train_rows": [0] * 9, "validation_rows": [0] * 6}
    return SimpleNamespace(run=settled(config), length=256, **lists, suites=suites, own_prompts=own_prompts)


def test_the_time_of_a_run_is_said_by_part_after_its_first_steps(monkeypatch):
    # A row takes 3 s in training and 1 s in an evaluation; n rows decode a step in n / 10 s.
    text = GeneratedText(rows=64, batch_size=8, length=50, new=10, answers=1, mean=40)
    parts = duration.expected_parts(inputs(None), text, 6.0, lambda rows: rows / 10)
    check = 6 * 1 + 2 * NEW_TOKENS * 0.3
    assert parts == pytest.approx(
        {
            "stage 1": 600 + 2 * check,
            "text for stage 2": 8 * 10 * 0.8,
            "stage 2": 120 + 2 * check,
            "tuning and measuring": 90 + 2 * 2 * 5 * 0.1 + 2 * 4 * 5 * 5 * 0.1,
        }
    )
    few = replace(text, rows=5, answers=2)
    assert duration.expected_parts(inputs(None), few, 6.0, lambda rows: rows / 10)["text for stage 2"] == 20 * 0.5
    run = inputs(None)
    run.run.config.stage2.epochs, run.length = 5, 160  # 64 texts of 40 tokens fill 16 rows
    assert duration.expected_parts(run, text, 6.0, lambda rows: rows / 10)["stage 2"] == 5 * 16 * 3 + 4 * check

    said, now = [], [0.0]
    monkeypatch.setattr(progress, "log", said.append)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    target = SimpleNamespace(device=torch.device("cpu"), config=None, encoder=None)  # one that is not decoded here
    with StepsBar(Display("stage 1", lambda step: duration.line(inputs(None), target, step)), 0, 100) as bar:
        for step in range(1, 6):
            now[0] += 6.0
            bar.show(step)
    (text,) = said
    assert all(part in text for part in ("0:12:24", "stage 1 0:10:12", "--stage1.max_steps"))


def test_the_first_estimate_takes_seconds_of_short_steps(monkeypatch):
    steps, now = [], [0.0]
    monkeypatch.setattr(progress, "log", lambda text: None)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with StepsBar(Display("stage 1", steps.append), 0, 100) as bar:
        for step in range(1, 31):
            now[0] += 3.0 if step == 2 else 0.25  # one that something else on the machine held up
            bar.show(step)
    assert steps == pytest.approx([(3.0 + 8 * 0.25) / 9])
