"""Odd files: long lines, byte order marks, wrong encodings, damaged tables, code in a tokenizer."""

import gzip
import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from conftest import tiny_tokenizer
from datasets import Dataset

from data.mixture import mixture_of
from data.rendering import load_tokenizer
from data.sources import documents, token_documents
from data.tally import Tally
from speculator.errors import UserError


def read(source, tally=None):
    return list(documents(str(source), None, tally=tally))


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


def test_lines_whose_first_is_longer_than_what_is_looked_at_are_json_lines(tmp_path):
    text = "x," * 50_000  # a comma stands at every place where the look may end
    for first in (text, f" {text}"):
        (tmp_path / "rows.json").write_text("".join(json.dumps({"text": each}) + "\n" for each in (first, "b")))
        assert [row["text"] for row in read(tmp_path / "rows.json")] == [first, "b"]


def test_the_valid_pieces_of_a_text_that_is_not_utf8_stay(tmp_path):
    lines = [f"line {i} of a book\n".encode() for i in range(3000)]
    lines[10] = "Größe\n".encode("latin-1")
    (tmp_path / "book.txt").write_bytes(b"".join(lines))
    tally = Tally(0.5)
    rows = read(tmp_path / "book.txt", tally)
    assert len(rows) == tally.rows - 1 > 3
    assert [kind.split(":")[0] for kind in tally.kinds] == ["not UTF-8 text"]


def test_a_tokenizer_with_code_of_its_own_asks_nothing_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="can't load the tokenizer"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", json.dumps({"text": "x"}).encode("utf-16")),
        ("rows.json", b'[{"text": "Gr\xf6\xdfe"}]'),
        ("page.txt", "size".encode("utf-16-le")),
        ("rows.json", b"[5, null]"),
        ("rows.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9999)[:-20]),
        ("rows.parquet", b"PAR1" + bytes(100) + b"PAR1"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(name)) as error:
        list(token_documents(mixture_of([str(tmp_path / name)]), None, tiny_tokenizer()))
    assert "\n" not in str(error.value)


def test_a_table_without_readable_columns_is_named(tmp_path):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"words": ["a"], "n": [1]}), file)
    with pytest.raises(UserError, match=r"rows\.parquet: .*words, n"):
        read(file)


def test_a_damaged_dataset_is_named(tmp_path):
    folder = tmp_path / "saved"
    Dataset.from_list([{"text": "a"}]).save_to_disk(folder)
    (folder / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UserError, match="saved"):
        read(folder)
