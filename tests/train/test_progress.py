"""The pace of training, and the line that says it."""

from types import SimpleNamespace

import pytest
import torch

from train import progress, timing
from train.checkpoint import METRIC
from train.progress import Pace, log_line


def paced(monkeypatch, token_at_peak) -> dict[str, float]:
    """Of two steps of 3 seconds, each with 2 seconds of the target's, on 40 tokens of each of 2 processes."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    pace, state = Pace(torch.device("cpu"), token_at_peak), SimpleNamespace(global_step=10, max_steps=20)
    pace.on_train_begin(None, state, None)
    for _ in range(2):
        pace.on_step_begin()
        with pace.of_target(torch.zeros(4, 10)):
            now[0] += 2
        now[0] += 1
        pace.on_step_end()
        now[0] += 1  # an evaluation, say
        state.global_step += 1
    return pace.figures(state, 2)


def test_a_log_has_the_pace_of_the_steps_since_the_last(monkeypatch):
    known = {"step_over_target": 1.5, "tokens_per_second": 2 * 80 / 6, "seconds_left": 4.0 * 8}
    assert paced(monkeypatch, None) == pytest.approx(known)
    assert paced(monkeypatch, 0.03) == pytest.approx({**known, "mfu": 80 * 0.03 / 6})


@pytest.mark.parametrize("token_at_peak", [None, 0.03])
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
