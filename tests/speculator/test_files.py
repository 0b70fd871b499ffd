import os

import pytest

from speculator.errors import UserError
from speculator.files import make_folder, read_text, write_text


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    file = tmp_path / "report.md"
    for text in ("old", "né\n"):
        write_text(file, text)
        assert file.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "report.md"
    write_text(file, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"can't write .*report\.md: No space left"):
        write_text(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_can_not_be_written_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "folder", tmp_path / "nowhere" / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"can't write {path}"):
            write_text(path, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    with pytest.raises(UserError, match="can't make the folder"):
        make_folder(tmp_path / "file" / "below")
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_only_a_regular_text_file_of_a_sane_size_is_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("né")
    assert read_text(file, most=3) == "né"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes("né".encode("latin-1"))
    refused = {
        tmp_path: "a folder",
        tmp_path / "pipe": "a pipe or device",
        "/dev/zero": "a pipe or device",
        tmp_path / "none": "No such file",
        tmp_path / "latin": "not UTF-8",
        f"{file}\0": "NUL",
    }
    for path, reason in refused.items():
        with pytest.raises(UserError, match=reason):
            read_text(path)
    with pytest.raises(UserError, match="3 bytes where at most 2"):
        read_text(file, most=2)
