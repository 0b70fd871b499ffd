"""The pace of training, and the line that says it."""

from types import SimpleNamespace

import pytest
import torch

from train import progress, timing
from train.progress import Pace, ProgressLine


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
def test_one_line_says_everything(monkeypatch, token_at_peak):
    lines = []
    bar = ProgressLine()
    bar.training_bar = SimpleNamespace(write=lines.append)
    logs = {"loss": 1.5, "learning_rate": 1e-3, "head0/accuracy": 0.25, "teacher_forced_acceptance_length": 1.25}
    state = SimpleNamespace(global_step=12, max_steps=20)
    bar.on_log(None, state, None, {**logs, **paced(monkeypatch, token_at_peak)})
    share = "" if token_at_peak is None else " | MFU 40.0%"
    assert lines == [
        "step    12/20 | loss 1.500 | head accuracy 0.25 | teacher-forced acceptance length 1.25 | lr 1.0e-03"
        f" | step/target 1.5 | 27 tokens/s{share} | 0:00:32 left"
    ]
