"""`python -m speculator serve`: what it refuses, and how it ends."""

import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import torch
from conftest import exit_code, tiny_model

from speculator.__main__ import main
from speculator.cli import serve
from speculator.errors import UserError
from speculator.tables import gigabytes
from speculator.target.kv_cache import KVCache, forms
from speculator.target.model import Target

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], "--port 70000 is not in 0..65535"),
        (["--max_batch_size", "0"], "--max_batch_size must be at least 1"),
        (["--max_batch_size", "1000000000"], "--max_batch_size: at most the 2048 connections"),
        (["--queue", "-1"], "--queue must be at least 0"),
        (["--timeout", "0"], "--timeout 0 is not in 0..1000000"),
        (["--timeout", "nan"], "--timeout nan is not in 0..1000000"),
        (["--max_model_len", "1"], "--max_model_len must be at least 2"),
        (["--max_model_len", "1000000", "--port", "0"], "--max_model_len 1000000: the context of"),
        (["--api_key", "a b"], "--api_key has a line end, a space"),
        (["--host", "no such host"], "can't listen at --host no such host --port 8000"),
        (["--host", "192.0.2.1"], "can't listen at --host 192.0.2.1"),
        (["--ngram", "--branches", "2"], "--ngram copies a chain"),
        (["--port", "0", "--target", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_flags_are_one_line(capsys, target_folder, flags, said):
    assert exit_code(main, ["serve", "--target", str(target_folder), *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_port_that_is_taken_is_said_before_the_target_is_loaded(capsys, target_folder, monkeypatch):
    monkeypatch.setattr(Target, "load", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert exit_code(main, ["serve", "--target", str(target_folder), "--port", port]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_of_two_servers_on_a_port_that_are_both_bound_one_is_told():
    first = serve._bind("127.0.0.1", 0)
    second = serve._bind("127.0.0.1", first.getsockname()[1])
    serve._listen(first)
    with pytest.raises(UserError, match=f"can't listen at --host 127.0.0.1 --port {first.getsockname()[1]}"):
        serve._listen(second)
    first.close()
    second.close()


def test_a_missing_package_is_named(capsys, target_folder, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else True)
    assert exit_code(main, ["serve", "--target", str(target_folder)]) == 2
    assert capsys.readouterr().err == "speculator: serve needs uvicorn: pip install uvicorn\n"


def test_sigterm_answers_what_is_in_flight_and_ends_well(target_folder):
    command = [sys.executable, "-m", "speculator", "serve", "--target", str(target_folder), "--ngram", "--port", "0"]
    command += ["--max_model_len", "125"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", line).group()
        assert line.endswith(" GB, 8 slots of 125 tokens\n")
        body = {"prompt": [5, 6], "max_tokens": 120, "stream": True, "temperature": 1.0}
        with httpx.Client(base_url=url, timeout=60) as client:
            for _ in range(100):  # it listens a moment later
                try:
                    client.get("/health").raise_for_status()
                    break
                except httpx.ConnectError:
                    threading.Event().wait(0.05)
            assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 125
            assert client.post("/v1/completions", json={"prompt": [5] * 125}).status_code == 400
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_a_core_is_left_for_the_connections(monkeypatch):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        serve.leave_a_core()
        assert torch.get_num_threads() == 3
        monkeypatch.delenv("OMP_NUM_THREADS")
        serve.leave_a_core()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_the_memory_that_the_cache_may_come_to_is_told(monkeypatch):
    target = Target(tiny_model(), None)
    config = target.config
    each = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    target.context_length = 10**6
    assert f"up to {gigabytes(8 * each * 10**6)} GB, 8 slots of 1,000,000 tokens" in serve._memory(target, 8)
    assert "run out" not in serve._memory(target, 8)
    target.context_length = 10**9
    assert f"up to {8 * each:,} GB," in serve._memory(target, 8)
    target.context_length = 10**6
    monkeypatch.setattr(Target, "device", property(lambda _: torch.device("cuda", 0)))
    monkeypatch.setattr(Target, "cache", lambda self, rows, capacity: KVCache(self.forms, rows, capacity, CPU))
    target.forms = forms(target.model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values)
    for free, said in ((8 * each * 3000, "run out once a text has 1,800:"), (8 * each * 10**7, None)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        line = serve._memory(target, 8)
        assert said in line if said else "run out" not in line
