import multiprocessing
import os

import pytest
from conftest import tiny_tokenizer

from data.packing import pack
from data.prepare import token_rows
from data.sources import SourceError


def test_pack_ends_documents_and_tells_them_apart():
    tokenizer = tiny_tokenizer()
    texts = ["import os", "def f(): pass", "x = 1\n" * 20]
    rows = list(pack(({"text": text} for text in texts), tokenizer, 8))
    stream = [token for row in rows for token in row["input_ids"]]
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) < 8
    for row in rows:
        changes = [b - a for a, b in zip(row["document_ids"], row["document_ids"][1:], strict=False)]
        assert row["document_ids"][0] == 0
        assert [i for i, step in enumerate(changes) if step] == [
            i for i, token in enumerate(row["input_ids"][:-1]) if token == tokenizer.eos_token_id
        ]


def prepare(source, length=16, **kwargs):
    return token_rows([str(source)], "train", tiny_tokenizer(), length, **kwargs)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 3)
    return folder


def folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())


def test_rows_are_made_once_and_again_when_the_source_or_an_argument_changes(source, tmp_path):
    first = prepare(source)
    assert prepare(source)["input_ids"] == first["input_ids"]
    assert len(folders(tmp_path)) == 1
    prepare(source, length=32)
    assert len(folders(tmp_path)) == 2
    (source / "0.txt").write_text("something else entirely")
    prepare(source)
    assert len(folders(tmp_path)) == 3


def test_max_tokens_bounds_the_rows(source):
    assert len(prepare(source, max_tokens=100)) == 6


def _prepare_in_a_process(source, queue):
    queue.put((os.getpid(), prepare(source)["input_ids"][0]))


def test_processes_that_come_together_share_one_preparation(source, tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_prepare_in_a_process, args=(source, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120)[1] for _ in processes]
    for process in processes:
        process.join()
    assert results[0] == results[1]
    assert len(folders(tmp_path)) == 1


def test_too_little_text_is_an_error(tmp_path, source):
    short = tmp_path / "short.txt"
    short.write_text("x")
    with pytest.raises(SourceError, match="does not fill one row"):
        prepare(short)
