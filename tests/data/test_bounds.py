"""Files that are no files of rows: each is one line, soon, in little memory."""

import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest
from conftest import tiny_tokenizer
from datasets import Dataset

from data.rendering import load_tokenizer
from data.sources import documents, token_documents
from data.tally import Tally
from speculator.errors import UserError
from speculator.prompts import read_prompts

DEEP = "[" * 100_000 + "]" * 100_000


def read(source, tally=None):
    return list(documents([str(source)], None, tally=tally))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "page.txt", "rows.jsonl.gz"])
def test_a_pipe_or_a_device_is_refused_unread(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="not a regular file"):
        read(tmp_path / name)
    with pytest.raises(UserError, match="not a regular file"):
        read_prompts(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        read(tmp_path / name)


def test_zeros_are_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr("data.tally._HOPELESS", 50)
    with gzip.open(tmp_path / "page.txt.gz", "wb", compresslevel=1) as stream:
        for _ in range(16):
            stream.write(bytes(1 << 20))
    with pytest.raises(UserError, match=r"page.txt.gz: not text: it has NUL characters"):
        read(tmp_path / "page.txt.gz", Tally(0.05))


def test_a_long_line_of_a_text_is_cut_and_whole(tmp_path):
    text = "".join(f"é{i}" for i in range(60_000)) + "\nlast line\n"
    (tmp_path / "page.txt").write_text(text)
    rows = read(tmp_path / "page.txt")
    assert "".join(row["text"] for row in rows) == text
    assert max(len(row["text"]) for row in rows) <= 100_000


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n', encoding="utf-8-sig")
    (tmp_path / "page.txt").write_text("b\r\nc", encoding="utf-8-sig", newline="")
    (tmp_path / "rows.json").write_text('\n [{"text": "d"},\n {"text": "e"}]', encoding="utf-8-sig")
    assert [row["text"] for row in read(tmp_path)] == ["b\nc", "d", "e", "a"]


def test_of_a_text_that_is_not_utf8_the_pieces_that_are_stay(tmp_path):
    lines = [f"line {i} of a book\n".encode() for i in range(3000)]
    lines[10] = "Größe\n".encode("latin-1")
    (tmp_path / "book.txt").write_bytes(b"".join(lines))
    tally = Tally(0.5)
    rows = read(tmp_path / "book.txt", tally)
    assert len(rows) == tally.rows - 1 > 3
    assert [kind.split(":")[0] for kind in tally.kinds] == ["not UTF-8 text"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", json.dumps({"text": "x"}).encode("utf-16"), "rows.jsonl:1: not UTF-8 text"),
        ("rows.jsonl", b'{"text": "Gr\xf6\xdfe"}', "rows.jsonl:1: not UTF-8 text"),
        ("rows.json", b'[{"text": "Gr\xf6\xdfe"}]', "rows.json: "),
        ("page.txt", "Größe".encode("utf-16"), "page.txt: not UTF-8 text"),
        ("page.txt", "size".encode("utf-16-le"), "page.txt: not text: it has NUL"),
        ("rows.jsonl", DEEP.encode(), "rows.jsonl:1: not JSON"),
        ("rows.json", DEEP.encode(), "rows.json: not JSON"),
        ("rows.jsonl", b'{"text": "x", "tools": ' + DEEP.encode() + b"}", "rows.jsonl:1: not JSON"),
        ("rows.jsonl", b'{"input_ids": [' + b"9" * 10_000 + b"]}", "rows.jsonl:1: not JSON"),
        ("rows.json", b"5", "rows.json:1: not a row"),
        ("rows.json", b'"text"', "rows.json:1: not a row"),
        ("rows.json", b"", None),
        ("rows.json", b"[5, null]", "rows.json:1: not a row"),
        ("rows.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9999)[:-20], "rows.jsonl.gz: "),
        ("rows.txt.gz", b"\x1f\x8b\x08\0junk", "rows.txt.gz: "),
        ("rows.parquet", b"PAR1" + bytes(100) + b"PAR1", "rows.parquet: "),
    ],
)
def test_odd_files_are_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    if message is None:
        assert read(tmp_path / name) == []
        return
    with pytest.raises(UserError, match=message) as error:
        list(token_documents([str(tmp_path / name)], None, tiny_tokenizer()))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_tables_are_read_or_named(tmp_path):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"words": ["a"], "n": [1]}), file)
    with pytest.raises(UserError, match=r"rows\.parquet"):
        read(file)
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"a", b"b"]}), file)
    with pytest.raises(UserError, match=r'rows.parquet:1: "text" is not a text'):
        read(file)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 99] * 9999}), file, compression="none")
    whole = file.read_bytes()
    file.write_bytes(whole[:50] + bytes(500) + whole[550:])
    with pytest.raises(UserError, match=r"rows\.parquet"):
        read(file)

    folder = tmp_path / "saved"
    Dataset.from_list([{"text": "a"}]).save_to_disk(folder)
    for harm in (lambda f: f.write_bytes(f.read_bytes()[:40]), lambda f: f.unlink()):
        harm(folder / "data-00000-of-00001.arrow")
        with pytest.raises(UserError, match="saved: can't be loaded"):
            read(folder)
    for state in ("[]", "{", "5", '{"splits": 5}'):
        (folder / "dataset_dict.json").write_text(state)
        with pytest.raises(UserError, match="saved: can't be loaded"):
            read(folder)
    (folder / "dataset_dict.json").unlink()
    for state in ("[]", "{", "5", '{"_data_files": 5}'):
        (folder / "state.json").write_text(state)
        with pytest.raises(UserError, match="saved: can't be loaded"):
            read(folder)


def test_a_tokenizer_with_code_of_its_own_asks_nothing_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="can't load the tokenizer"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()
