import gzip
import json

import pytest

from data.sources import SPLITS, SourceError, documents, split_of


def ids(source, split):
    return {row["id"] for row in documents([str(source)], split)}


def test_python_sources_split_by_path_and_leave_tests_out():
    splits = {split: ids("python-sources", split) for split in SPLITS}
    assert "json/decoder.py" in splits[split_of("json/decoder.py")]
    assert not splits["train"] & splits["held-out"]
    assert not any("/tests/" in name or name.startswith("test/") for name in splits["train"])
    sizes = {split: len(names) for split, names in splits.items()}
    assert sizes["train"] > 10 * sizes["held-out"] > 100


def test_a_copy_is_dropped_before_the_split(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": "the same"}) + "\n" for _ in range(200)))
    assert sum(len(ids(file, split)) for split in SPLITS) == 1


def test_a_copy_in_another_source_is_dropped_too(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(100)))
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    texts = [row["text"] for split in SPLITS for row in documents(sources, split)]
    assert sorted(texts) == sorted(f"row {i}" for i in range(100))


def test_a_long_text_file_has_a_share_in_every_split(tmp_path):
    text = "".join(f"line {i} of a book\n" for i in range(100_000))
    (tmp_path / "book.txt").write_text(text)
    splits = {split: list(documents([str(tmp_path / "book.txt")], split)) for split in SPLITS}
    assert all(splits.values())
    pieces = sorted((row for rows in splits.values() for row in rows), key=lambda row: int(row["id"].split(":")[1]))
    assert "".join(row["text"] for row in pieces) == text


def test_a_row_may_hold_any_line_separator(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    assert [row["text"] for row in documents([str(tmp_path / "rows.jsonl")], None)] == ["a\u2028b\x85c"]


@pytest.mark.parametrize("packed", [False, True])
def test_jsonl_and_txt_are_read_gzipped_or_not(tmp_path, packed):
    def write(name, text):
        path = tmp_path / (name + ".gz" if packed else name)
        (gzip.open if packed else open)(path, "wt").write(text)
        return path

    rows = write("rows.jsonl", "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(50)))
    texts = {row["text"] for split in SPLITS for row in documents([str(rows)], split)}
    assert texts == {f"row {i}" for i in range(50)}
    page = write("page.txt", "a page")
    assert [row["text"] for split in SPLITS for row in documents([str(page)], split)] == ["a page"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "rows.jsonl:2"),
        ("rows.jsonl", "not json\n", "rows.jsonl:1"),
        ("rows.jsonl", '{"text": null}\n', "rows.jsonl:1"),
        ("model.bin", "x", "can't read .bin"),
        ("rows.jsonl.gz", "not gzip", "rows.jsonl.gz"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=message):
        list(documents([str(tmp_path / name)], "train"))


def test_a_missing_source_is_named():
    with pytest.raises(SourceError, match="nowhere"):
        list(documents(["nowhere.jsonl"], "train"))
