import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from speculator.errors import UserError
from speculator.files import (
    MANIFEST,
    acquire,
    cache_folder,
    cached_object,
    check_output_file,
    check_output_folder,
    make_cache_folder,
    manifest_error,
    new_folder,
    parse_json,
    parse_rows,
    read_rows,
    read_text,
    write_json,
    write_manifest,
    write_text,
)


def test_a_file_is_replaced_and_no_temporary_file_is_left(tmp_path):
    file = tmp_path / "report.md"
    for text in ("old", "né\n"):
        write_text(file, text)
        assert file.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "report.md"
    write_text(file, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_text(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_an_unwritable_path_is_a_user_error(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "nowhere/file"):
        with pytest.raises(UserError, match=name):
            write_text(tmp_path / name, "")
        with pytest.raises(UserError, match=name):
            check_output_file("--output", tmp_path / name)
    with pytest.raises(UserError, match="pipe"):
        check_output_folder("--output", tmp_path / "pipe")
    check_output_file("--output", tmp_path / "new")
    check_output_folder("--output", tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


def test_an_output_folder_that_cannot_be_made_is_found_before_the_work(tmp_path, monkeypatch):
    check_output_folder("--output", tmp_path / "new" / "deep")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # tests may run as root
    with pytest.raises(UserError, match=f"--output {tmp_path}/new/deep: {tmp_path} can't be written to"):
        check_output_folder("--output", tmp_path / "new" / "deep")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="not a folder"):
        check_output_folder("--output", tmp_path / "file")


def test_only_a_regular_utf8_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes("né".encode("latin-1"))
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero", tmp_path / "none", tmp_path / "latin"):
        with pytest.raises(UserError, match=str(path)):
            read_text(path)


def test_writing_through_a_symlink_keeps_it(tmp_path):
    (tmp_path / "link").symlink_to("below/file")
    (tmp_path / "below").mkdir()
    for text in ("made", "replaced"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "below" / "file").read_text() == text


def test_json_has_null_for_nan(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1.5, float("nan"), (float("inf"), "x")], "b": {"c": -float("inf")}})
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == {
        "a": [1.5, None, [None, "x"]],
        "b": {"c": None},
    }


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "9" * 5000])
def test_malformed_json_names_its_source(text):
    with pytest.raises(UserError, match=r"^rows\.jsonl:3: "):
        parse_json(text, "rows.jsonl:3")


def test_a_malformed_row_is_reported_with_its_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n"\xff"\n[2]\n')
    assert [(number, row, bool(error)) for number, row, error in parse_rows(file)] == [
        (1, {"a": 1}, False),
        (3, None, True),
        (4, None, True),
        (5, [2], False),
    ]
    with pytest.raises(UserError, match=r"rows\.jsonl:3"):
        list(read_rows(file))


def test_a_folder_appears_complete_or_not_at_all(tmp_path):
    with new_folder(tmp_path / "made") as scratch:
        (scratch / "below").mkdir()
        (scratch / "below" / "file").write_text("x")
        assert not (tmp_path / "made").exists()
    assert (tmp_path / "made" / "below" / "file").read_text() == "x"

    def fill(name):
        with new_folder(tmp_path / name) as scratch:
            (scratch / "file").write_text("new")
            if name == "other":
                raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fill("other")
    with pytest.raises(UserError, match="made"):
        fill("made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["below"]


def test_a_folder_has_one_writer(tmp_path):
    with new_folder(tmp_path / "made") as scratch:
        (scratch / "file").write_text("first")
        with pytest.raises(UserError, match="another process is writing"), new_folder(tmp_path / "made"):
            pass
    assert (tmp_path / "made" / "file").read_text() == "first"
    with pytest.raises(UserError, match="not empty"), new_folder(tmp_path / "made"):
        pytest.fail("a command that began a moment later works for nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_killed_process_releases_its_lock(tmp_path):
    code = (
        f"import filelock; l = filelock.FileLock({str(tmp_path / 'lock')!r}); l.acquire(); print(flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    lock = FileLock(tmp_path / "lock")
    with pytest.raises(UserError, match="busy"):
        acquire(lock, "busy")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    acquire(lock, "busy")
    lock.release()


def test_a_manifest_shows_a_missing_or_changed_file(tmp_path):
    for name in ("weights", "config"):
        (tmp_path / name).write_bytes(b"12")
    assert MANIFEST in manifest_error(tmp_path)
    write_manifest(tmp_path)
    assert manifest_error(tmp_path) is None
    (tmp_path / "weights").write_bytes(b"21")
    assert "weights" in manifest_error(tmp_path)
    (tmp_path / "config").unlink()
    assert "config" in manifest_error(tmp_path)


def test_the_cache_folder_may_start_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPECULATOR_CACHE", "~/kept")
    assert cache_folder() == tmp_path / "kept"


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_without_a_home_a_cache_is_asked_for(home, monkeypatch, tmp_path):
    """A container runs under a user that its machine does not know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.path.expanduser", lambda path: path if home is None else path.replace("~", home))
    with pytest.raises(UserError, match="SPECULATOR_CACHE"):
        make_cache_folder()
    with cached_object("kind", "a name") as content:
        assert content == {}
    assert not list(tmp_path.iterdir())


def test_a_damaged_or_unwritable_cache_entry_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    with cached_object("kind", "a name") as content:
        content["x"] = 1
    with cached_object("kind", "a name") as content:
        assert content == {"x": 1}
    (file,) = (tmp_path / "cache" / "kind").glob("*.json")
    file.write_text("[")
    with cached_object("kind", "a name") as content:
        assert content == {}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "file" / "below"))
    with cached_object("kind", "a name") as content:
        assert content == {}


def test_an_existing_empty_folder_is_filled_in_its_place(tmp_path, monkeypatch):
    """It may be the current folder, or a mount point, which can't be replaced."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "made.partial").mkdir()  # of a killed process
    before = made.stat().st_ino
    monkeypatch.chdir(made)
    with new_folder(Path()) as scratch:
        (scratch / "below").mkdir()
        (scratch / "below" / "file").write_text("x")
        (scratch / "config.json").write_text("{}")
    assert made.stat().st_ino == before
    assert Path("below/file").read_text() == "x"
    assert sorted(path.name for path in made.iterdir()) == ["below", "config.json"]
