"""Text from a server: a stand-in that speaks OpenAI's interface, in the dialects and with the faults of real ones."""

import asyncio
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
from transformers import AutoTokenizer

from data import client as module
from data import connection
from data.__main__ import main
from data.client import RenderedPrompt, fetch_rows
from data.rendering import end_of_answer
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
        rogue: answers prompts in its place, with the handler.
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
        rogue=None,
    ):
        super().__init__(("127.0.0.1", 0), Handler)
        self.takes, self.extended, self.faults, self.samples = takes, extended, list(faults), samples
        self.misread, self.delay, self.lists, self.lock = misread, delay, lists, threading.Lock()
        self.rogue, self.gone = rogue, threading.Event()
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.chat_template = TEMPLATE
        self.bodies: list[tuple[str, dict]] = []
        self.busy = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes, which else wait for each other

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
            elif server.rogue:
                server.rogue(self)
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
        tokens = [*server.tokenizer(text)["input_ids"], 0]
        reason = "stop" if len(tokens) <= body["max_tokens"] else "length"
        tokens = tokens[: body["max_tokens"]]
        text = server.tokenizer.decode(tokens, skip_special_tokens=True)
        choice = {"message": {"content": text}} if chat else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
        usage = {"prompt_tokens": len(ids) + server.misread}
        self.reply(200, {"choices": [{**choice, "finish_reason": reason}], "usage": usage})


def continuation(prompt: str, seed: int) -> str:
    return f" of seed {seed} behind {prompt[-6:]!r}"


@pytest.fixture
def serve(monkeypatch):
    """Starts stand-ins."""
    monkeypatch.setattr(connection, "_FIRST_DELAY", 0.001)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    started = []

    def start(**settings) -> StandIn:
        started.append(StandIn(**settings))
        return started[-1]

    yield start
    for server in started:
        server.gone.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


def text_prompts(tokenizer) -> list[RenderedPrompt]:
    return [RenderedPrompt(tokenizer(text)["input_ids"]) for text in TEXTS]


def chat_prompts(tokenizer) -> list[RenderedPrompt]:
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    render = tokenizer.apply_chat_template
    return [RenderedPrompt(render(chat, add_generation_prompt=True)["input_ids"], chat) for chat in chats]


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


def test_a_finished_folder_is_read_again_and_nothing_asked(serve, tokenizer, tmp_path):
    server = serve()
    first = fetched(server, tokenizer, tmp_path)
    asked = len(server.bodies)
    assert fetched(server, tokenizer, tmp_path) == first
    assert len(server.bodies) == asked


def test_no_server_is_known_at_once(tokenizer, tmp_path):
    with pytest.raises(UserError, match="no server at http"):
        fetch_rows("http://127.0.0.1:9", "target", tokenizer, text_prompts(tokenizer), tmp_path, progress=False)


def test_killed_it_asks_only_for_what_is_missing(serve, tokenizer, tmp_path, target_folder):
    server = serve(delay=0.05)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    texts = [f"{text}  # {number}" for number in range(6) for text in TEXTS]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    flags = ["--target", str(target_folder), "--server", server.url + "/v1", "--prompts", str(file)]
    flags += ["--max_new_tokens", "32", "--batch_size", "2"]
    command = [sys.executable, "-m", "data", "generate", *flags, "--output", str(output)]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    while len(kept := list((output / "batches").glob("0*.json"))) < 5:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    asked = len(server.bodies)
    assert main(command[3:]) == 0
    assert len(server.bodies) - asked <= len(texts) - 2 * len(kept) + 3  # and the probe
    prompts = [RenderedPrompt(tokenizer(text)["input_ids"]) for text in texts]
    check(list(load_from_disk(output / "rows")), tokenizer, prompts, seed=0)
    assert json.loads((output / "manifest.json").read_text())["rows"] == len(texts)


# ---- several servers


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def fetched_of(servers, tokenizer, folder, prompts, **settings) -> list[dict]:
    settings = {"concurrency": 2, "seed": 7, "progress": False, **settings}
    urls = [each if isinstance(each, str) else each.url for each in servers]
    return list(fetch_rows(urls, "target", tokenizer, prompts, folder, **settings))


def test_servers_share_the_rows_and_each_has_its_own_requests(serve, tokenizer, tmp_path):
    servers, prompts = [serve(delay=0.02), serve(delay=0.02)], text_prompts(tokenizer) * 6
    rows = fetched_of(servers, tokenizer, tmp_path / "two", prompts, concurrency=3)
    assert rows == fetched(servers[0], tokenizer, tmp_path / "one", prompts, concurrency=3)
    check(rows, tokenizer, prompts)
    assert [server.most for server in servers] == [3, 3]
    made = manifest(tmp_path / "two")["servers"]
    assert sum(made.values()) == len(prompts)
    assert min(made[server.url] for server in servers) >= 6
    assert manifest(tmp_path / "one")["servers"] == {servers[0].url: len(prompts)}


@pytest.mark.parametrize("fault", [None, 503])
def test_a_server_that_dies_midway_is_left_out_and_its_rows_are_done_by_the_others(
    serve, tokenizer, tmp_path, capsys, fault
):
    probe = [200] * 3
    dying, other = serve(faults=probe + [200] * 4 + [fault] * 1000), serve(delay=0.01)
    prompts = text_prompts(tokenizer) * 4
    check(fetched_of([dying, other], tokenizer, tmp_path, prompts), tokenizer, prompts)
    assert manifest(tmp_path)["servers"] == {dying.url: 4, other.url: len(prompts) - 4}
    lines = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(lines) == 1
    assert f"{dying.url} is left out, and its rows are done by 1 other" in lines[0]


def test_a_server_that_is_not_there_is_left_out(serve, tokenizer, tmp_path, capsys):
    server, prompts = serve(), text_prompts(tokenizer)
    check(fetched_of(["http://127.0.0.1:9", server], tokenizer, tmp_path, prompts), tokenizer, prompts)
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


def test_when_all_servers_die_the_rows_are_kept_for_another(serve, tokenizer, tmp_path):
    probe = [200] * 3
    dying = [serve(faults=probe + [200] * 4 + [None] * 1000) for _ in range(2)]
    prompts = text_prompts(tokenizer) * 4
    with pytest.raises(UserError, match="/v1/completions: "):
        fetched_of(dying, tokenizer, tmp_path, prompts)
    kept = 2 * len(list((tmp_path / "batches").glob("0*.json")))
    assert kept
    other = serve()
    check(fetched_of([other], tokenizer, tmp_path, prompts), tokenizer, prompts)
    made = manifest(tmp_path)["servers"]
    assert made[other.url] == len(prompts) - kept == len(other.bodies) - len(probe)
    assert sum(made.values()) == len(prompts)


def test_a_server_that_would_give_other_text_is_refused_among_others(serve, tokenizer, tmp_path):
    servers = [serve(), serve(takes=("ids",), misread=1)]
    with pytest.raises(UserError, match=f"{servers[1].url} reads a prompt"):
        fetched_of(servers, tokenizer, tmp_path / "out", text_prompts(tokenizer))
    with pytest.raises(UserError, match=f"--server {servers[0].url} is given twice"):
        fetched_of([servers[0], servers[0].url + "/v1/"], tokenizer, tmp_path / "out", text_prompts(tokenizer))
    assert not (tmp_path / "out").exists()


# ---- bounds


def begin(handler, status=200, **headers) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def refused(server, tokenizer, folder, url=None, **settings) -> str:
    with pytest.raises(UserError) as raised:
        fetch_rows(url or server.url, "t", tokenizer, text_prompts(tokenizer), folder, progress=False, **settings)
    return str(raised.value)


def test_an_endless_answer_is_cut_off(serve, tokenizer, tmp_path):
    sent = []

    def rogue(handler):
        begin(handler)
        for _ in range(200):
            handler.wfile.write(b"x" * (1 << 20))
            sent.append(1)

    assert "an answer of more than 1,081,344 bytes" in refused(serve(rogue=rogue), tokenizer, tmp_path)
    assert len(sent) < 20


@pytest.mark.parametrize("silent", ["headers", "body"])
def test_an_answer_that_drips_or_never_comes_is_not_waited_for(serve, tokenizer, tmp_path, monkeypatch, silent):
    monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.3)

    def rogue(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        if silent == "body":
            handler.wfile.write(b"x\r\nContent-Length: 1000\r\n\r\n")
        while not handler.server.gone.wait(0.05):
            handler.wfile.write(b"x")

    started = time.monotonic()
    assert "no whole answer within 0.3 seconds" in refused(serve(rogue=rogue), tokenizer, tmp_path)
    assert time.monotonic() - started < 5


def test_a_lost_answer_of_a_server_that_works_is_asked_for_once_more(serve, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.5)
    server, asked = serve(), []

    def rogue(handler):
        asked.append(1)
        if len(asked) == 5:
            server.gone.wait()
        handler.answer(server, server.bodies[-1][1])

    server.rogue = rogue
    check(fetched(server, tokenizer, tmp_path, concurrency=1), tokenizer, text_prompts(tokenizer))


def test_what_listens_and_says_nothing_is_no_server(serve, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        message = refused(None, tokenizer, tmp_path / "out", url)
    assert message == f"no server at {url}: no whole answer within 0.3 seconds"
    assert not (tmp_path / "out").exists()


def test_a_compressed_answer_is_not_opened(serve, tokenizer, tmp_path):
    """A gigabyte of zeros is a megabyte of gzip."""

    def rogue(handler):
        begin(handler, Content_Encoding="gzip", Content_Length="4")
        handler.wfile.write(b"bomb")

    assert "compresses its answers" in refused(serve(rogue=rogue), tokenizer, tmp_path)


def test_a_redirect_is_named_and_not_followed(serve, tokenizer, tmp_path):
    server = serve(rogue=lambda handler: begin(handler, 307, Location="http://elsewhere/v1", Content_Length="0"))
    assert "307, a redirect to http://elsewhere/v1: name that" in refused(server, tokenizer, tmp_path)


def test_tls_to_a_plain_port_is_one_line(serve, tokenizer, tmp_path):
    url = serve().url.replace("http", "https")
    assert refused(None, tokenizer, tmp_path, url).startswith(f"no server at {url}: ")


OK = {"text": "x", "finish_reason": "stop"}
ODD = [None, True, 0, -1, 1.5, "x", [], [1], {}, {"a": 1}, [[]], [{}], [None], "\ud800", [1.5], ["x"], [10**6], [-1]]
ODD += [[True], list(range(99)), "x" * 5000, {"content": [1]}, {"content": {"a": 1}}, 10**400]


def test_json_of_any_type_is_one_line(serve, tokenizer, tmp_path):
    answers = [*ODD, *({"choices": odd} for odd in ODD), *({"choices": [odd]} for odd in ODD)]
    answers += [{"choices": [{**OK, name: odd}]} for name in ("text", "token_ids", "message") for odd in ODD]
    answers += [{"choices": [OK], "usage": {"prompt_tokens": odd}} for odd in ODD]
    raw = [json.dumps(answer).encode() for answer in answers]
    raw += [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"NaN", b'{"choices": [NaN]}', b"9" * 5000]
    raw += [b"[" * depth + b"]" * depth for depth in range(880, 1000, 5)]  # what is read may be too deep to be shown
    body = []

    def rogue(handler):
        begin(handler, Content_Length=str(len(body[0])))
        handler.wfile.write(body[0])

    async def ask(client: module._Server) -> list[str]:
        said = []
        async with client.connection.client:
            client._forms, client._ends = {False: module._Form("ids", False)}, {False: 0}
            client.connection.reached = True
            for content in raw:
                body[:] = [content]
                try:
                    new = await client.ask(0, prompt, 0)
                    said.append("")
                except UserError as error:
                    new = [0]
                    said.append(str(error))
                # Nothing but a proper text or list of tokens may come of it.
                assert 0 < len(new) <= 8
                assert all(type(token) is int and 0 <= token < 300 for token in new)
        return said

    prompt = text_prompts(tokenizer)[0]
    client = module._Server(serve(rogue=rogue).url, "t", tokenizer, Sampling(0.0), 8)
    said = asyncio.run(ask(client))
    assert max(map(len, said)) < 400
    assert said.count("") < 80  # a usage, or token ids, that are none are passed over


def test_the_list_of_models_may_be_anything(serve, tokenizer, tmp_path, monkeypatch):
    content = []
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler.reply(200, content[0]))
    server = serve()

    async def probe(client: module._Server) -> None:
        async with client.connection.client:
            for odd in [*ODD, *({"data": odd} for odd in ODD), {"data": [{"id": 3}]}]:
                content[:] = [odd]
                await client.probe(text_prompts(tokenizer), 0)
                assert client._model == "target"

    asyncio.run(probe(module._Server(server.url, "target", tokenizer, Sampling(0.0), 8)))


@pytest.mark.parametrize("key", ["sk-very\nsecret", "sk-very secret", "sk-véry"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(serve, tokenizer, tmp_path, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    message = refused(serve(), tokenizer, tmp_path)
    assert "$OPENAI_API_KEY" in message
    assert "sk-" not in message


def test_a_key_is_stripped_and_never_shown_though_the_server_repeats_it(serve, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " sk-secret\n")
    seen = []

    def rogue(handler):
        seen.append(handler.headers["Authorization"])
        handler.reply(401, {"error": f"Incorrect API key provided: {seen[0]}, {handler.path}"})

    message = refused(serve(rogue=rogue), tokenizer, tmp_path)
    assert seen[0] == "Bearer sk-secret"
    assert "Incorrect API key provided: Bearer ***" in message
    assert "sk-secret" not in message


def test_a_password_in_the_url_is_used_and_not_shown(serve, tokenizer, tmp_path):
    seen = []

    def rogue(handler):
        seen.append(handler.headers["Authorization"])
        handler.reply(403, {"error": "not hunter2"})

    server = serve(rogue=rogue)
    message = refused(server, tokenizer, tmp_path, server.url.replace("//", "//me:hunter2@"))
    assert seen[0].startswith("Basic ")
    assert "403" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "--server is empty"),
        ("  ", "--server is empty"),
        ("localhost:8000", "not as http"),
        ("127.0.0.1", "not as http"),
        ("ftp://me:hunter2@host", "not as http"),
        ("http://", "not as http"),
        ("http://host:99999", "no port 99999"),
        ("http://host:x", "no URL"),
        ("http://host\x00", "no URL"),
        ("http://me:hunter2@host?key=x", r"no \? or #"),
        ("http://" + "a" * 100, "--server|no server"),
        ("http://[::1", "no URL"),
    ],
)
def test_what_is_no_url_is_one_line(tokenizer, tmp_path, url, message):
    with pytest.raises(UserError, match=message) as raised:
        fetch_rows(url, "t", tokenizer, text_prompts(tokenizer), tmp_path, progress=False)
    assert "hunter2" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_32_waiting_requests_at_once(serve, tmp_path, target_folder):
    server = serve()
    server.rogue = lambda handler: (
        handler.answer(server, server.bodies[-1][1]) if len(server.bodies) < 4 else server.gone.wait()
    )
    file, interrupted = tmp_path / "prompts.jsonl", []
    file.write_text("".join(json.dumps({"prompt": f"def f{n}"}) + "\n" for n in range(40)))

    def interrupt():
        while server.busy < 32:
            time.sleep(0.01)
        interrupted.append(time.monotonic())
        command.send_signal(signal.SIGINT)

    flags = ["--target", str(target_folder), "--server", server.url, "--prompts", str(file), "--max_new_tokens", "32"]
    argv = [sys.executable, "-m", "data", "generate", *flags, "--output", str(tmp_path / "out")]
    command = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL)
    threading.Thread(target=interrupt, daemon=True).start()
    assert command.wait(timeout=60) == 130
    assert time.monotonic() - interrupted[0] < 2


# ---- ends


def gemma_like(folder: Path, ends: list[int] | None):
    """EOS ends texts, and another token the turns of a chat."""
    made = tiny_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<turn>", "<end_of_turn>"]})
    made.chat_template = (
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}"
    )
    made.save_pretrained(folder)
    if ends:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("named", [True, False])
def test_a_chats_answer_ends_as_the_target_ends_its_turns(serve, tmp_path, named):
    eos, turn, end = 0, 300, 301
    tokenizer = gemma_like(tmp_path / "target", [eos, end] if named else None)
    assert tokenizer.convert_tokens_to_ids(["<eos>", "<turn>", "<end_of_turn>"]) == [eos, turn, end]
    for make, last in ((chat_prompts, end), (text_prompts, eos)):
        server = serve(takes=("messages", "text"), extended=False)
        server.tokenizer = tokenizer
        rows = fetched(server, tokenizer, tmp_path / make.__name__, make(tokenizer))
        assert {row["input_ids"][-1] for row in rows} == {last}


@pytest.mark.parametrize("content", ["[1]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [null]}', "null"])
def test_a_generation_config_that_is_none_leaves_the_template_to_say(tmp_path, content):
    tokenizer = gemma_like(tmp_path, None)
    (tmp_path / "generation_config.json").write_text(content)
    assert end_of_answer(tokenizer, [{"role": "user", "content": "x"}]) == 301
    assert end_of_answer(tokenizer, None) == 0
