"""`python -m eval --server`: the counters of the server's own drafting."""

import json
from threading import current_thread, main_thread

import pytest
from conftest import exit_code
from hidden_state_server import StandIn

from eval import in_server
from eval.__main__ import main
from eval.in_server import FORECAST_FILE
from speculator import Target
from speculator.files import read_json, write_json


@pytest.fixture
def server(target_folder, tmp_path):
    made = StandIn(Target.load(str(target_folder), device="cpu"), tmp_path, [2], fault="connector")
    yield made
    made.die()


def argv(target_folder, tmp_path, url, *more):
    head = tmp_path / "head"
    head.mkdir(exist_ok=True)
    flags = ["--server", url, "--target", str(target_folder), "--speculator", str(head), "--suite", __file__]
    return [*flags, "--prompt_tokens", "8", "--max_new_tokens", "4", "--output", str(tmp_path / "made"), *more]


def test_drafts_and_accepted_tokens_are_those_of_the_requests_alone(server, target_folder, text_file, tmp_path, capsys):
    server.asked = 100  # by others, before
    (tmp_path / "head").mkdir()
    forecast = {"how": "a guess", "acceptance_length": 1.9, "accepted_per_draft": [0.6, 0.3]}
    write_json(tmp_path / "head" / FORECAST_FILE, forecast)
    assert main(argv(target_folder, tmp_path, server.url, "--temperature", "0", "--suite", str(text_file))) == 0
    rows = read_json(tmp_path / "made" / "served.json")["suites"]
    assert [row["clients"] for row in rows] == [1, 8]
    assert sum(len(row["answers"]) for row in rows) == server.asked - 100, "none is asked again"
    row = rows[1]
    prompts = len(row["answers"])
    assert (row["steps"], row["accepted_per_position"]) == (4 * prompts, [3 * prompts, prompts, 0])
    assert row["accepted_tokens"] == row["steps"], "an acceptance length of 2"
    said = capsys.readouterr().out
    assert "0.75 0.25 0.00 | 2.00 |" in said
    assert "| forecast (a guess) | 0 |" in said
    assert "| 0.60 0.30 | 1.90 |" in said


def test_each_category_is_counted_and_so_are_all_together(server, target_folder, tmp_path):
    suite = tmp_path / "s.jsonl"
    suite.write_text(
        "".join(json.dumps({"category": ["a", "a", ""][n % 3], "prompt": f"def f{n}"}) + "\n" for n in range(6))
    )
    assert main([*argv(target_folder, tmp_path, server.url, "--temperature", "0"), "--suite", str(suite)]) == 0
    rows = read_json(tmp_path / "made" / "served.json")["suites"][-3:]
    assert [row["suite"] for row in rows] == ["s.jsonl, a", "s.jsonl, (none)", "s.jsonl"]
    assert [len(row["answers"]) for row in rows] == [4, 2, 6]
    assert [row["steps"] for row in rows] == [16, 8, 24]
    assert rows[2]["accepted_per_position"] == [18, 6, 0]
    tokens = [sum(answer[0] for answer in row["answers"]) for row in rows]
    seconds = [count / row["tokens_per_second"] for count, row in zip(tokens, rows, strict=True)]
    assert seconds[2] == pytest.approx(seconds[0] + seconds[1])


def test_a_llama_server_is_measured_by_the_numbers_in_its_answers(server, target_folder, tmp_path, capsys):
    """Each text has 4 tokens: the prompt's, two of a step that accepts 1 of 2, one of a step that accepts 0 of 1."""
    server.fault, server.drafted = "llama.cpp", {"draft_n": 3, "draft_n_accepted": 1}
    assert main(argv(target_folder, tmp_path, server.url, "--temperature", "0")) == 0
    (row,) = read_json(tmp_path / "made" / "served.json")["suites"]
    texts = server.asked
    assert (row["steps"], row["drafted_tokens"], row["accepted_tokens"]) == (2 * texts, 3 * texts, texts)
    assert "0.33 of all drafted tokens | 1.50 |" in capsys.readouterr().out
    server.drafted = {}
    assert exit_code(main, argv(target_folder, tmp_path, server.url)) == 2
    assert "the server drafted nothing" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--rule block", "--batch_size 2", "--repeats 2", "--dtype float32", "--as vllm"])
def test_flags_of_decoding_in_this_process_are_refused(target_folder, tmp_path, capsys, flag):
    assert exit_code(main, argv(target_folder, tmp_path, "http://127.0.0.1:9", *flag.split())) == 2
    said = capsys.readouterr().err
    assert "no server at" not in said
    assert said.count("\n") == 1


def test_an_error_amid_an_answer_is_the_servers_and_what_was_measured_is_kept(
    server, target_folder, tmp_path, monkeypatch, capsys
):
    counters, threads = in_server._counters, []
    monkeypatch.setattr(
        in_server, "_counters", lambda *given, **lack: threads.append(current_thread()) or counters(*given, **lack)
    )
    server.last = 1
    assert exit_code(main, argv(target_folder, tmp_path, server.url)) == 2
    kept = tmp_path / "made" / "served.json"
    url = server.url.removesuffix("/v1")
    assert capsys.readouterr().err.endswith(f": {url}: out of memory; {kept} has what was measured\n")
    assert [row["temperature"] for row in read_json(kept)["suites"]] == [0.0]
    assert main_thread() not in threads, "the clients go on while the counters are read"


def test_of_several_models_the_target_is_asked(server, target_folder, tmp_path, capsys):
    for models, asked in ((["a", str(target_folder)], str(target_folder)), (["a", "b"], "a")):
        server.models = models
        assert main(argv(target_folder, tmp_path, server.url, "--temperature", "0")) == 0
        assert server.model == asked
        assert ("serves a, b: measuring a" in capsys.readouterr().err) == (asked == "a")


def test_a_server_that_answers_nothing_or_is_not_there_and_a_missing_head_are_one_line(
    server, target_folder, tmp_path, capsys
):
    server.fault = "nothing"
    for url, message in (
        (server.url, ": not OpenAI's API, or no model is served there\n"),
        ("http://127.0.0.1:9", "no server at http://127.0.0.1:9: "),
    ):
        assert exit_code(main, argv(target_folder, tmp_path, url)) == 2
        said = capsys.readouterr().err
        assert (message in said, said.count("\n")) == (True, 1)
    command = argv(target_folder, tmp_path, server.url)
    (tmp_path / "head").rmdir()
    assert exit_code(main, command) == 2
    assert f"--speculator {tmp_path / 'head'}: not a folder" in capsys.readouterr().err
