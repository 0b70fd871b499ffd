"""`serve --record`: what is on disk, who opts out, kills, and that the rows are a data source."""

import gzip
import json
import re
from pathlib import Path

import forked
import httpx
import pytest
from encoder_decoders import tiny_encoder_decoder
from serving_here import serving, until

from data.mixture import mixture_of
from data.sources import documents, token_documents
from speculator import Engine, Target, UserError
from speculator.server import app
from speculator.server import recorder as recording
from speculator.server.recorder import Recorder

BODY = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0.9, "seed": 4, "return_token_ids": True}


def rows_in(folder: Path) -> list[dict]:
    files = sorted((folder / "rows").glob("*.jsonl.gz"))
    return [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def test_a_row_has_the_tokens_and_nothing_else(chat_target, drafter, tmp_path):
    recorder = Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
    with serving(chat_target, drafter, recorder=recorder) as (url, worker):
        submitted = []
        submit = worker.submit
        worker.submit = lambda requests: submitted.extend(requests) or submit(requests)
        (choice,) = httpx.post(f"{url}/v1/completions", json={**BODY, "user": "somebody"}).json()["choices"]
        httpx.post(f"{url}/v1/completions", json={**BODY, "n": 2, "stream": True})
    rows = rows_in(tmp_path / "out")
    assert [set(row) for row in rows] == [{"input_ids", "loss_mask"}] * 3
    assert rows[0]["input_ids"] == [5, 6, 7, *choice["token_ids"]]
    for row, request in zip(rows, submitted, strict=True):
        assert row["input_ids"] == request.sequence
        assert row["loss_mask"] == [0] * 3 + [1] * len(request.tokens)
    written = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert written <= {"lock", "manifest.json", "rows", "rows/00000000.jsonl.gz"}
    assert "somebody" not in (tmp_path / "out" / "manifest.json").read_text()


def test_what_an_encoder_reads_is_kept_apart(tmp_path):
    target = Target(tiny_encoder_decoder("t5"), tokenizer=None)
    recorder, engine = Recorder(tmp_path / "out", target, 1.0, 1e9), Engine(target, None, slots=1)
    request = engine.submit([5, 6, 7], max_new_tokens=4)
    engine.run()
    recorder.add([request])
    recorder.close()
    (row,) = rows_in(tmp_path / "out")
    assert (row["source_ids"], row["input_ids"]) == ([5, 6, 7], [0, *request.tokens])


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.soak)])
def test_answers_of_clients_that_opt_out_are_not_on_disk(chat_target, tmp_path, count):
    recorder = Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
    ways = [({}, {}), ({"store": True}, {}), ({"store": False}, {}), ({}, {"X-Store": "false"})]
    with serving(chat_target, recorder=recorder) as (url, _), httpx.Client(base_url=url) as client:
        for number in range(count):
            field, header = ways[number % 4]
            body = {"prompt": [1 + number % 4, 2 + number // 4], "max_tokens": 1, **field}
            assert client.post("/v1/completions", json=body, headers=header).status_code == 200
    rows = rows_in(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0, "other users of the machine"
    assert sorted(row["input_ids"][:2] for row in rows) == [
        [first, 2 + n] for first in (1, 2) for n in range(count // 4)
    ]
    assert len(list((tmp_path / "out" / "rows").iterdir())) == 1 + (count // 2) // 256


def test_an_answer_that_the_client_did_not_wait_for_is_not_recorded(chat_target, tmp_path):
    recorder = Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
    with serving(chat_target, recorder=recorder) as (url, worker):
        body = {"prompt": [9], "max_tokens": 250, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())
        until(lambda: worker.load == 0)
    assert rows_in(tmp_path / "out") == []


def test_the_share_is_that_of_the_requests(chat_target, tmp_path):
    recorder = Recorder(tmp_path / "out", chat_target, 0.25, 1e9)
    assert 800 < sum(recorder.chooses() for _ in range(4000)) < 1200
    recorder.close()


def test_rows_are_written_after_a_while_without_further_answers(chat_target, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_SHARD_SECONDS", 0.1)
    monkeypatch.setattr(app, "_LOG_SECONDS", 0.05)
    recorder = Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
    with serving(chat_target, recorder=recorder):
        recorder.write_due()  # from here on, the next row is not due yet
        recorder.add([Ended])
        until(lambda: len(rows_in(tmp_path / "out")) == 1, 5)


def test_other_files_among_the_shards_stay(chat_target, tmp_path):
    for name in ("notes.txt", "zzz.jsonl.gz"):
        recorder = Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
        recorder.add([Ended])
        recorder.close()
        (tmp_path / "out" / "rows" / name).write_text("mine")
    recorder = Recorder(tmp_path / "out", chat_target, 1.0, 1)  # no room for any shard
    recorder.add([Ended])
    recorder.close()
    assert sorted(file.name for file in (tmp_path / "out" / "rows").iterdir()) == ["notes.txt", "zzz.jsonl.gz"]


class Ended:
    prompt, tokens, steps = [1, 2], [3], ()


def test_the_oldest_shards_go_when_the_folder_is_full(chat_target, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "SHARD_ROWS", 1)
    recorder = Recorder(tmp_path / "out", chat_target, 1.0, 250)
    for _ in range(12):
        recorder.add([Ended])
    recorder.close()
    shards = sorted((tmp_path / "out" / "rows").iterdir())
    assert shards[-1].name == "00000011.jsonl.gz"
    assert 1 < len(shards) < 6
    assert sum(shard.stat().st_size for shard in shards) <= 250
    again = Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
    again.add([Ended])
    again.close()
    assert (tmp_path / "out" / "rows" / "00000012.jsonl.gz").exists()


def test_a_folder_of_something_else_or_of_another_server_is_refused(chat_target, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="other files"):
        Recorder(tmp_path / "other", chat_target, 1.0, 1e9)
    recorder = Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
    with pytest.raises(UserError, match="another server"):
        Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
    recorder.close()
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "fingerprint": "another"}))
    with pytest.raises(UserError, match="not recorded with"):
        Recorder(tmp_path / "out", chat_target, 1.0, 1e9)


def test_the_newest_rows_are_held_out(chat_target, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "SHARD_ROWS", 7)
    recorder = Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
    for number in range(60):
        recorder.add([type("Ended", (), {"prompt": [1, 2], "tokens": [number], "steps": ()})])
    recorder.close()
    splits = {split: list(documents(str(tmp_path / "out"), split)) for split in ("train", "validation", "held-out")}
    last = {split: [row["input_ids"][-1] for row in rows] for split, rows in splits.items()}
    assert last == {"train": list(range(54)), "validation": [54, 55, 56], "held-out": [57, 58, 59]}


def test_a_killed_server_loses_only_the_last_shard_and_another_records_on(target_folder, tmp_path):
    code = "import sys, speculator.__main__, speculator.server.recorder as r; r.SHARD_ROWS = 5; "
    (tmp_path / "serve.py").write_text(code + "speculator.__main__.main(sys.argv[1:])")
    command = [str(tmp_path / "serve.py"), "serve", "--port", "0"]
    command += ["--target", str(target_folder), "--record", str(tmp_path / "out"), "--record_share", "1"]
    process = forked.Popen(command)
    try:
        lines = [process.stderr.readline() for _ in range(3)]
        url = re.search(r"http://127\.0\.0\.1:\d+", lines[1]).group()
        assert "100% of the requests" in lines[2]

        def answers() -> bool:
            try:
                return httpx.get(f"{url}/health").is_success
            except httpx.ConnectError:
                return False

        until(answers, 30)
        for _ in range(8):
            httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 2})
        until(lambda: len(rows_in(tmp_path / "out")) == 5)
    finally:
        process.kill()
        process.wait()
    shard = tmp_path / "out" / "rows" / "00000001.jsonl.gz.7.partial"
    shard.write_text("cut off")
    recorder = Recorder(tmp_path / "out", Target.load(str(target_folder)), 1.0, 1e9)
    recorder.add([Ended] * 3)
    recorder.close()
    assert len(rows_in(tmp_path / "out")) == 8
    assert not shard.exists()


def test_a_recorded_chat_trains_on_the_tokens_of_the_request_itself(chat_target, tmp_path):
    """Also if a parse and a new render of the chat would give others, as of a second turn after dropped thinking."""
    tokenizer, recorder = chat_target.tokenizer, Recorder(tmp_path / "out", chat_target, 1.0, 1e9)
    messages = [{"role": "user", "content": "one?"}]
    sent, said = [], []
    with serving(chat_target, recorder=recorder) as (url, _):
        for question in ("two?", "three?"):
            body = {"messages": messages, "max_tokens": 8, "seed": 1, "return_token_ids": True}
            (choice,) = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            sent.append(tokenizer(text, add_special_tokens=False)["input_ids"])
            said.append(choice["token_ids"])
            answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n" + choice["message"]["content"]}
            messages += [answer, {"role": "user", "content": question}]
    rows = list(token_documents(mixture_of([str(tmp_path / "out")]), None, tokenizer))
    assert [row["input_ids"] for row in rows] == [a + b for a, b in zip(sent, said, strict=True)]
    assert [row["loss_mask"] for row in rows] == [[0] * len(a) + [1] * len(b) for a, b in zip(sent, said, strict=True)]
