import json
import multiprocessing
import os
import random
import re
import shutil
import threading
import time
from importlib.metadata import version
from itertools import groupby

import pytest
from chat_templates import CHATML, chat_tokenizer
from conftest import tiny_tokenizer
from datasets import load_from_disk
from filelock import FileLock

from data.mixture import SourceError, mixture_of
from data.packing import pack
from data.prepare import RowRequest, save_rows, token_rows
from data.sources import SPLITS, documents, token_documents
from speculator.errors import UserError

COLUMNS = ("input_ids", "document_ids", "loss_mask")


@pytest.mark.parametrize("max_tokens", [None, 9, 8])
def test_plain_text_is_a_stream_that_rows_cut(max_tokens):
    lengths = [3, 1, 9, 2, 4]
    stream = [{"input_ids": [10 * i + j for j in range(n)], "loss_mask": [1] * n} for i, n in enumerate(lengths)]
    rows = list(pack(iter(stream), 4, max_tokens))
    assert [len(row["input_ids"]) for row in rows] == ([4, 4, 4, 4, 3] if max_tokens is None else [4, 4])
    ids = [value for document in stream for value in document["input_ids"]]
    assert [value for row in rows for value in row["input_ids"]] == ids[: sum(len(row["input_ids"]) for row in rows)]
    assert [row["document_ids"] for row in rows][:4] == [[0, 0, 0, 1], [0] * 4, [1] * 4, [1, 2, 2, 3]][: len(rows)]
    assert all(set(row) == set(COLUMNS) for row in rows)


def chats_of(lengths):
    return [
        {
            "input_ids": [100 * i + j for j in range(n)],
            "loss_mask": [int(j > 0) for j in range(n)],
        }
        for i, n in enumerate(lengths)
    ]


def parts_of(row):
    """The documents of a row, as (does it begin here, tokens, mask)."""
    columns = zip(*(row[name] for name in ("document_ids", "input_ids", "loss_mask")), strict=True)
    parts = [list(zip(*part, strict=True)) for _, part in groupby(columns, key=lambda column: column[0])]
    return [(i >= row["document_ids"][0], *map(list, rest)) for i, (_, *rest) in enumerate(parts)]


def test_chats_stay_whole_and_fill_rows():
    draw = random.Random(0)
    chats = chats_of([draw.randrange(2, 40) for _ in range(300)])
    rows = list(pack(iter(chats), 64))
    assert rows == list(pack(iter(chats), 64))
    parts = [part for row in rows for part in parts_of(row)]
    assert all(begins for begins, *_ in parts)
    assert sorted(part[1:] for part in parts) == sorted(tuple(chat.values()) for chat in chats)
    sizes = [len(row["input_ids"]) for row in rows]
    assert max(sizes) <= 64
    assert sum(sizes) > 0.97 * 64 * len(rows)


def test_only_a_chat_longer_than_a_row_is_cut():
    chats = chats_of([5, 19, 3, 8])
    rows = list(pack(iter(chats), 8))
    parts = [part for row in rows for part in parts_of(row)]
    assert [len(row["input_ids"]) for row in rows] == [8, 8, 8, 8, 3]
    assert [row["document_ids"][0] for row in rows] == [0, 1, 0, 0, 1]  # as many documents began in other rows
    pieces = [tokens for begins, tokens, *_ in parts if tokens[0] // 100 == 1]
    assert [begins for begins, tokens, *_ in parts if tokens[0] // 100 == 1] == [True, False, False]
    assert [token for piece in pieces for token in piece] == chats[1]["input_ids"]
    assert all(tokens == chats[tokens[0] // 100]["input_ids"] for _, tokens, *_ in parts if tokens[0] // 100 != 1)


def prepare(source, length=16, tokenizer=None, **kwargs):
    return token_rows(
        RowRequest(
            mixture=mixture_of([str(source)]),
            split="train",
            tokenizer=tokenizer or tiny_tokenizer(),
            length=length,
            **kwargs,
        )
    )


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


@pytest.mark.parametrize("library", ["transformers", "tokenizers", "jinja2"])
def test_another_version_of_a_library_makes_the_rows_again(source, tmp_path, monkeypatch, library):
    prepare(source)
    monkeypatch.setattr("data.prepare.version", lambda name: "0" if name == library else version(name))
    prepare(source)
    assert len(folders(tmp_path)) == 2


def test_rows_are_made_once_and_again_when_the_source_or_an_argument_changes(source, tmp_path):
    first = prepare(source)
    assert prepare(source)["input_ids"] == first["input_ids"]
    assert len(folders(tmp_path)) == 1
    prepare(source, length=32)
    assert len(folders(tmp_path)) == 2
    (source / "0.txt").write_text("something else entirely")
    prepare(source)
    assert len(folders(tmp_path)) == 3


def test_rows_are_made_again_for_other_weights_or_another_template(source, tmp_path):
    prepare(f"{source}@1")
    prepare(f"{source}@2")
    prepare(source)
    assert len(folders(tmp_path)) == 3
    for template in (None, CHATML, CHATML):
        prepare(source, tokenizer=chat_tokenizer(template=template))
    assert len(folders(tmp_path)) == 5


def test_columns_are_small_numbers_of_equal_length(source):
    rows = prepare(source)
    assert {name: str(feature.feature.dtype) for name, feature in rows.features.items()} == dict.fromkeys(
        COLUMNS, "int32"
    )
    assert all(len(row[name]) == 16 for row in rows.select(range(len(rows) - 1)) for name in COLUMNS)
    assert len({len(rows[len(rows) - 1][name]) for name in COLUMNS}) == 1
    assert all(map(all, rows["loss_mask"]))


def test_packed_loss_masks_stay_with_their_tokens(source, tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"Here: {i}"}]}
        for i in range(100)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tokenizer = chat_tokenizer("llama3")
    rows = token_rows(RowRequest(mixture=mixture_of([str(file)]), split="train", tokenizer=tokenizer, length=64))
    learnt = [part for row in rows for part in parts_of(row)]
    answers = [tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]) for _, ids, mask in learnt]
    kept = [row["messages"][1]["content"] for row in documents(str(file), "train")]
    assert sorted(filter(None, answers)) == sorted(f"{content}<|eot_id|>" for content in kept)
    assert len(kept) > 80


def test_masks_without_any_loss_are_an_error(source, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input_ids": [i, 5, 6], "loss_mask": [0, 0, 0]}) + "\n" for i in range(100)))
    with pytest.raises(SourceError, match="no token has loss"):
        prepare(file)


def test_a_bad_row_leaves_no_files(source, tmp_path):
    (source / "rows.jsonl").write_text('{"text": "a"}\nnot json\n')
    with pytest.raises(SourceError, match=r"rows\.jsonl:2: not JSON"):
        prepare(source)
    assert not folders(tmp_path)


def test_saved_rows_are_a_source_with_the_same_documents_and_splits(source, tmp_path):
    tokenizer, folder = tiny_tokenizer(), tmp_path / "saved"
    (source / "more.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def f{i}():", "completion": f" return {i}"}) + "\n" for i in range(400))
    )
    request = RowRequest(mixture=mixture_of([str(source)]), split="train", tokenizer=tokenizer, length=64)
    counts = save_rows(request, folder)
    saved = load_from_disk(str(folder))
    assert set(saved) == set(counts) == set(SPLITS)
    for split, rows in saved.items():
        expected = token_rows(
            RowRequest(mixture=mixture_of([str(source)]), split=split, tokenizer=tokenizer, length=64)
        )
        again = token_rows(RowRequest(mixture=mixture_of([str(folder)]), split=split, tokenizer=tokenizer, length=64))
        assert all(list(rows[name]) == list(expected[name]) for name in COLUMNS)
        # Rows are packed again, so documents may change places.
        assert same_chats(rows, again)
        mask = [value for row in rows["loss_mask"] for value in row]
        assert counts[split] == {
            "documents": len(list(token_documents(mixture_of([str(source)]), split, tokenizer))),
            "rows": len(rows),
            "tokens": len(mask),
            "tokens_with_loss": sum(mask),
        }
        assert 0 < sum(mask) < len(mask)
    with pytest.raises(SourceError, match="already exists"):
        save_rows(request, folder)


def same_chats(rows, others):
    made = [[part[1:] for row in each for part in parts_of(row) if not all(part[2])] for each in (rows, others)]
    return bool(made[0]) and sorted(made[0]) == sorted(made[1])


def _prepare_in_a_process(source, queue):
    queue.put((os.getpid(), prepare(source)["input_ids"][0]))


def test_processes_that_come_together_share_one_preparation(source, tmp_path):
    context = multiprocessing.get_context("fork")  # a spawned process imports torch for seconds
    queue = context.Queue()
    processes = [context.Process(target=_prepare_in_a_process, args=(source, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120)[1] for _ in processes]
    for process in processes:
        process.join()
    assert results[0] == results[1]
    assert len(folders(tmp_path)) == 1


def test_a_preparation_that_waits_for_another_names_the_lock_file(source, tmp_path, capfd):
    expected = prepare(source)["input_ids"][:]
    [folder] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    shutil.rmtree(folder)
    held = threading.Event()

    def hold():
        with FileLock(f"{folder}.lock"):
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert prepare(source)["input_ids"][:] == expected
    thread.join()
    assert capfd.readouterr().err.count(f"{folder}.lock") == 1


def test_a_cache_that_cannot_be_locked_is_an_error(source, tmp_path):
    prepare(source)
    [folder] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    shutil.rmtree(folder)
    lock = folder.with_suffix(".lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()
    with pytest.raises(UserError, match=re.escape(f"can't write {lock}: ")):
        prepare(source)


def test_a_cache_that_is_not_writable_is_an_error(source, monkeypatch):
    expected = prepare(source)["input_ids"][:]
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert prepare(source)["input_ids"][:] == expected, "what it has needs no writing"
    with pytest.raises(UserError, match="SPECULATOR_CACHE"):
        prepare(source, tokenizer=chat_tokenizer(template=CHATML))


def test_text_that_fills_no_row_makes_a_short_one():
    stream = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}]
    assert list(pack(stream, 8)) == [{"input_ids": [5, 6, 7], "document_ids": [0, 0, 0], "loss_mask": [0, 1, 1]}]
    assert [len(row["input_ids"]) for row in pack(stream * 3, 8)] == [6, 3]
    assert not list(pack([{"input_ids": [5], "loss_mask": [1]}], 8))
