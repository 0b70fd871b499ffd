import json

import pytest

from train.checkpoint import MANIFEST, damage, newest, seal


@pytest.fixture
def stage(tmp_path):
    for step in (5, 10, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(range(step)))
        (folder / "trainer_state.json").write_text("{}")
        seal(folder)
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


@pytest.mark.parametrize("harm", [cut_off, truncate, flip_a_bit, lose_a_file, half_a_manifest])
def test_a_damaged_one_is_passed_over_and_said_so(stage, harm):
    harm(stage / "checkpoint-20")
    found, lines = newest(stage)
    assert found == stage / "checkpoint-10"
    assert len(lines) == 1
    assert "checkpoint-20" in lines[0]
    assert damage(found) is None


def test_nothing_whole_means_from_the_start(stage):
    for step in (5, 10, 20):
        cut_off(stage / f"checkpoint-{step}")
    found, lines = newest(stage)
    assert found is None
    assert len(lines) == 3
