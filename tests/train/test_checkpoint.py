"""Which checkpoint a run resumes from."""

import errno
import shutil

import pytest
from bad_inputs.damages import CHECKPOINTS
from safetensors import SafetensorError

from speculator.errors import UserError
from speculator.files import MANIFEST, manifest_error, write_manifest
from train.checkpoint import newest, numbered, reporting_full_disk


@pytest.fixture
def stage(tmp_path):
    for step in (5, 10, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(range(step)))
        (folder / "trainer_state.json").write_text("{}")
        write_manifest(folder)
    return tmp_path


def test_a_run_resumes_from_the_checkpoint_of_the_highest_step(stage):
    assert newest(stage) == (stage / "checkpoint-20", [])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint_is_skipped_with_one_line(stage, name):
    CHECKPOINTS[name](stage / "checkpoint-20")
    found, lines = newest(stage)
    assert found == stage / "checkpoint-10"
    assert len(lines) == 1
    assert "checkpoint-20" in lines[0]
    assert manifest_error(found) is None


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


def test_without_an_undamaged_checkpoint_a_run_starts_again(stage):
    for step in (5, 10, 20):
        (stage / f"checkpoint-{step}" / MANIFEST).unlink()
    found, lines = newest(stage)
    assert found is None
    assert len(lines) == 3
