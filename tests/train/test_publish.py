"""The head that a run leaves."""

import json

import pytest
from conftest import tiny_head

from eval.in_server import FORECAST_FILE
from speculator.checkpoints.card import NAME as CARD
from speculator.files import manifest_error, write_text
from train.finish import is_finished
from train.options.config import RunConfig, TargetConfig
from train.stages import forecast, publish


def test_the_weights_of_a_head_are_as_readable_as_its_config(tmp_path):
    publish(tiny_head(), tmp_path / "head")
    modes = {(tmp_path / "head" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_the_forecast_is_published_with_the_head(tmp_path):
    """Written after the head, it would be missing for good if the run was killed in between."""
    evaluation = {"eval_position0/prefix_accuracy": 0.5}
    walked = forecast({**evaluation, "eval_position0/walked": 0.4, "eval_position1/walked": 0.2})
    assert (walked["acceptance_length"], walked["accepted_per_draft"]) == (pytest.approx(1.6), [0.4, 0.2])
    publish(tiny_head(), tmp_path / "head", forecast(evaluation))
    assert json.loads((tmp_path / "head" / FORECAST_FILE).read_text())["accepted_per_draft"] == [0.5]
    assert manifest_error(tmp_path / "head") is None
    (tmp_path / "head" / FORECAST_FILE).unlink()
    assert manifest_error(tmp_path / "head") is not None


def test_a_run_whose_target_only_trains_is_finished_with_its_card(tmp_path):
    config = RunConfig(TargetConfig(parallel="tp"), output_dir=str(tmp_path))
    publish(tiny_head(), tmp_path / "speculator")
    for name in (FORECAST_FILE, CARD):
        assert not is_finished(config)
        write_text(tmp_path / "speculator" / name, "{}")
    assert is_finished(config)
    (tmp_path / "speculator" / FORECAST_FILE).unlink()  # as by a target that decodes, whose report is not there
    assert not is_finished(config)
