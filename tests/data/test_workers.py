"""Several processes give the same results in the same order, and none outlives its parent."""

import json
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import datasets
import pytest
from chat_templates import chat_tokenizer
from conftest import tiny_tokenizer

from data import rendering, sources, workers
from data.documents import RowError
from data.mixture import SourceError, mixture_of
from data.prepare import RowRequest, token_rows
from data.sources import documents, name_of, split_of
from data.tally import Tally
from data.workers import map_in_order
from speculator.errors import UserError


@pytest.fixture(autouse=True)
def early(monkeypatch, tmp_path):
    """Processes from the second item on, a few documents an item."""
    monkeypatch.setattr(workers, "_SERIAL_ITEMS", 1)
    monkeypatch.setattr(rendering, "_DOCUMENTS_AT_ONCE", 4)
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def slowly(item: int) -> tuple[int, int]:
    time.sleep(0.02 if item % 3 == 0 else 0)
    return item, os.getpid()


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(processes):
    results = list(map_in_order(slowly, range(40), processes))
    assert [item for item, _ in results] == list(range(40))
    used = {pid for _, pid in results}
    assert len(used - {os.getpid()}) == (0 if processes == 1 else processes)
    assert not multiprocessing.active_children()


def test_at_most_one_item_per_process_is_read_ahead():
    drawn = []
    results = map_in_order(slowly, (drawn.append(i) or i for i in range(100)), 3)
    for count, _ in enumerate(results, start=1):
        assert len(drawn) <= count + 3
        if count == 20:
            break
    results.close()
    assert not multiprocessing.active_children()


def broken(item: int, error: Exception) -> int:
    if item == 7:
        raise error
    return item


def test_errors_of_a_worker_are_raised():
    row = RowError("file:3", "said of 5", "said of any")
    results = map_in_order(partial(broken, error=row), range(20), 2)
    found = []
    with pytest.raises(RowError, match="file:3: said of 5") as error:
        found += results
    assert error.value.kind == "said of any"
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(partial(broken, error=ZeroDivisionError()), range(20), 2))
    assert not multiprocessing.active_children()


def killed(item: int) -> int:
    if item == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_killed_process_fails_in_one_line():
    with pytest.raises(UserError, match="num_proc"):
        list(map_in_order(killed, range(20), 2))
    assert not multiprocessing.active_children()


def test_ending_workers_sends_no_signal_to_the_parent():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    mine = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        for _ in range(3):
            assert len(list(map_in_order(slowly, range(2), 8))) == 2
    finally:
        signal.signal(signal.SIGTERM, mine)
        signal.set_wakeup_fd(before)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        assert stream.read() == b""


def test_workers_end_when_the_parent_is_killed():
    reading, writing = os.pipe()
    if not (child := os.fork()):
        for _, pid in map_in_order(slowly, range(10**9), 2):
            os.write(writing, f"{pid}\n".encode())
    found: set[int] = set()
    with os.fdopen(reading) as stream:
        os.close(writing)
        while len(found) < 3:
            found.add(int(stream.readline()))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        deadline = time.monotonic() + 5
        while any(Path(f"/proc/{pid}").exists() for pid in found):
            assert time.monotonic() < deadline
            time.sleep(0.01)


# Rows


def write(path: Path, rows: list) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def a_row(i: int) -> dict | str:
    """Of every kind; every tenth is bad."""
    chat = [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"Here: {i} " * (i % 7 + 1)}]
    rows = [{"text": f"def f{i}(): return {i}"}, {"messages": chat}, {"prompt": f"{i} is", "completion": f" {i}"}]
    return {"messages": chat[1:]} if i % 10 == 0 else rows[i % 3]


@pytest.mark.parametrize("mixed", [False, True])
def test_rows_do_not_depend_on_the_number_of_processes(tmp_path, monkeypatch, capsys, mixed):
    given = [
        write(tmp_path / f"{name}.jsonl", [a_row(i) for i in range(start, start + 150)]) + weight * mixed
        for name, start, weight in (("a", 0, "@0.7"), ("b", 100, "@0.3"))
    ]
    seen = []
    for processes in (1, 2, 3):
        monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / f"cache{processes}"))
        made = token_rows(
            RowRequest(
                mixture=mixture_of(given),
                split="train",
                tokenizer=chat_tokenizer("llama3"),
                length=16,
                max_bad_rows=0.5,
                num_proc=processes,
            )
        )
        seen.append((made.to_dict(), capsys.readouterr().err))
    assert " left out: " in seen[0][1]
    assert len(seen[0][0]["input_ids"]) > 50
    # Weights end one source before its end; what is read ahead of that, and counted, is more for more processes.
    seen = [rows for rows, _ in seen] if mixed else seen
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_mixed_source_is_read_at_most_twice(tmp_path, monkeypatch, count):
    """Rows 0..59 of the k-th are 20 k onwards, so each has some of the one before."""
    given = [
        write(tmp_path / f"{k}.jsonl", [{"text": f"row {i}"} for i in range(20 * k, 20 * k + 60)]) for k in range(count)
    ]
    new = [0, *(20 * k + 40 for k in range(1, count))]  # the first row that no source before has
    whole = [
        row["text"]
        for source, start in zip(given, new, strict=True)
        for row in documents(source, "train")
        if int(row["text"].split()[1]) >= start
    ]
    read, times = sources.read, dict.fromkeys(given, 0)

    def counted(location):
        times[location] += 1
        return read(location)

    monkeypatch.setattr(sources, "read", counted)
    streams = sources.streams(mixture_of([f"{source}@1" for source in given]), "train", Tally())
    assert [document["text"] for stream in streams for document in stream] == whole
    assert [times[source] for source in given] == [2] * (count - 1) + [1]


# The first rows


def token_file(path: Path, learnt: list[int]) -> str:
    """Documents of 16 tokens that are learnt or not."""
    return write(path, [{"input_ids": [i % 300] * 16, "loss_mask": [mask] * 16} for i, mask in enumerate(learnt)])


def test_first_rows_match_the_whole_split_and_tokenize_no_more(tmp_path, monkeypatch):
    source = token_file(tmp_path / "rows.jsonl", [1] * 400)
    rendered, whole = [], rendering._render_batch
    monkeypatch.setattr(
        rendering, "_render_batch", lambda batch, **rest: (rendered.append(batch), whole(batch, **rest))[1]
    )
    request = partial(
        RowRequest, mixture=mixture_of([source]), split="validation", tokenizer=tiny_tokenizer(), length=16, num_proc=1
    )
    few = token_rows(request(first_rows=3)).to_dict()
    some, whole_split = len(rendered), token_rows(request())
    assert len(whole_split) > 10
    assert few == whole_split.select(range(3)).to_dict()
    assert some == 1 < len(rendered) - some


def test_first_rows_continue_to_a_row_with_loss(tmp_path):
    learnt, others = ([*documents(token_file(tmp_path / f"{mask}.jsonl", [mask] * 400), None)] for mask in (1, 0))
    validation = [row for row in others if split_of(name_of(row)) == "validation"]
    first = next(row for row in learnt if split_of(name_of(row)) == "validation")
    rows = [{key: row[key] for key in ("input_ids", "loss_mask")} for row in [*validation[:5], first, *others]]
    source = write(tmp_path / "rows.jsonl", rows)
    rows = token_rows(
        RowRequest(
            mixture=mixture_of([source]), split="validation", tokenizer=tiny_tokenizer(), length=16, first_rows=3
        )
    )
    assert [any(mask) for mask in rows["loss_mask"]] == [False] * 5 + [True]
    none = token_file(tmp_path / "none.jsonl", [0] * 400)
    with pytest.raises(SourceError, match="no token has loss"):
        token_rows(
            RowRequest(
                mixture=mixture_of([none]), split="validation", tokenizer=tiny_tokenizer(), length=16, first_rows=3
            )
        )
