"""`python -m speculator serve`: wrong flags, and how the server starts and ends."""

import re
import signal
import socket
import time
from pathlib import Path

import forked
import httpx
import pytest
from conftest import exit_code
from serving_here import until

from speculator.__main__ import main
from speculator.cli import serve
from speculator.target.model import Target

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"],
        ["--max_num_seqs", "0"],
        ["--port", "0", "--max_model_len", "1000000"],
        ["--ngram", "--branches", "2"],
        ["--port", "0", "--target", "/nowhere"],
        ["--port", "0", "another_target"],
        ["--record_share", "1"],
        ["--record_max", "50"],
        ["--api_key", ""],
        ["--allowed_origins", "http://localhost:3000/"],
        ["--allowed_origins", "localhost:3000"],
        ["--ngram", "--speculator_revision", "v2"],
        ["--timeout_keep_alive", "-1"],
    ],
)
def test_wrong_flags_fail_in_one_line(capsys, target_folder, flags):
    assert exit_code(main, ["serve", "--target", str(target_folder), *flags]) == 2
    error = capsys.readouterr().err.removeprefix(f"loading {target_folder}\n").removeprefix("loading /nowhere\n")
    assert error.count("\n") == 1
    assert flags[-2] in error or flags[-1] in error


def test_an_empty_key_in_the_environment_is_not_an_open_server(capsys, target_folder, monkeypatch):
    for key in ("", " "):
        monkeypatch.setenv(serve.KEY_VARIABLE, key)
        assert exit_code(main, ["serve", "--target", str(target_folder), "--port", "0"]) == 2
        assert "$SPECULATOR_API_KEY is empty" in capsys.readouterr().err


def test_a_taken_port_is_an_error_before_the_target_is_loaded(capsys, target_folder, monkeypatch):
    monkeypatch.setattr(Target, "load", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert exit_code(main, ["serve", "--target", str(target_folder), "--port", port]) == 2
    assert port in capsys.readouterr().err


def test_a_port_that_another_server_took_meanwhile_is_an_error(capsys, target_folder, monkeypatch):
    load, taken = Target.load, []

    def loaded(*given, **how):
        taken.append(serve._bind("127.0.0.1", port))
        taken[0].listen()
        return load(*given, **how)

    with serve._bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(Target, "load", loaded)
    assert exit_code(main, ["serve", "--target", str(target_folder), "--port", str(port)]) == 2
    taken[0].close()
    assert f"can't listen on --host 127.0.0.1 --port {port}" in capsys.readouterr().err


def test_an_event_leaves_at_once():
    """asyncio turns Nagle's algorithm off for sockets that name TCP, and not for those with the default protocol."""
    with serve._bind("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


def test_a_missing_package_is_named(capsys, target_folder, monkeypatch):
    monkeypatch.setattr(serve, "is_installed", lambda name: name != "uvicorn")
    assert exit_code(main, ["serve", "--target", str(target_folder)]) == 2
    assert "pip install uvicorn" in capsys.readouterr().err


def test_sigterm_lets_requests_in_flight_finish(target_folder):
    command = ["-m", "speculator", "serve", "--target", str(target_folder), "--ngram", "--port", "0"]
    command += ["--served_model_name", "tiny", "--max_model_len", "125", "--max_num_seqs", "3"]
    process = forked.Popen(command)
    try:
        assert process.stderr.readline().startswith("loading ")
        line = process.stderr.readline()
        assert "3 slots of 125 tokens" in line
        url = re.search(r"http://127\.0\.0\.1:\d+", line).group()
        body = {"prompt": [5, 6], "max_tokens": 120, "stream": True, "temperature": 1.0}

        def listens() -> bool:
            try:
                return httpx.get(f"{url}/health").is_success
            except httpx.ConnectError:
                return False

        until(listens, 30)
        with httpx.Client(base_url=url, timeout=60) as client:
            (model,) = client.get("/v1/models").json()["data"]
            assert (model["id"], model["max_model_len"]) == ("tiny", 125)
            assert client.post("/v1/completions", json={"prompt": [5] * 125}).status_code == 400
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0
        assert process.stderr.read() == "answering 1 requests, for at most 60 s; a second signal ends at once\n"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stalled_client_does_not_hold_up_the_end(target_folder, signals):
    """Of two clients one has sent half a request, the other reads no answer. On another loopback address."""
    command = [
        "-m",
        "speculator",
        "serve",
        "--target",
        str(target_folder),
        "--ngram",
        "--port",
        "0",
        "--host",
        "127.0.0.2",
    ]
    command += ["--timeout_keep_alive", "1", "--timeout_graceful_shutdown", "1" if signals == 1 else "60"]
    process = forked.Popen(command)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    body = b'{"prompt": [5], "max_tokens": 200, "n": 8, "ignore_eos": true, "stream": true, "logprobs": 20}'
    try:
        process.stderr.readline()
        address = re.search(r"127\.0\.0\.2:(\d+)", process.stderr.readline())
        until(lambda: httpx.get(f"http://{address.group()}/health").is_success, 30)
        for host, status in ((address.group(), 200), ("page.example", 403)):
            assert httpx.get(f"http://{address.group()}/health", headers={"Host": host}).status_code == status
        place = ("127.0.0.2", int(address.group(1)))
        idle, half, unread = (socket.create_connection(place) for _ in range(3))
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        half.sendall(head + b'100\r\n\r\n{"prompt": ')
        unread.sendall(head + b"%d\r\n\r\n" % len(body) + body)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        idle.settimeout(10)
        while idle.recv(1000):  # closed after a second
            pass
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert process.wait(10) == 0
        errors = process.stderr.read()
        assert "Traceback" not in errors, errors
        assert "warning" not in errors
    finally:
        process.kill()
        process.wait()
