"""A run that is stopped after every step, and resumed each time, has the bits of one that is not."""

import errno
import json
import threading
from concurrent import futures
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from forked import finish, launch
from loop_runs import CASES, EVERY, STAGE, by_loop, loop_of
from safetensors.torch import load_file
from transformers import PreTrainedModel

from speculator.errors import UserError
from speculator.heads import Speculator
from train import loop
from train.checkpoint import newest
from train.interrupts import Background

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


def test_a_checkpoint_is_of_its_step_whatever_follows_and_there_once_it_is_whole(tmp_path, monkeypatch):
    by_loop("adamw", tmp_path / "whole")
    written, log_line, folder = threading.Event(), loop.log_line, tmp_path / "stopped"

    def save(head, *given, **names):
        assert written.wait(20)
        PreTrainedModel.save_pretrained(head, *given, **names)

    def log_of(step, *given):
        if step > STAGE.save_steps + 1:  # two steps were taken meanwhile
            assert newest(folder)[0] is None or written.is_set()
            written.set()
        return log_line(step, *given)

    monkeypatch.setattr(Speculator, "save_pretrained", save, raising=False)
    monkeypatch.setattr(loop, "log_line", log_of)
    (folder / "checkpoint-3.partial").mkdir(parents=True)  # of a killed run
    by_loop("adamw", folder)
    assert_equal(tmp_path)
    assert not list(folder.glob("*.partial"))


def test_an_error_while_a_checkpoint_is_written_ends_the_training_at_the_next_step(tmp_path, monkeypatch):
    check = Background.check
    monkeypatch.setattr(torch, "save", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr(Background, "check", lambda self: (futures.wait(self._writes), check(self)))
    made = loop_of("adamw", tmp_path)
    with pytest.raises(UserError, match=r"can't write .*checkpoint-4: No space left on device; the same command"):
        made.run()
    assert made.progress.global_step == STAGE.save_steps
    assert not list(tmp_path.iterdir())


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
