"""Text from a server: a stand-in that speaks OpenAI's interface, in the dialects and with the faults of real ones."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import tiny_tokenizer
from datasets import load_from_disk

from data import server as module
from data.commands.generate import main
from data.server import Prompt, fetch_rows
from speculator import Sampling, UserError

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TEXTS = ["import os", "def f(x):", "class A:", "return", "for i in range(3):"]


class StandIn(ThreadingHTTPServer):
    """Continues every prompt by a text that names its last words and the seed.

    Args:
        takes: kinds of prompt: "ids", "text", "messages".
        extended: whether fields beyond OpenAI's are let through; then token ids come back too.
        faults: status codes to answer with first, or None to hang up.
        samples: whether the seed matters.
        misread: tokens too many in the usage.
        delay: seconds for each answer.
        lists: whether it can tell its models.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        takes=("ids", "text", "messages"),
        extended=True,
        faults=(),
        samples=True,
        misread=0,
        delay=0.0,
        lists=True,
    ):
        super().__init__(("127.0.0.1", 0), Handler)
        self.takes, self.extended, self.faults, self.samples = takes, extended, list(faults), samples
        self.misread, self.delay, self.lists, self.lock = misread, delay, lists, threading.Lock()
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.chat_template = TEMPLATE
        self.bodies: list[tuple[str, dict]] = []
        self.busy = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status: int, content: dict) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        if self.server.lists:
            self.reply(200, {"data": [{"id": "the-model"}]})
        else:
            self.reply(500, {"error": "no cache folder to list"})

    def do_POST(self):
        server: StandIn = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append((self.path, body))
            fault = server.faults.pop(0) if server.faults else 200
            server.busy += 1
            server.most = max(server.most, server.busy)
        try:
            time.sleep(server.delay)
            if fault is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            elif fault != 200:
                self.reply(fault, {"error": {"message": "not now"}})
            else:
                self.answer(server, body)
        finally:
            with server.lock:
                server.busy -= 1

    def answer(self, server: StandIn, body: dict) -> None:
        chat = self.path == "/v1/chat/completions"
        kind = "messages" if chat else "ids" if isinstance(body["prompt"], list) else "text"
        if kind not in server.takes:
            return self.reply(404 if chat else 400, {"error": {"message": f"no {kind} here"}})
        if not server.extended and body.keys() & {"top_k", "min_p", "repetition_penalty", "return_token_ids"}:
            return self.reply(422, {"detail": "Unexpected fields"})
        if chat:
            ids = server.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)["input_ids"]
        else:
            ids = body["prompt"] if kind == "ids" else server.tokenizer(body["prompt"])["input_ids"]
        text = continuation(server.tokenizer.decode(ids), body["seed"] if server.samples else 0)
        choice = {"message": {"content": text}} if chat else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = [*server.tokenizer(text)["input_ids"], 0]
        usage = {"prompt_tokens": len(ids) + server.misread}
        self.reply(200, {"choices": [{**choice, "finish_reason": "stop"}], "usage": usage})


def continuation(prompt: str, seed: int) -> str:
    return f" of seed {seed} behind {prompt[-6:]!r}"


@pytest.fixture
def serve(monkeypatch):
    """Starts stand-ins."""
    monkeypatch.setattr(module, "_FIRST_DELAY", 0.001)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    started = []

    def start(**settings) -> StandIn:
        started.append(StandIn(**settings))
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


def text_prompts(tokenizer) -> list[Prompt]:
    return [Prompt(tokenizer(text)["input_ids"]) for text in TEXTS]


def chat_prompts(tokenizer) -> list[Prompt]:
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    render = tokenizer.apply_chat_template
    return [Prompt(render(chat, add_generation_prompt=True)["input_ids"], chat) for chat in chats]


def fetched(server, tokenizer, folder, prompts=None, **settings) -> list[dict]:
    settings = {"concurrency": 2, "seed": 7, "progress": False, **settings}
    return list(fetch_rows(server.url, "target", tokenizer, prompts or text_prompts(tokenizer), folder, **settings))


def check(rows, tokenizer, prompts, seed=7) -> None:
    """Every row is its prompt, the text of its own seed behind it, and EOS."""
    assert len(rows) == len(prompts)
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        count = len(prompt.ids)
        assert row["input_ids"][:count] == prompt.ids
        assert row["loss_mask"] == [0] * count + [1] * (len(row["input_ids"]) - count)
        expected = continuation(tokenizer.decode(prompt.ids), seed + index)
        assert tokenizer.decode(row["input_ids"][count:]) == expected + "<eos>"


@pytest.mark.parametrize("make", [text_prompts, chat_prompts])
@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("takes", [("ids", "text", "messages"), ("text", "messages")])
def test_every_dialect_gives_the_rows(serve, tokenizer, tmp_path, make, extended, takes):
    server, prompts = serve(takes=takes, extended=extended), make(tokenizer)
    check(fetched(server, tokenizer, tmp_path, prompts), tokenizer, prompts)
    path, body = server.bodies[-1]
    kind = "ids" if "ids" in takes else "messages" if make is chat_prompts else "text"
    assert path == ("/v1/chat/completions" if kind == "messages" else "/v1/completions")
    assert isinstance(body.get("prompt"), {"ids": list, "text": str, "messages": type(None)}[kind])
    assert ("top_k" in body) == extended
    assert body["model"] == "the-model"


def test_samplers_are_asked_for_and_never_dropped(serve, tokenizer, tmp_path):
    server = serve()
    fetched(server, tokenizer, tmp_path / "a", sampling=Sampling(0.7, top_k=5, top_p=0.9, min_p=0.1), max_new_tokens=9)
    body = server.bodies[-1][1]
    assert [body[key] for key in ("temperature", "top_k", "top_p", "min_p", "max_tokens")] == [0.7, 5, 0.9, 0.1, 9]
    with pytest.raises(UserError, match="does not take top_k or min_p"):
        fetched(serve(extended=False), tokenizer, tmp_path / "b", sampling=Sampling(1.0, top_k=5))


def test_a_server_that_lists_no_models_is_asked_for_the_target(serve, tokenizer, tmp_path):
    server = serve(lists=False)
    fetched(server, tokenizer, tmp_path)
    assert server.bodies[-1][1]["model"] == "target"


def test_passing_faults_are_tried_again(serve, tokenizer, tmp_path):
    prompts = text_prompts(tokenizer)
    server = serve(faults=[503, 429, None, 500, None, 200, 200, 502, None, 429, 200, 503, 503])
    check(fetched(server, tokenizer, tmp_path), tokenizer, prompts)
    assert not server.faults


def test_a_fault_that_stays_is_one_line(serve, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"/v1/completions: 503 .*not now"):
        fetched(serve(faults=[503] * 1000), tokenizer, tmp_path)
    with pytest.raises(UserError, match="401"):
        fetched(serve(faults=[401]), tokenizer, tmp_path)


def test_requests_run_side_by_side_and_no_more_than_asked_for(serve, tokenizer, tmp_path):
    server = serve(delay=0.02)
    prompts = text_prompts(tokenizer) * 8
    check(fetched(server, tokenizer, tmp_path, prompts, concurrency=4), tokenizer, prompts)
    assert server.most == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": False}, "does not sample"),
        ({"takes": ("ids",), "misread": 1}, "another tokenizer or chat template"),
        ({"takes": ("messages",)}, "does not take the first prompt in any form"),
    ],
)
def test_a_server_that_would_give_other_text_is_refused(serve, tokenizer, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        fetched(serve(**settings), tokenizer, tmp_path)


def test_a_cold_temperature_may_give_the_same_text_twice(serve, tokenizer, tmp_path):
    assert len(fetched(serve(samples=False), tokenizer, tmp_path, sampling=Sampling(0.1))) == len(TEXTS)


def test_a_prompt_that_the_server_refuses_is_named(serve, tokenizer, tmp_path):
    probe = [200] * 3  # the form, and a prompt under two seeds
    server = serve(faults=[*probe, 200, 200, 400])
    with pytest.raises(UserError, match=r"prompt [234]: 400 .*not now"):
        fetched(server, tokenizer, tmp_path)


def test_no_server_is_known_at_once(tokenizer, tmp_path):
    with pytest.raises(UserError, match="no server at http"):
        fetch_rows("http://127.0.0.1:9", "target", tokenizer, text_prompts(tokenizer), tmp_path, progress=False)


def test_killed_it_asks_only_for_what_is_missing(serve, tokenizer, tmp_path, target_folder):
    server = serve(delay=0.05)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    texts = [f"{text}  # {number}" for number in range(6) for text in TEXTS]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    flags = ["--target", str(target_folder), "--server", server.url + "/v1", "--prompts", str(file)]
    command = [sys.executable, "-m", "data", "generate", *flags, "--output", str(output), "--batch_size", "2"]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    while len(kept := list((output / "batches").glob("0*.json"))) < 5:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    asked = len(server.bodies)
    assert main(command[4:]) == 0
    assert len(server.bodies) - asked <= len(texts) - 2 * len(kept) + 3  # and the probe
    prompts = [Prompt(tokenizer(text)["input_ids"]) for text in texts]
    check(list(load_from_disk(output / "rows")), tokenizer, prompts, seed=0)
    assert json.loads((output / "manifest.json").read_text())["rows"] == len(texts)
