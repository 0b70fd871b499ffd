"""The loop's results: those of the trainer before it, and of a run that was stopped at any step, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from forked import finish, launch
from loop_runs import CASES, STAGE, by_loop, by_trainer
from safetensors.torch import load_file

SCRIPT = str(Path(__file__).parents[1] / "loop_runs.py")


def equal(ours, theirs) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return ours == theirs


def log_of(folder: Path) -> list[dict]:
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    timing = ("runtime", "per_second", "step_over_target", "seconds_left")
    return [{k: v for k, v in entry.items() if not any(word in k for word in timing)} for entry in entries]


def assert_equal(ours: Path, theirs: Path) -> None:
    for step in (4, STAGE.max_steps):
        one, other = (folder / f"checkpoint-{step}" for folder in (ours, theirs))
        assert equal(load_file(one / "model.safetensors"), load_file(other / "model.safetensors"))
        assert equal(torch.load(one / "optimizer.pt"), torch.load(other / "optimizer.pt"))
        if theirs.name == "trainer":
            state, schedule = json.loads((one / "trainer_state.json").read_text()), torch.load(other / "scheduler.pt")
            assert state["schedule"] == schedule
            for mine, old in zip(log_of(one), log_of(other), strict=True):
                # It was added up in float32.
                assert mine.pop("loss", 0) == pytest.approx(old.pop("loss", 0), rel=1e-6)
                assert mine == old
        else:
            assert log_of(one) == log_of(other)
            assert (one / "trainer_state.json").read_text() != ""


@pytest.mark.parametrize("case", CASES)
def test_one_process(case, tmp_path):
    by_trainer(case, tmp_path / "trainer")
    by_loop(case, tmp_path / "whole")
    assert_equal(tmp_path / "whole", tmp_path / "trainer")
    for step in range(1, STAGE.max_steps):
        by_loop(case, tmp_path / str(step), step)
        assert_equal(tmp_path / str(step), tmp_path / "whole")
    by_loop(case, tmp_path / "each", *range(1, STAGE.max_steps))
    assert_equal(tmp_path / "each", tmp_path / "whole")


def test_two_processes(tmp_path):
    finish(launch(2, SCRIPT, str(tmp_path), *CASES))
    for case in CASES:
        folder = tmp_path / case
        assert_equal(folder / "whole", folder / "trainer")
        for name in ("each", *map(str, range(1, STAGE.max_steps))):
            assert_equal(folder / name, folder / "whole")
