"""Updates of a vLLM server's drafter: the calls in their order, and the head that is in use at the end, by a stub."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


def test_a_head_that_accepts_more_stays_and_the_old_one_comes_back_if_it_accepts_less(start, capsys):
    server, stub = start(old=2.0, new=2.5, worse=1.9)
    assert server.try_head("new", "old") is None
    assert (stub.calls, stub.head) == (UPDATE, "new")
    said = "acceptance length 2.00 before the update, 2.50 after it, +25.0% (+25.0% to +25.0%)"
    assert said in capsys.readouterr().err
    assert server.try_head("worse", "new").startswith(
        "swapped back: acceptance length 2.50 before the update, 1.90 after"
    )
    assert (stub.calls, stub.head) == (3 * UPDATE, "new")


# Of the answers in a report: SmolLM2, Spec-Bench, temperature 0. They differ much: steps are far from independent.
STEPS = (
    "138 26 90 74 10 54 10 46 87 65 12 51 126 62 86 40 53 49 92 54 88 68 91 55 94 64 75 75 83 51 87 67 83 15 "
    "52 56 110 43 84 74 76 58 105 45 82 69 15 60 94 36 100 9 51 52 31 77 74 32 71 63 "
)
ACCEPTED = (
    "114 4 35 53 8 72 20 27 39 61 4 63 127 64 40 31 53 77 160 47 39 59 36 72 108 61 52 36 43 74 92 54 26 4 74 "
    "69 142 84 43 52 51 67 146 14 45 56 8 67 158 20 27 3 76 69 33 48 52 29 56 63 "
)


class Traffic(VLLMServer):
    """Counts the drafts of four requests at a time; ten steps of each pass between two looks."""

    def __init__(self, seed: int, worse: float):
        super().__init__("http://simulated", "")
        self.draw, self.worse, self.head, self.seen = np.random.default_rng(seed), worse, "old", np.zeros(2)
        self._begin()

    def _begin(self) -> None:
        """Draw the next 3,650 steps of each row, whose requests accept as many tokens as those of the report."""
        steps, accepted = (np.array(text.split(), int) for text in (STEPS, ACCEPTED))
        rates = (accepted / steps + 1) * (1 - self.worse * (self.head == "new")) - 1
        rows = []
        for _ in range(4):
            drawn = self.draw.integers(0, len(steps), 200)
            rows.append(self.draw.binomial(2, np.repeat((rates / 2).clip(0, 1)[drawn], steps[drawn])[:3650]))
        self.left = iter(np.array(rows).reshape(4, 365, 10).sum((0, 2)))

    def counters(self):
        self.seen += 40, next(self.left)
        return tuple(self.seen)

    def _replace(self, folder):
        self.head = folder
        self._begin()


def swapped_back(monkeypatch, worse: float, count: int) -> float:
    """Return the share of updates that are undone if the new head's acceptance length is lower by a share."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(vllm_updates, "time", clock)
    return sum(Traffic(seed, worse).try_head("new", "old") is not None for seed in range(count)) / count


def test_an_equal_head_stays_and_a_worse_one_leaves_at_the_dependence_of_a_report(monkeypatch):
    assert swapped_back(monkeypatch, 0.0, 200) < 0.09, "it is 5%: of 200 updates 18 or more have a chance below 1%"
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
