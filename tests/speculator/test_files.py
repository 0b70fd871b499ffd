import json
import os

import pytest
from safetensors import SafetensorError

from speculator.errors import UserError
from speculator.files import (
    cache_folder,
    check_file,
    check_folder,
    make_folder,
    new_folder,
    read_text,
    write_bytes,
    write_json,
    write_text,
)


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


def test_a_symlink_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "link").symlink_to("below/file")
    (tmp_path / "below").mkdir()
    for text in ("made", "replaced"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "below" / "file").read_text() == text
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["file"]


def test_what_is_no_regular_file_is_left_as_it_is(tmp_path):
    """A rename would put a file where a device was: /dev/full was lost so."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in {"pipe": "a pipe or device", "device": "a pipe or device", "loop": "leads to itself"}.items():
        before = os.lstat(tmp_path / name)
        with pytest.raises(UserError, match=reason):
            write_bytes(tmp_path / name, b"x")
        with pytest.raises(UserError, match=reason):
            check_file("--output", tmp_path / name)
        assert os.lstat(tmp_path / name).st_ino == before.st_ino
    with pytest.raises(UserError, match="can't write"):
        write_text(tmp_path / "a\0b", "x")
    with pytest.raises(UserError, match="NUL"):
        check_file("--output", tmp_path / "a\0b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "loop", "pipe"]


def test_json_has_no_nan(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1.5, float("nan"), (float("inf"), "x")], "b": {"c": -float("inf")}})
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == {
        "a": [1.5, None, [None, "x"]],
        "b": {"c": None},
    }


def test_the_file_that_stdout_goes_to_is_refused(tmp_path, monkeypatch):
    """Renamed over, a log that is appended to would be lost, and what is printed after that would go nowhere."""
    log = tmp_path / "log"
    log.write_text("kept")
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda number: os.stat(log) if number == 1 else fstat(number))
    with pytest.raises(UserError, match="where this command prints to"):
        check_file("--output", log)


def test_a_name_that_can_be_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    refused = {"file": "is a file, not a folder", "file/below": "Not a directory", "a\0b": "NUL", "x" * 300: "too long"}
    for name, reason in refused.items():
        with pytest.raises(UserError, match=reason):
            check_folder("--output", tmp_path / name)
    check_folder("--output", tmp_path / "new")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with new_folder(tmp_path / "made") as scratch:
        (scratch / "below").mkdir()
        (scratch / "below" / "file").write_text("x")
        assert not (tmp_path / "made").exists()
    assert (tmp_path / "made" / "below" / "file").read_text() == "x"
    (tmp_path / "file").write_text("")

    def fill(name: str, error: Exception | None = None):
        with new_folder(tmp_path / name) as scratch:
            (scratch / "file").write_text("new")
            if error:
                raise error

    full = "No space left on device"
    for error, kind, message in (
        (OSError(28, full), UserError, full),
        (SafetensorError(f"I/O error: {full} (os error 28)"), UserError, full),
        (UserError("not so"), UserError, "not so"),
        (FileNotFoundError(2, "No such file", "/an/input"), FileNotFoundError, "/an/input"),
        (ValueError("a defect"), ValueError, "a defect"),
    ):
        with pytest.raises(kind, match=message):
            fill("other", error)
    for name in ("made", "file"):
        with pytest.raises(UserError, match=f"can't write {tmp_path / name}: "):
            fill(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "made"]
    fill("other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]


def test_the_cache_may_be_named_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPECULATOR_CACHE", "~/kept")
    assert cache_folder() == tmp_path / "kept"
    monkeypatch.setenv("SPECULATOR_CACHE", "~nobody-of-this-name/x")
    assert cache_folder().name == "x"
