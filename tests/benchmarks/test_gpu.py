"""`make gpu`: its parts can be started, and what they print becomes one file."""

import json

import pytest
from conftest import tiny_model

from benchmarks import gpu
from benchmarks.recipe import measure
from speculator import Target
from train.command_line import parse


@pytest.mark.parametrize("architecture", ["mlp", "eagle3", "dspark"])
def test_the_steps_of_a_recipe_are_measured_next_to_the_plan(architecture):
    options = {"mlp": "{}", "eagle3": "{aux_layers: [0, 1]}", "dspark": "{aux_layers: [0, 1], anchors: 8}"}
    flags = {"--speculator.architecture": architecture, "--speculator.options": options[architecture]}
    flags |= {
        "--speculator.inner_dim": "16",
        "--speculator.initialise": "random",
        "--data.seq_length": "64",
        "--stage1.per_device_train_batch_size": "2",
    }
    config = parse([word for pair in flags.items() for word in pair])
    found = measure(config, Target(tiny_model(), tokenizer=None), 6)
    assert found["tokens_per_second"] > 0
    assert found["planned_bytes"] > 0


def test_finished_parts_are_kept_and_failed_ones_run_again(tmp_path, monkeypatch):
    parts = {"good": gpu.Part("works", ["calendar", "2026"]), "bad": gpu.Part("fails", ["no_such_module"])}
    monkeypatch.setattr(gpu, "PARTS", parts)
    ran = []
    measured = gpu.measured
    monkeypatch.setattr(gpu, "measured", lambda part, folder: ran.append(part.shows) or measured(part, folder))
    for _ in range(2):
        assert gpu.main(["--output", str(tmp_path)]) == 0
    assert ran == ["works", "fails", "fails"]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["parts"]["good"]["code"] == 0
    assert {"date", "commit", "card"} <= set(found)
    text = (tmp_path / "gpu.md").read_text()
    assert "January" in text
    assert "exit code 1" in text


def test_a_part_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_LIMIT", 0.1)
    assert gpu.measured(gpu.Part("waits", ["http.server", "0"]), tmp_path)["code"] is None
