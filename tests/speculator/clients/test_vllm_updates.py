"""Updates of a vLLM server's drafter: the calls in their order, and the head that is in use at the end, by a stub."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from speculator import UserError
from speculator.clients import vllm_updates
from speculator.clients.vllm_updates import VLLMServer

UPDATE = ["/pause?mode=keep", "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


class Stub(ThreadingHTTPServer):
    """Speaks vLLM's routes; each look at /metrics finds 100 more drafts, by the acceptance length of the head."""

    def __init__(self, lengths: dict[str, float]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lengths, self.head, self.failing, self.failures = lengths, "old", "", 1
        self.calls: list[str] = []
        self.drafts = self.accepted = 0.0
        self.faults: list[int] = []  # statuses of the next looks at /metrics


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *_):
        pass

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        stub = self.server
        if stub.faults:
            return self.answer(stub.faults.pop(), "")
        stub.drafts += 100
        stub.accepted += 100 * (stub.lengths.get(stub.head, 1) - 1)
        name = 'vllm:spec_decode_num_{}_total{{engine="0",model_name="m"}} {}\n'
        lines = name.format("drafts", stub.drafts) + name.format("accepted_tokens", stub.accepted)
        return self.answer(200, lines + name.format("draft_tokens", 7e9) if stub.lengths else "")

    def do_POST(self):
        stub, body = self.server, self.rfile.read(int(self.headers.get("content-length", 0)))
        stub.calls.append(self.path)
        if stub.failing == self.path:
            stub.failures -= 1
            stub.failing = stub.failing if stub.failures else ""
            return self.answer(500, "no such folder")
        if self.path == "/update_weights":
            assert self.headers["content-type"] == "application/json"
            stub.head = json.loads(body)["update_info"]["folder"]
        return self.answer(200, "{}")


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(vllm_updates, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(vllm_updates, "_DRAFTS", 300)
    running = []

    def start(**lengths: float) -> tuple[VLLMServer, Stub]:
        stub = Stub(lengths)
        running.append(stub)
        Thread(target=stub.serve_forever, daemon=True).start()
        return VLLMServer(f"http://127.0.0.1:{stub.server_port}/v1", ""), stub

    yield start
    for stub in running:
        stub.shutdown()
        stub.server_close()


def test_a_head_that_accepts_more_stays(start, capsys):
    server, stub = start(old=2.0, new=2.5)
    assert server.try_head("new", "old") is None
    assert (stub.calls, stub.head) == (UPDATE, "new")
    assert "acceptance length 2.00 before the update, 2.50 after it" in capsys.readouterr().err


def test_the_old_head_comes_back_if_the_acceptance_falls(start):
    server, stub = start(old=2.0, new=1.9)
    assert server.try_head("new", "old") == "swapped back: acceptance length 1.90 in the server, 2.00 before"
    assert (stub.calls, stub.head) == (2 * UPDATE, "old")


@pytest.mark.parametrize("failing", UPDATE[:-1])
def test_a_failed_update_leaves_the_server_running_with_the_old_head(start, failing):
    server, stub = start(old=2.0, new=2.5)
    stub.failing = failing
    assert server.try_head("new", "old") == f"not loaded: {failing}: status 500: no such folder"
    failed = UPDATE[: UPDATE.index(failing) + 1]
    assert (stub.calls, stub.head) == ([*failed, "/resume", *UPDATE], "old")


def test_a_server_that_takes_neither_head_is_an_error(start):
    server, stub = start(old=2.0, new=2.5)
    stub.failing, stub.failures = "/update_weights", 2
    with pytest.raises(
        UserError, match=r"new head was not loaded: .*; nor was the old one: /update_weights: status 500"
    ):
        server.try_head("new", "old")


def test_without_traffic_the_new_head_stays(start, monkeypatch, capsys):
    server, stub = start(old=2.0, new=1.0)
    monkeypatch.setattr(vllm_updates, "_WATCH_SECONDS", 0.0)
    assert server.try_head("new", "old") is None
    assert stub.head == "new"
    assert "fewer than 300 drafts" in capsys.readouterr().err


def test_a_poll_that_fails_is_repeated(start, monkeypatch):
    server, stub = start(old=2.0, new=1.9)
    replace = server._replace

    def replaced(folder):
        stub.faults = [503, 500]
        return replace(folder)

    monkeypatch.setattr(server, "_replace", replaced)
    stub.faults = [503]
    assert server.try_head("new", "old").startswith("swapped back")


def test_a_restart_before_the_first_look_is_noticed(start, monkeypatch):
    server, stub = start(old=2.0, new=2.0)
    replace = server._replace

    def replaced(folder):
        fault = replace(folder)
        stub.drafts = 0.0
        return fault

    monkeypatch.setattr(server, "_replace", replaced)
    with pytest.raises(UserError, match="started again"):
        server.try_head("new", "old")


def test_a_server_that_is_away_for_half_an_hour_or_started_again_is_an_error(start, monkeypatch):
    server, stub = start(old=2.0)
    stub.drafts, looks = 1000.0, iter([(1000, 0), (100, 0)])
    with monkeypatch.context() as patched:
        patched.setattr(server, "counters", lambda: next(looks))
        with pytest.raises(UserError, match="started again"):
            server.watch()
    monkeypatch.setattr(vllm_updates, "_WATCH_SECONDS", 0.1)
    with pytest.raises(UserError, match="no answer"):
        VLLMServer("http://127.0.0.1:9", "").watch()


def test_what_is_no_vllm_with_a_drafter_is_an_error(start):
    with pytest.raises(UserError, match="no vLLM counters"):
        start()[0].counters()
    with pytest.raises(UserError, match=r"//127\.0\.0\.1:9/v1: no answer"):
        VLLMServer("http://me:password@127.0.0.1:9/v1", "").counters()
