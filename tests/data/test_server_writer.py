"""`data generate --server` against a stand-in that implements the OpenAI API, with the faults of real servers."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import forked
import openai
import pytest
from chat_templates import CHATML, chat_tokenizer
from conftest import tiny_tokenizer
from datasets import load_from_disk
from written import writing_of

from data.__main__ import main
from data.conversations import Answering
from data.mixture import mixture_of
from data.prompts import Cut, conversations
from data.writers import server as server_writer
from data.writers import writer_of
from data.writers.engine import EngineWriter
from data.writers.server import ServerWriter, TextOnly
from data.writing import Writing
from speculator import Sampling, UserError
from speculator.clients.connection import Connection
from speculator.prompts import Conversation

ROOT = Path(__file__).parents[2]
TEXTS = ["import os", "def f(x):", "class A:", "return", "for i in range(3):"]
HTML = b"<html>\r\n<h1>Bad Gateway</h1></html>"
PROBE = [200] * 2  # a prompt with two seeds


class StandIn(ThreadingHTTPServer):
    """Continues every prompt by a text that names its last characters and the seed.

    Args:
        token_ids: return the token ids of a completion.
        faults: status codes of the first answers; None closes the connection.
        samples: the text depends on the seed.
        delay: seconds for each answer.
        lists: GET /v1/models works; bytes: what it answers.
        reply: answers prompts instead, given the handler.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, token_ids=True, faults=(), samples=True, delay=0.0, lists=True, reply=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.token_ids, self.faults, self.samples, self.delay = token_ids, list(faults), samples, delay
        self.lists, self.reply, self.lock, self.gone = lists, reply, threading.Lock(), threading.Event()
        self.tokenizer = tiny_tokenizer()
        self.context, self.models = 1000, ["the-model"]
        self.bodies: list[dict] = []
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

    def reply(self, status: int, content) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if raw.startswith(b"<") else "application/json")
        self.send_header("Retry-After-Ms", "1")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        if isinstance(self.server.lists, bytes):
            self.reply(200, self.server.lists)
        elif self.server.lists:
            # As in vLLM, whose cards of adapters lack the length.
            length = {"max_model_len": self.server.context}
            cards = [{"id": each, **(length if each != "mine" else {})} for each in self.server.models]
            self.reply(200, {"data": cards})
        else:
            self.reply(500, {"error": "no cache folder to list"})

    def do_POST(self):
        server: StandIn = self.server
        self.body = body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
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
            elif server.reply:
                server.reply(self)
            else:
                self.answer(server, body)
        finally:
            with server.lock:
                server.busy -= 1

    def answer(self, server: StandIn, body: dict) -> None:
        ids = body["prompt"]
        text = continuation(server.tokenizer.decode(ids), body["seed"] if server.samples else 0)
        tokens = [*server.tokenizer(text)["input_ids"], 0]
        reason = "stop" if len(tokens) <= body["max_tokens"] else "length"
        tokens = tokens[: body["max_tokens"]]
        choice = {"text": server.tokenizer.decode(tokens, skip_special_tokens=True), "finish_reason": reason}
        if server.token_ids and body["return_token_ids"]:
            choice["token_ids"] = tokens
        self.reply(200, {"choices": [choice], "usage": {"prompt_tokens": len(ids)}})


def continuation(prompt: str, seed: int) -> str:
    return f" of seed {seed} behind {prompt[-6:]!r}"


@pytest.fixture
def serve(monkeypatch):
    """Starts stand-ins."""
    monkeypatch.setattr(server_writer, "_RETRIES", 2)
    monkeypatch.setattr(server_writer, "_AWAY_SECONDS", 0)
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
    return tiny_tokenizer()


def text_prompts(tokenizer) -> list[Conversation]:
    return [Conversation(tokenizer(text)["input_ids"]) for text in TEXTS]


def served(tokenizer, urls, name="target", context_length=sys.maxsize) -> TextOnly:
    return TextOnly(name=name, tokenizer=tokenizer, context_length=context_length, urls=urls)


def fetched(servers, tokenizer, folder, prompts=None, **settings) -> list[dict]:
    settings = {"concurrency": 2, "seed": 7, **settings}
    urls = [each if isinstance(each, str) else each.url for each in servers]
    writer = ServerWriter(served(tokenizer, urls), settings.pop("concurrency"))
    return list(writer.write(prompts or text_prompts(tokenizer), folder, writing_of(settings)))


def error_of(server, tokenizer, folder, **settings) -> str:
    with pytest.raises(UserError) as raised:
        fetched([server], tokenizer, folder, **settings)
    return str(raised.value)


def test_prompts_beyond_the_servers_context_are_skipped_and_counted(serve, tokenizer, tmp_path, capsys):
    server, prompts = serve(), text_prompts(tokenizer)
    lengths = [len(prompt.ids) for prompt in prompts]
    server.context = 16 + max(lengths) - 1
    rows = fetched([server], tokenizer, tmp_path / "some", max_new_tokens=16)
    assert len(rows) == sum(length < max(lengths) for length in lengths) < len(prompts)
    assert manifest(tmp_path / "some")["skipped"] == len(prompts) - len(rows)
    left_out = len(prompts) - len(rows)
    assert re.search(rf"{left_out} of 5 prompts end .* prompt \d has more than .* no room", capsys.readouterr().err)
    server.context, asked = 16, len(server.bodies)
    assert f"all {len(prompts)} prompts have more than 0 tokens" in error_of(
        server, tokenizer, tmp_path / "none", max_new_tokens=16
    )
    assert len(server.bodies) <= asked + 2, "the check of two seeds alone"


def test_a_first_turn_that_a_server_refuses_gives_no_row(serve, tokenizer, tmp_path, capsys):
    server, prompts = serve(lists=False), text_prompts(tokenizer)
    server.reply = lambda handler: (
        handler.reply(400, {"error": {"message": "too long"}})
        if handler.body["prompt"] == prompts[2].ids
        else handler.answer(server, handler.body)
    )
    rows = fetched([server], tokenizer, tmp_path / "out", prompts)
    asked = [row["input_ids"][: row["loss_mask"].index(1)] for row in rows]
    assert asked == [prompt.ids for prompt in prompts[:2] + prompts[3:]]
    assert manifest(tmp_path / "out")["skipped"] == 1
    assert "1 of 5 prompts end before an answer that failed, such as: prompt 3: " in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [(500, "not_finite"), (400, "out_of_memory")])
def test_an_answer_that_fails_alone_gives_no_row_and_its_server_stays(serve, tokenizer, tmp_path, status, code):
    server, prompts = serve(), text_prompts(tokenizer)
    server.reply = lambda handler: (
        handler.reply(status, {"error": {"message": "failed", "code": code}})
        if handler.body["prompt"] == prompts[2].ids
        else handler.answer(server, handler.body)
    )
    rows = fetched([server], tokenizer, tmp_path / "out", prompts)
    assert [row["input_ids"][: row["loss_mask"].index(1)] for row in rows] == [
        each.ids for each in prompts if each != prompts[2]
    ]
    assert manifest(tmp_path / "out")["skipped"] == 1


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def check(rows, tokenizer, prompts, seed=7) -> None:
    """Every row is its prompt, the text of its own seed, and EOS."""
    assert len(rows) == len(prompts)
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        count = len(prompt.ids)
        assert row["input_ids"][:count] == prompt.ids
        assert row["loss_mask"] == [0] * count + [1] * (len(row["input_ids"]) - count)
        expected = continuation(tokenizer.decode(prompt.ids), seed + index)
        assert tokenizer.decode(row["input_ids"][count:]) == expected + "<eos>"


@pytest.mark.parametrize("token_ids", [True, False])
def test_completions_become_rows_with_or_without_token_ids(serve, tokenizer, tmp_path, token_ids):
    server, prompts = serve(token_ids=token_ids), text_prompts(tokenizer)
    check(fetched([server], tokenizer, tmp_path, prompts), tokenizer, prompts)


def test_samplers_are_sent_to_the_server(serve, tokenizer, tmp_path):
    server, sampling = serve(), Sampling(0.7, top_k=5, top_p=0.9, min_p=0.1)
    fetched([server], tokenizer, tmp_path, samplings=(sampling,), max_new_tokens=9)
    body = server.bodies[-1]
    keys = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "model")
    assert [body[key] for key in keys] == [0.7, 5, 0.9, 0.1, 9, "the-model"]


@pytest.mark.parametrize("lists", [False, b"", b"null", b'{"data": [null]}', HTML])
def test_a_server_that_lists_no_models_is_asked_for_the_target(serve, tokenizer, tmp_path, lists):
    server = serve(lists=lists)
    assert ServerWriter(served(tokenizer, [server.url])).shortest_context() == sys.maxsize
    fetched([server], tokenizer, tmp_path)
    assert server.bodies[-1]["model"] == "target"


def test_passing_faults_are_retried(serve, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(server_writer, "_RETRIES", 6)  # one row may meet all faults
    prompts = text_prompts(tokenizer)
    server = serve(faults=[503, 429, 200, 500, 200, 200, 502, 200, 429, 200, None, 200])
    check(fetched([server], tokenizer, tmp_path, prompts), tokenizer, prompts)
    assert not server.faults


@pytest.mark.parametrize("body", [{"error": {"message": "not now"}}, HTML, b""])
@pytest.mark.parametrize("fault", [503, 502, 429, 401, 404])
def test_a_lasting_fault_fails_in_one_line(serve, tokenizer, tmp_path, fault, body):
    server = serve(reply=lambda handler: handler.reply(fault, body))
    message = error_of(server, tokenizer, tmp_path / "out").removeprefix("prompt 1: ").removeprefix(server.url)
    assert str(fault) in message
    assert "\n" not in message
    assert not (tmp_path / "out").exists()


def test_a_status_is_shown_where_the_clients_text_lacks_it():
    """openai 2 shows no more of a page than its text."""
    response = SimpleNamespace(request=None, status_code=502, headers={})
    error = openai.InternalServerError("<html>\n<h1>Bad Gateway</h1>", response=response, body=None)
    connection = Connection("http://host", "--server", openai.OpenAI)
    assert connection.describe(error) == "http://host: Error code: 502 - <html>"


def test_a_server_that_never_answers_is_an_error(serve, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(server_writer, "_REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(server_writer, "_TOKEN_SECONDS", 0)
    server = serve()
    server.reply = lambda handler: server.gone.wait()
    assert server.url in error_of(server, tokenizer, tmp_path)


def test_requests_run_concurrently_up_to_the_limit(serve, tokenizer, tmp_path, monkeypatch):
    server = serve(delay=0.02)
    prompts, begun = text_prompts(tokenizer) * 8, []

    def answering(*arguments):
        begun.append(len(server.bodies))
        return Answering(*arguments)

    monkeypatch.setattr("data.writers.base.Answering", answering)
    check(fetched([server], tokenizer, tmp_path, prompts, concurrency=4), tokenizer, prompts)
    assert server.most == 4
    assert begun[-1] > begun[0], "what a row holds is made before its turn"


def test_a_server_that_does_not_sample_is_an_error_at_a_warm_temperature(serve, tokenizer, tmp_path):
    assert "sample" in error_of(serve(samples=False), tokenizer, tmp_path / "warm")
    assert fetched([serve(samples=False)], tokenizer, tmp_path / "cold", samplings=(Sampling(0.1),))


def test_a_fine_tune_that_knows_its_prompts_and_a_top_k_of_1_are_no_sign_of_a_server_that_does_not_sample(
    serve, tokenizer, tmp_path
):
    """Prompts and their beginnings, such as a system prompt, are continued in one way, whatever the seed."""
    whole = [prompt.ids for prompt in text_prompts(tokenizer)]

    def label(handler):
        body = json.loads(json.dumps(handler.server.bodies[-1]))
        known = any(ids[: len(body["prompt"])] == body["prompt"] for ids in whole)
        greedy = known or body["top_k"] == 1
        handler.answer(handler.server, body | {"seed": 0 if greedy else body["seed"]})

    how = {"samplings": (Sampling(1.0, top_k=1),), "concurrency": 1}
    assert fetched([serve(reply=label)], tokenizer, tmp_path / "rows", **how)


def test_rows_share_temperatures_and_the_warm_ones_must_sample(serve, tokenizer, tmp_path):
    server, both = serve(), (Sampling(0.0), Sampling(1.0))
    fetched([server], tokenizer, tmp_path / "rows", samplings=both, concurrency=1)
    writing = Writing(samplings=both)
    asked = {tuple(chat.ids): writing.sampling(row, 5).temperature for row, chat in enumerate(text_prompts(tokenizer))}
    assert [body["temperature"] for body in server.bodies[:2]] == [1.0, 1.0]
    assert {tuple(body["prompt"]): body["temperature"] for body in server.bodies[2:]} == asked
    assert "sample" in error_of(serve(samples=False), tokenizer, tmp_path / "error", samplings=both)


def test_a_server_of_many_rows_is_probed_at_once(serve, tokenizer, monkeypatch):
    rows, sampling = [], Writing.sampling
    monkeypatch.setattr(Writing, "sampling", lambda self, row, count: rows.append(row) or sampling(self, row, count))
    writing = writing_of({"samplings": (Sampling(0.0), Sampling(1.0))})
    asyncio.run(server_writer._TextServer(serve().url, "target", tokenizer, writing).probe(10**5))
    assert len(rows) == 8


def test_a_server_writes_the_chats_of_self(serve, tmp_path, target_folder):
    server = serve(delay=0.02)
    flags = ["--target", str(target_folder), "--server", server.url, "--sources", "self", "--max_rows", "6"]
    flags += ["--batch_size", "3"]
    flags += ["--max_prompt_tokens", "16", "--max_new_tokens", "20", "--temperature", "0", "1"]
    assert main(["generate", *flags, "--output", str(tmp_path / "out")]) == 0
    rows = load_from_disk(str(tmp_path / "out" / "rows"))
    answers = [body for body in server.bodies if body["max_tokens"] == 20]
    assert server.most == 3
    assert {body["temperature"] for body in answers} == {0.0, 1.0}
    for row in rows:
        prompt = row["input_ids"][: row["loss_mask"].index(1)]
        assert any(body["prompt"] == prompt for body in answers)


def test_without_a_server_no_chats_of_self_are_begun(tmp_path, target_folder, capsys):
    flags = ["--target", str(target_folder), "--server", "http://127.0.0.1:9", "--sources", "self", "--max_rows", "6"]
    flags += ["--max_prompt_tokens", "16", "--max_new_tokens", "20", "--output", str(tmp_path / "out")]
    assert main(["generate", *flags]) == 2
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_target_decides_who_writes(target, tokenizer):
    engine = writer_of(target, 4)
    assert isinstance(engine, EngineWriter)
    assert engine.batch_size == 4
    sizes = [writer_of(served(tokenizer, ["http://host"]), *given).batch_size for given in ((4,), (40,), (4, 5))]
    assert sizes == [32, 40, 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_server_that_refuses_every_prompt_is_an_error(serve, tokenizer, tmp_path, temperature):
    message = error_of(serve(faults=[400] * 99), tokenizer, tmp_path / "out", samplings=(Sampling(temperature),))
    assert re.match(r"prompt \d: ", message)
    assert not (tmp_path / "out").exists()


def test_prompts_that_are_all_refused_are_an_error(serve, tokenizer, tmp_path):
    message = error_of(serve(faults=[*PROBE, *[400] * 99], lists=False), tokenizer, tmp_path / "out")
    assert f"{tmp_path / 'out'}: no prompt was answered" in message
    for kept in (0, 2):
        server = serve(faults=[*PROBE, *[200] * kept, *[400] * 99])
        told = error_of(server, tokenizer, tmp_path / f"told {kept}", concurrency=1)
        assert re.match(r"prompt \d: ", told), (
            "a prompt that fits the context was refused for another reason, and is not lost"
        )
        assert told.endswith("; the same command resumes") == bool(kept)


def test_a_finished_folder_is_read_without_a_request(serve, tokenizer, tmp_path):
    server = serve()
    first = fetched([server], tokenizer, tmp_path)
    asked = len(server.bodies)
    assert fetched([server], tokenizer, tmp_path) == first
    assert len(server.bodies) == asked


def test_a_killed_run_requests_only_the_missing_rows(serve, tokenizer, tmp_path, target_folder):
    server = serve(delay=0.05)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    texts = [f"{text}  # {number}" for number in range(6) for text in TEXTS]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    flags = ["--target", str(target_folder), "--server", server.url + "/v1", "--prompts", str(file)]
    flags += ["--max_new_tokens", "32", "--batch_size", "2"]
    command = ["-m", "data", "generate", *flags, "--output", str(output)]
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    process = forked.Popen(command, environment)
    while len(kept := list((output / "batches").glob("0*.json"))) < 5:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    asked = len(server.bodies)
    assert main(command[2:]) == 0
    assert len(server.bodies) - asked <= len(texts) - 2 * len(kept) + len(PROBE)
    prompts = [Conversation(tokenizer(text)["input_ids"]) for text in texts]
    check(list(load_from_disk(output / "rows")), tokenizer, prompts, seed=0)
    assert json.loads((output / "manifest.json").read_text())["rows"] == len(texts)


def test_a_resumed_run_may_have_another_concurrency(serve, tokenizer, tmp_path):
    prompts, server = text_prompts(tokenizer) * 4, serve(delay=0.02)
    with pytest.raises(UserError, match="503"):
        fetched([serve(faults=PROBE + [200] * 9 + [503] * 99)], tokenizer, tmp_path, prompts, concurrency=4)
    check(fetched([server], tokenizer, tmp_path, prompts, concurrency=2), tokenizer, prompts)
    assert server.most == 2
    check(fetched([server], tokenizer, tmp_path, prompts, concurrency=8), tokenizer, prompts)


@pytest.mark.parametrize(
    "change", [lambda token: 99999, lambda token: (token + 1) % 200], ids=["beyond the vocabulary", "of other texts"]
)
def test_token_ids_of_another_model_end_the_run(serve, tokenizer, tmp_path, change, capsys):
    fault = "the texts of the-model are not what the tokenizer of target makes of its "

    def reply(handler):
        ids = [*handler.server.tokenizer(continuation("def f", handler.body["seed"]))["input_ids"], 0]
        text = handler.server.tokenizer.decode(ids, skip_special_tokens=True)
        choice = {"text": text, "token_ids": [change(each) for each in ids], "finish_reason": "stop"}
        handler.reply(200, {"choices": [choice], "usage": {"prompt_tokens": 1}})

    with pytest.raises(UserError, match=fault):
        fetched([serve(reply=reply)], tokenizer, tmp_path)
    assert "the-model answers, the server's only model, for target" in capsys.readouterr().err


def test_tokens_that_pad_the_vocabulary_are_part_of_an_answer(serve, tokenizer, tmp_path):
    """Targets have more tokens than their tokenizers; the server's text lacks them."""

    def reply(handler):
        ids = [*handler.server.tokenizer(continuation("def f", handler.body["seed"]))["input_ids"], 0]
        text = handler.server.tokenizer.decode(ids, skip_special_tokens=True)
        choice = {"text": text, "token_ids": [*ids[:-1], len(handler.server.tokenizer), 0], "finish_reason": "stop"}
        handler.reply(200, {"choices": [choice], "usage": {"prompt_tokens": 1}})

    rows = fetched([serve(reply=reply)], tokenizer, tmp_path)
    assert [row["input_ids"][-2:] for row in rows] == [[len(tokenizer), 0]] * len(TEXTS)


def test_an_adapter_that_a_server_lists_is_asked_by_name(serve, tmp_path, target_folder, capsys):
    server, file = serve(), tmp_path / "prompts.jsonl"
    server.models = [str(target_folder), "mine"]
    file.write_text('{"prompt": "def f"}\n')
    flags = ["--target", str(target_folder), "--server", server.url, "--prompts", str(file), "--max_new_tokens", "8"]
    for name, more in ((str(target_folder), []), ("mine", ["--adapter", "mine"])):
        out = tmp_path / Path(name).name
        assert main(["generate", *flags, *more, "--output", str(out)]) == 0
        assert server.bodies[-1]["model"] == name
        assert manifest(out)["models"] == [name]
        assert f"{name} answers, of the models " in capsys.readouterr().err
    server.models = ["the-model"]
    server.bodies.clear()
    own = ["--sources", "self", "--max_rows", "2", "--max_prompt_tokens", "8", "--max_new_tokens", "8"]
    assert main(["generate", *flags[:4], *own, "--adapter", "mine", "--output", str(tmp_path / "self")]) == 0
    assert {body["model"] for body in server.bodies} == {"mine"}, "and not the only one that is listed"


def test_servers_share_the_rows(serve, tokenizer, tmp_path):
    servers, prompts = [serve(delay=0.02), serve(delay=0.02)], text_prompts(tokenizer) * 6
    rows = fetched(servers, tokenizer, tmp_path / "two", prompts, concurrency=3)
    assert rows == fetched(servers[:1], tokenizer, tmp_path / "one", prompts, concurrency=3)
    check(rows, tokenizer, prompts)
    assert [server.most for server in servers] == [3, 3]
    made = manifest(tmp_path / "two")["servers"]
    assert sum(made.values()) == len(prompts)
    assert min(made[server.url] for server in servers) >= 6


@pytest.mark.parametrize("fault", [None, 503])
def test_other_servers_take_over_the_rows_of_one_that_dies(serve, tokenizer, tmp_path, capsys, fault):
    dying, other = serve(faults=PROBE + [200] * 4 + [fault] * 1000), serve(delay=0.01)
    prompts = text_prompts(tokenizer) * 4
    check(fetched([dying, other], tokenizer, tmp_path, prompts), tokenizer, prompts)
    assert manifest(tmp_path)["servers"] == {dying.url: 4, other.url: len(prompts) - 4}
    assert len(re.findall(f"warning: .*{dying.url}", capsys.readouterr().err)) == 1


def test_a_missing_server_is_dropped_or_an_error_if_it_is_the_only_one(serve, tokenizer, tmp_path, capsys):
    server, prompts, missing = serve(), text_prompts(tokenizer), "http://127.0.0.1:9"
    check(fetched([missing, server], tokenizer, tmp_path / "one", prompts), tokenizer, prompts)
    assert f"no server at {missing}" in capsys.readouterr().err
    assert f"no server at {missing}" in error_of(missing, tokenizer, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_rows_are_kept_for_another_server_when_all_have_died(serve, tokenizer, tmp_path):
    dying = [serve(faults=PROBE + [200] * 4 + [503] * 1000) for _ in range(2)]
    prompts = text_prompts(tokenizer) * 4
    with pytest.raises(UserError, match="503"):
        fetched(dying, tokenizer, tmp_path, prompts)
    kept = 2 * len(list((tmp_path / "batches").glob("0*.json")))
    assert kept
    other = serve()
    check(fetched([other], tokenizer, tmp_path, prompts), tokenizer, prompts)
    made = manifest(tmp_path)["servers"]
    assert made[other.url] == len(prompts) - kept == len(other.bodies) - len(PROBE)
    assert sum(made.values()) == len(prompts)


@pytest.mark.parametrize(
    "answer", [None, b"", HTML, [], "x", {}, {"choices": []}, {"choices": [None]}, {"choices": [{"text": 5}]}]
)
def test_an_answer_in_another_format_fails_in_one_line(serve, tokenizer, tmp_path, answer):
    server = serve(reply=lambda handler: handler.reply(200, answer))
    assert server.url in error_of(server, tokenizer, tmp_path)


def test_key_and_password_are_sent_and_never_shown(serve, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " sk-secret\n")
    sent = []

    def reply(handler):
        sent.append(handler.headers["Authorization"])
        handler.reply(401, {"error": f"Incorrect API key provided: {sent[-1]}, hunter2"})

    server = serve(reply=reply)
    assert "sk-secret" not in error_of(server, tokenizer, tmp_path)
    message = error_of(server.url.replace("//", "//me:hunter2@"), tokenizer, tmp_path)
    assert "401" in message
    assert "hunter2" not in message
    assert sent[0] == "Bearer sk-secret"


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:99999", "http://[::1"])
def test_a_wrong_url_fails_in_one_line(tokenizer, tmp_path, url):
    assert "server" in error_of(url, tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_32_waiting_requests_at_once(serve, tmp_path, target_folder):
    server = serve()
    server.reply = lambda handler: (
        handler.answer(server, server.bodies[-1]) if len(server.bodies) < 4 else server.gone.wait()
    )
    file, interrupted = tmp_path / "prompts.jsonl", []
    file.write_text("".join(json.dumps({"prompt": f"def f{n}"}) + "\n" for n in range(40)))

    def interrupt():
        while server.busy < 32:
            time.sleep(0.01)
        interrupted.append(time.monotonic())
        command.send_signal(signal.SIGINT)

    flags = ["--target", str(target_folder), "--server", server.url, "--prompts", str(file), "--max_new_tokens", "32"]
    command = forked.Popen(["-m", "data", "generate", *flags, "--output", str(tmp_path / "out")])
    threading.Thread(target=interrupt, daemon=True).start()
    assert command.wait(timeout=60) == 130
    assert time.monotonic() - interrupted[0] < 2


def test_a_chat_ends_with_the_end_of_turn_of_its_template(serve, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<end_of_turn>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}"
    )
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    render = tokenizer.apply_chat_template
    prompts = [Conversation(render(chat, add_generation_prompt=True)["input_ids"], chat, chat=True) for chat in chats]
    tokens = [Conversation(prompt.ids, completion=True) for prompt in prompts]  # as of prepared rows, and of self
    kinds = {"chats": prompts, "tokens": tokens, "texts": text_prompts(tokenizer)}
    for name, given in kinds.items():
        last = "<eos>" if name == "texts" else "<end_of_turn>"
        server = serve(token_ids=False)
        server.tokenizer = tokenizer
        rows = fetched([server], tokenizer, tmp_path / name, given)
        assert {tokenizer.decode(row["input_ids"][-1]) for row in rows} == {last}
        assert manifest(tmp_path / name)["cut"] == 0
    fetched([server], tokenizer, tmp_path / "cut", prompts, max_new_tokens=2)
    assert manifest(tmp_path / "cut")["cut"] == len(prompts)


@pytest.fixture(scope="module")
def chats_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = [("user", "Hi"), ("assistant", "old"), ("user", "Go on"), ("assistant", "old"), ("user", "Bye")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = [{"messages": [{"role": "system", "content": str(number)}, *messages]} for number in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_another_server_continues_the_chats_of_one_that_is_lost(serve, chats_file, tmp_path, monkeypatch):
    monkeypatch.setattr(server_writer, "_RETRIES", 0)
    tokenizer = chat_tokenizer("qwen3", CHATML)
    chats, _ = conversations(mixture_of([str(chats_file)]), None, tokenizer, Cut(8), 99)
    servers = [serve(), serve(faults=[200] * 9 + [503] * 1000)]
    both = fetched(servers, tokenizer, tmp_path / "both", chats, concurrency=4)
    assert both == fetched(servers[:1], tokenizer, tmp_path / "one", chats, concurrency=4)
    manifest = json.loads((tmp_path / "both" / "manifest.json").read_text())
    assert manifest["answers"] == sum(manifest["servers"].values()) == 30
    assert set(manifest["servers"]) == {server.url for server in servers}


def test_a_turn_that_the_server_refuses_ends_its_chat(serve, chats_file, tmp_path, capsys):
    tokenizer = chat_tokenizer("qwen3", CHATML)
    chats, _ = conversations(mixture_of([str(chats_file)]), None, tokenizer, Cut(8), 99)
    longest = max(len(chat.ids) for chat in chats)

    def reply(handler):
        if len(handler.body["prompt"]) > longest:
            handler.reply(400, {"error": {"message": "the prompt is too long"}})
        else:
            handler.answer(handler.server, handler.body)

    rows = fetched([serve(lists=False, reply=reply)], tokenizer, tmp_path / "out", chats, concurrency=1)
    assert len(rows) == len(chats)
    assert manifest(tmp_path / "out")["answers"] == len(chats), "the first answer of each chat is kept"
    assert all(row["loss_mask"][-1] for row in rows), "and nothing after it"
    assert "10 of 10 prompts end before an answer that failed, such as: prompt " in capsys.readouterr().err


def test_a_busy_server_is_not_dropped(serve, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(server_writer, "_REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(server_writer, "_TOKEN_SECONDS", 0)
    waited = []

    def reply(handler):
        if len(server.bodies) > 4 and not waited:  # one request starves while others are answered
            waited.append(True)
            time.sleep(1)
        handler.answer(server, handler.body)

    server, prompts = serve(delay=0.02), text_prompts(tokenizer) * 16
    server.reply = reply
    check(fetched([server], tokenizer, tmp_path, prompts), tokenizer, prompts)
    assert waited


def test_concurrent_answers_without_token_ids_all_keep_their_special_tokens(serve, tokenizer, tmp_path, monkeypatch):
    """The first answers arrive together, before it is known that the server gives no ids."""

    async def probe(*_):
        pass

    monkeypatch.setattr(server_writer._TextServer, "probe", probe)
    server, prompts = serve(token_ids=False, delay=0.05), text_prompts(tokenizer) * 2
    fetched([server], tokenizer, tmp_path, prompts, samplings=(Sampling(0.0),), concurrency=4)
    whole = [tuple(body["prompt"]) for body in server.bodies if body.get("skip_special_tokens") is False]
    assert sorted(whole) == sorted(tuple(prompt.ids) for prompt in prompts)


def test_the_last_server_may_be_away_for_a_while(serve, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(server_writer, "_RETRIES", 0)
    monkeypatch.setattr(server_writer, "_AWAY_SECONDS", 60)
    server, prompts = serve(faults=PROBE + [200] * 3 + [503] * 9), text_prompts(tokenizer) * 4
    check(fetched([server], tokenizer, tmp_path, prompts), tokenizer, prompts)
    assert capsys.readouterr().err.count("waiting for it, at most 1 minutes") == 1


def test_turns_limits_the_answers_of_a_chat(serve, chats_file, tmp_path):
    chat_tokenizer("qwen3", CHATML).save_pretrained(tmp_path / "target")
    flags = ["--target", str(tmp_path / "target"), "--server", serve().url, "--sources", str(chats_file)]
    counts = []
    for turns in (["--turns", "1"], ["--turns", "2"], ["--turns", "all"], []):
        out = tmp_path / "-".join(["out", *turns])
        assert main(["generate", *flags, *turns, "--output", str(out)]) == 0
        counts.append(json.loads((out / "manifest.json").read_text())["answers"])
    assert counts == [counts[0] * factor for factor in (1, 2, 3, 3)]
