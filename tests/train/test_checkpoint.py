"""Which checkpoint a run resumes from, and the head that it leaves."""

import errno
import json
import shutil

import pytest
from bad_inputs.damages import CHECKPOINTS
from conftest import tiny_head
from safetensors import SafetensorError

from eval.in_server import FORECAST_FILE
from speculator.checkpoints.card import NAME as CARD
from speculator.errors import UserError
from speculator.files import MANIFEST, manifest_error, write_manifest, write_text
from train.checkpoint import newest, numbered, reporting_full_disk
from train.finish import is_finished
from train.options.config import RunConfig, TargetConfig
from train.stages import forecast, publish


@pytest.fixture
def stage(tmp_path):
    for step in (5, 10, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(range(step)))
        (folder / "trainer_state.json").write_text("{}")
        write_manifest(folder)
    return tmp_path


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint_is_skipped_with_one_line(stage, name):
    CHECKPOINTS[name](stage / "checkpoint-20")
    found, lines = newest(stage)
    assert found == stage / "checkpoint-10"
    assert len(lines) == 1
    assert "checkpoint-20" in lines[0]
    assert manifest_error(found) is None
    for step in (5, 10):
        (stage / f"checkpoint-{step}" / MANIFEST).unlink()
    found, lines = newest(stage)
    assert (found, len(lines)) == (None, 3), "the run starts again"


@pytest.mark.parametrize(
    "name", ["checkpoint-30.bak", "checkpoint-best", "checkpoint-030", "checkpoint-", "checkpoint-٣٠"]
)
def test_folders_with_other_names_are_ignored(stage, name):
    shutil.copytree(stage / "checkpoint-5", stage / name)
    (stage / "checkpoint-40").touch()  # a file
    assert newest(stage) == (stage / "checkpoint-20", [])
    assert list(numbered(stage)) == [20, 10, 5]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("Not enough disk space. Needed: 3 GB"),  # of datasets
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_fails_in_one_line_that_names_the_path_whichever_library_reports_it(tmp_path, error):
    with (
        pytest.raises(UserError, match=f"can't write {tmp_path}: .*; the same command resumes"),
        reporting_full_disk(tmp_path),
    ):
        raise error
    with pytest.raises(RuntimeError, match="other"), reporting_full_disk(tmp_path):
        raise RuntimeError("other")


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
