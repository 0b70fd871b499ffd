"""`python -m data generate --server`: answers that no server should give."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from bad_inputs.refusal import Case

GENERATE = ["data", "generate", "--target", "TARGET", "--prompts", "PROMPTS", "--output", "out"]
GENERATE += ["--max_new_tokens", "4", "--temperature", "0"]
_GOOD = {"text": " x", "finish_reason": "length", "token_ids": [5, 6, 7, 8]}


def choice(**changes: Any) -> bytes:
    """A completion with other values; ... leaves a key out."""
    made = {key: value for key, value in {**_GOOD, **changes}.items() if value is not ...}
    return json.dumps({"choices": [made], "usage": {"prompt_tokens": None}}).encode()


ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"<html>",
    "binary": bytes(range(256)),
    "UTF-16": '{"choices": []}'.encode("utf-16"),
    "deep nesting": b"[" * 100_000,
    "a list": b"[1]",
    "a number": b"7",
    "null": b"null",
    "no choices": b"{}",
    "choices empty": b'{"choices": []}',
    "choices a number": b'{"choices": 7}',
    "choices of numbers": b'{"choices": [7]}',
    "text a number": choice(text=7, token_ids=...),
    "text a list": choice(text=["x"], token_ids=...),
    "text null": choice(text=None, token_ids=...),
    "text half a surrogate pair": choice(text="\ud800", token_ids=...),
    "tokens a text": choice(token_ids="5 6"),
    "tokens of texts": choice(token_ids=["5"]),
    "tokens of floats": choice(token_ids=[1.5]),
    "tokens negative": choice(token_ids=[-1]),
    "tokens too large": choice(token_ids=[10**6]),
    "tokens huge": choice(token_ids=[10**30]),
    "tokens null within": choice(token_ids=[None]),
    "too many tokens": choice(token_ids=[5] * 5000),
    "tokens an object": choice(token_ids={"a": 1}),
}


class Server(ThreadingHTTPServer):
    """Answers every completion by the same bytes."""

    daemon_threads = True

    def __init__(self, status: int, answer: bytes, headers: dict[str, str]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.answer, self.headers = status, answer, headers
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(200, b'{"data": [{"id": "model"}]}', {})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(self.server.status, self.server.answer, self.server.headers)

    def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def serve():
    servers = []

    def start(status: int, answer: bytes, **headers: str) -> str:
        servers.append(Server(status, answer, headers))
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """What is tried again is tried again at once."""
    monkeypatch.setattr("data.connection._FIRST_DELAY", 0.001, raising=False)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_cannot_be_is_one_line(name, refused, serve):
    refused(Case(name, [*GENERATE, "--server", serve(200, ANSWERS[name])], "127.0.0.1", begins="out"))


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422, 500, 503])
def test_a_status_that_is_none_is_one_line(status, refused, serve):
    url = serve(status, b'{"error": "a\x1b[31m long\n story"}', **({"Location": "/"} if status == 301 else {}))
    refused(Case(str(status), [*GENERATE, "--server", url], "127.0.0.1", begins="out"))
