import errno
import json
import shutil

import pytest
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


def test_the_newest_whole_one_is_taken_by_number(stage):
    assert newest(stage) == (stage / "checkpoint-20", [])


def cut_off(folder):
    (folder / MANIFEST).unlink()


def truncate(folder):
    (folder / "model.safetensors").write_bytes(b"")


def flip_a_bit(folder):
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[0] ^= 1
    (folder / "model.safetensors").write_bytes(raw)


def lose_a_file(folder):
    (folder / "trainer_state.json").unlink()


def half_a_manifest(folder):
    (folder / MANIFEST).write_text(json.dumps({"a": "b"})[:4])


def other_than_a_manifest(folder):
    (folder / MANIFEST).write_text('["model.safetensors"]')


def an_empty_manifest(folder):
    (folder / MANIFEST).write_text("{}")


def a_manifest_of_bytes(folder):
    (folder / MANIFEST).write_bytes(bytes(range(128, 256)))


def a_file_of_another_kind(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


HARM = [cut_off, truncate, flip_a_bit, lose_a_file, half_a_manifest, other_than_a_manifest, an_empty_manifest]


@pytest.mark.parametrize("harm", [*HARM, a_manifest_of_bytes, a_file_of_another_kind])
def test_a_damaged_one_is_passed_over_and_said_so(stage, harm):
    harm(stage / "checkpoint-20")
    found, lines = newest(stage)
    assert found == stage / "checkpoint-10"
    assert len(lines) == 1
    assert "checkpoint-20" in lines[0]
    assert manifest_error(found) is None


@pytest.mark.parametrize(
    "name", ["checkpoint-30.bak", "checkpoint-best", "checkpoint-030", "checkpoint-", "checkpoint-٣٠"]
)
def test_folders_of_other_names_are_not_looked_at(stage, name):
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
def test_no_room_is_a_line_that_names_the_path_whoever_finds_out(tmp_path, error):
    with (
        pytest.raises(UserError, match=f"can't write {tmp_path}: .*; the same command resumes"),
        reporting_full_disk(tmp_path),
    ):
        raise error
    with pytest.raises(RuntimeError, match="other"), reporting_full_disk(tmp_path):
        raise RuntimeError("other")


def test_nothing_whole_means_from_the_start(stage):
    for step in (5, 10, 20):
        cut_off(stage / f"checkpoint-{step}")
    found, lines = newest(stage)
    assert found is None
    assert len(lines) == 3
