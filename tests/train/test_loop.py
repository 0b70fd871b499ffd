"""A run that is stopped after every step, and resumed each time, has the bits of one that is not."""

import json
from pathlib import Path

import pytest
import torch
from forked import finish, launch
from loop_runs import CASES, EVERY, STAGE, by_loop
from safetensors.torch import load_file

SCRIPT = str(Path(__file__).parents[1] / "loop_runs.py")


def state_of(folder: Path) -> str:
    """Weights, moments and progress in full precision, without figures of the time."""
    progress = json.loads((folder / "trainer_state.json").read_text())
    timing = ("runtime", "per_second", "step_over_target", "seconds_left")
    for entry in progress["log_history"]:
        for name in [name for name in entry if any(word in name for word in timing)]:
            del entry[name]
    parts = [load_file(folder / "model.safetensors"), torch.load(folder / "optimizer.pt"), progress]
    return json.dumps(parts, default=lambda tensor: tensor.tolist(), sort_keys=True)


def assert_equal(folder: Path) -> None:
    for step in (STAGE.save_steps, STAGE.max_steps):
        stopped, whole = (state_of(folder / name / f"checkpoint-{step}") for name in ("stopped", "whole"))
        assert stopped == whole


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_resumed_after_every_step(case, tmp_path):
    by_loop(case, tmp_path / "whole")
    by_loop(case, tmp_path / "stopped", *EVERY)
    assert_equal(tmp_path)


@pytest.mark.parametrize(
    "cases", [pytest.param(("sharded",), id="sharded"), pytest.param(tuple(CASES), id="all", marks=pytest.mark.soak)]
)
def test_a_run_on_two_processes_is_resumed_after_every_step(cases, tmp_path):
    finish(launch(2, SCRIPT, str(tmp_path), *cases))
    for case in cases:
        assert_equal(tmp_path / case)
