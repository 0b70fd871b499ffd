"""Updates of a vLLM server's drafter: the calls in their order, and the head that is in use at the end, by a stub."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
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
        name = 'vllm:spec_decode_num_{}_total{{engine="0",position="0"}} {}\n'
        lines = name.format("drafts", stub.drafts) + name.format("accepted_tokens_per_pos", stub.accepted)
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
    monkeypatch.setattr(vllm_updates, "_LOOKS", (20,))
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
    assert (
        "acceptance length 2.00 before the update, 2.50 after it, +25.0% (+25.0% to +25.0%)" in capsys.readouterr().err
    )


def test_the_old_head_comes_back_if_the_acceptance_falls(start):
    server, stub = start(old=2.0, new=1.9)
    assert server.try_head("new", "old").startswith(
        "swapped back: acceptance length 2.00 before the update, 1.90 after it, -5.0%"
    )
    assert (stub.calls, stub.head) == (2 * UPDATE, "old")


def shipped() -> tuple[float, float, float]:
    """Mean and variance of the tokens per step, and the design effect, of the shipped report with the largest effect.

    That is the variance of an acceptance length over what it would be if steps were independent.
    """
    found = []
    for file in (Path(__file__).parents[3] / "docs" / "lab").rglob("report.json"):
        for row in json.loads(file.read_text())["suites"]:
            if row["drafter"] == "head" and row["steps"] >= 1000:
                length, counts, bounds = (
                    row[name] for name in ("acceptance_length", "accepted_lengths", "acceptance_length_interval")
                )
                variance = sum(n * (i + 1 - length) ** 2 for i, n in enumerate(counts)) / sum(counts)
                error = (bounds["high"] - bounds["low"]) / 2 / 1.96
                found.append((error**2 * row["steps"] / variance, length, variance))
    effect, length, variance = max(found)
    assert effect > 4, "drafts of one request are alike"
    return length, variance, effect


class Traffic(VLLMServer):
    """Counts the drafts of four requests at a time, each of some 40 steps; ten steps of each pass between two looks."""

    def __init__(self, seed: int, worse: float):
        super().__init__("http://simulated", "")
        self.draw, self.worse, self.head, self.seen = np.random.default_rng(seed), worse, "old", np.zeros(2)
        self._begin()

    def _begin(self) -> None:
        length, variance, effect = SHIPPED
        shared = (effect - 1) / (2 * 40 - 2)  # share of the variance that a request's steps have in common
        rows = []
        for _ in range(4):
            sizes = self.draw.geometric(1 / 40, 200)
            rows.append(np.repeat(self.draw.normal(0, (shared * variance) ** 0.5, 200), sizes)[:3650])
        noise = self.draw.normal(0, ((1 - shared) * variance) ** 0.5, (4, 3650))
        mean = length * (1 - self.worse * (self.head == "new")) - 1
        self.left = iter((mean + np.array(rows) + noise).reshape(4, 365, 10).sum((0, 2)))

    def counters(self):
        self.seen += 40, next(self.left)
        return tuple(self.seen)

    def _replace(self, folder):
        self.head = folder
        self._begin()


SHIPPED = shipped()


def swapped_back(monkeypatch, worse: float, count: int) -> float:
    """Return the share of updates that are undone if the new head's acceptance length is lower by a share."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(vllm_updates, "time", clock)
    return sum(Traffic(seed, worse).try_head("new", "old") is not None for seed in range(count)) / count


def test_an_equal_head_stays_and_a_worse_one_leaves_at_the_dependence_of_shipped_reports(monkeypatch):
    assert swapped_back(monkeypatch, 0.0, 200) <= 0.05
    assert swapped_back(monkeypatch, 0.12, 40) >= 0.9


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
    assert "too little traffic" in capsys.readouterr().err


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
            server.watch(lambda found: True)
    monkeypatch.setattr(vllm_updates, "_WATCH_SECONDS", 0.1)
    with pytest.raises(UserError, match="no answer"):
        VLLMServer("http://127.0.0.1:9", "").watch(lambda found: True)


def test_what_is_no_vllm_with_a_drafter_is_an_error(start):
    with pytest.raises(UserError, match="no vLLM counters"):
        start()[0].counters()
    with pytest.raises(UserError, match=r"//127\.0\.0\.1:9/v1: no answer"):
        VLLMServer("http://me:password@127.0.0.1:9/v1", "").counters()
