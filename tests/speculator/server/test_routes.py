"""Answers and errors of the routes."""

import asyncio
import json
import math
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from chat_targets import CHATML
from chat_templates import QWEN3, chat_tokenizer
from encoder_decoders import tiny_encoder_decoder
from serving_here import outputs, serving, until
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from speculator import Engine, NgramDrafter, Sampling, Target, generate
from speculator.acceptance import Acceptance
from speculator.chat import set_template_variables
from speculator.clients.counters import read_acceptance
from speculator.decoding.streaming import decode
from speculator.server import app
from speculator.server.app import create_app
from speculator.server.errors import APIError
from speculator.server.metrics import Metrics, Traffic
from speculator.server.responses import ChatWriter, CompletionWriter
from speculator.server.schema import ChatRequest, CompletionRequest, parse
from speculator.server.worker import StepOutput, Worker

PROMPT = [5, 6, 7, 8]
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]


def events(response: httpx.Response) -> list[dict]:
    """Events of a stream before its [DONE]."""
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_completion_is_the_text_of_generate(client, chat_target, drafter, temperature):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": temperature, "seed": 3, "return_token_ids": True}
    expected = generate(chat_target, drafter, [PROMPT], Sampling(temperature, seed=3), max_new_tokens=12).tokens[0]
    whole = client.post("/v1/completions", json=body).json()
    (choice,) = whole["choices"]
    assert choice["token_ids"] == expected
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == decode(chat_target.tokenizer, expected)
    assert choice["finish_reason"] == ("length" if len(expected) == 12 else "stop")
    assert whole["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": len(expected),
        "total_tokens": 4 + len(expected),
    }
    parts = events(client.post("/v1/completions", json=body | {"stream": True}))
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == expected
    assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
    assert parts[0]["choices"][0]["prompt_token_ids"] == PROMPT
    assert [part["choices"][0]["finish_reason"] for part in parts][-1] == choice["finish_reason"]


def test_a_stop_string_ends_the_text_before_it(client, chat_target, drafter):
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = next(text[i : i + 2] for i in range(5, len(text)) if text[i : i + 2].isascii())
    expected = generate(chat_target, drafter, [PROMPT], max_new_tokens=40, stop_strings=[stop]).tokens[0]
    for given in (stop, ["nowhere", stop]):
        (choice,) = client.post("/v1/completions", json=body | {"stop": given}).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
        assert choice["token_ids"] == expected
        parts = events(client.post("/v1/completions", json=body | {"stop": given, "stream": True}))
        assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_target_at_temperature_1(client, chat_target, stream):
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0.7, "seed": 1, "logprobs": 3, "stream": stream}
    response = client.post("/v1/completions", json=body | {"return_token_ids": True})
    choices = [part["choices"][0] for part in (events(response) if stream else [response.json()])]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    given = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    tops = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
    names = [name for choice in choices for name in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    with torch.no_grad():
        logits = chat_target.model(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0]
    expected = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert given == pytest.approx([float(row[token]) for row, token in zip(expected, tokens, strict=True)])
    assert names == [chat_target.tokenizer.decode([token]) for token in tokens]
    text = "".join(choice["text"] for choice in choices)
    for name, offset in zip(names, offsets, strict=True):  # a part of a character has no text of its own
        assert text[offset:].startswith(name) or "\ufffd" in name
    for name, top, value, row in zip(names, tops, given, expected, strict=True):
        assert max(top.values()) == pytest.approx(float(row.max()))
        assert 1 <= len(top) <= 4
        assert top[name] >= value, "of tokens with one text the likeliest"


def test_a_chat_is_rendered_as_generate_renders_it(client, chat_target, drafter):
    ids = chat_target.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    expected = generate(chat_target, drafter, [ids], max_new_tokens=9).tokens[0]
    body = {"messages": CHAT, "max_completion_tokens": 9, "temperature": 0, "return_token_ids": True}
    for messages in (CHAT, [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]):
        whole = client.post("/v1/chat/completions", json=body | {"messages": messages}).json()
        assert whole["prompt_token_ids"] == ids
        assert whole["choices"][0]["token_ids"] == expected
        message = {"role": "assistant", "content": decode(chat_target.tokenizer, expected)}
        assert whole["choices"][0]["message"] == message
    asked = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
    parts = events(client.post("/v1/chat/completions", json=body | asked))
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parts[0]["prompt_token_ids"] == ids
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts[:-1]) == message["content"]
    assert all(part["usage"] is None for part in parts[:-1])
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == len(expected)
    asked["stream_options"]["continuous_usage_stats"] = True
    counted = events(client.post("/v1/chat/completions", json=body | asked))
    sizes = [len(part["choices"][0].get("token_ids", ())) for part in counted[:-1]]
    assert [part["usage"]["completion_tokens"] for part in counted[:-1]] == list(accumulate(sizes))
    scored = [each for part in parts[1:-1] for each in part["choices"][0]["logprobs"]["content"]]
    for each in scored:  # the bytes of a part of a character are not known
        assert each["bytes"] == (None if "\ufffd" in each["token"] else list(each["token"].encode()))
    assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] for each in scored), "greedy takes the likeliest"


def test_no_event_precedes_the_first_token(chat_target):
    """Benchmarks take the time of the first event for that of the first token."""
    released = threading.Event()

    class Held(Engine):
        def step(self, *arguments):
            released.wait(10)
            return super().step(*arguments)

    body = {"messages": CHAT, "max_tokens": 2, "stream": True}
    with (
        serving(chat_target, engine=Held) as (url, _),
        httpx.Client(base_url=url, timeout=20) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        timer = threading.Timer(0.3, released.set)
        timer.start()
        next(response.iter_lines())
        assert released.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_ignore_eos_and_min_tokens_hold_the_end_back(chat_target, drafter, stream):
    """The target's fifth token is made its EOS: it ends an answer, or does not, or is not sampled."""
    plain = generate(chat_target, drafter, [PROMPT], max_new_tokens=30, eos_token_ids=()).tokens[0]
    end = plain[4]
    ended = plain[: plain.index(end) + 1]
    target = Target(chat_target.model, chat_target.tokenizer)
    target.model.generation_config.eos_token_id, before = [end], target.model.generation_config.eos_token_id
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "return_token_ids": True, "stream": stream}

    def tokens(**fields):
        response = client.post("/v1/completions", json=body | fields)
        parts = events(response) if stream else [response.json()]
        return [token for part in parts for token in part["choices"][0]["token_ids"]]

    try:
        with serving(target, drafter) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
            assert tokens() == ended
            assert tokens(ignore_eos=True) == plain
            for fields in ({}, {"ignore_eos": True}, {"temperature": 0.8, "seed": 1}):
                held = tokens(min_tokens=25, **fields)
                assert len(held) >= 25
                assert not set(held[:25]) & target.eos_token_ids
    finally:
        target.model.generation_config.eos_token_id = before


def test_variables_of_a_request_reach_the_chat_template(chat_target):
    tokenizer = chat_tokenizer("qwen3", "{{ style }}{{ reasoning_effort }}" + chat_target.tokenizer.chat_template)
    body = {"messages": CHAT, "max_tokens": 1, "return_token_ids": True}
    set_template_variables(tokenizer, {"style": "a"})
    with (
        serving(Target(chat_target.model, tokenizer)) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for fields, style in (
            ({}, "a"),
            ({"chat_template_kwargs": {"style": "b"}}, "b"),
            ({"reasoning_effort": "low"}, "alow"),
        ):
            ids = client.post("/v1/chat/completions", json=body | fields).json()["prompt_token_ids"]
            assert tokenizer.decode(ids).startswith(style + "<|im_start|>")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
THOUGHT, CALL = "<think>\nHm.\n</think>\n\n", '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "message", "reason"),
    [
        ({}, THOUGHT + "1.", {"content": "1.", "reasoning": "Hm."}, "stop"),
        ({"tools": [TOOL]}, THOUGHT + CALL, {"content": None, "reasoning": "Hm.", "tool_calls": "f"}, "tool_calls"),
        ({"tools": [TOOL], "tool_choice": "none"}, CALL, {"content": CALL}, "stop"),
        ({}, THOUGHT + CALL, {"content": CALL, "reasoning": "Hm."}, "stop"),
        ({"stop": "2."}, THOUGHT + "1. 2.", {"content": "1. ", "reasoning": "Hm."}, "stop"),
        ({"tools": [TOOL], "stop": "</tool_call>"}, CALL, {"content": CALL.removesuffix("</tool_call>")}, "stop"),
    ],
)
def test_an_answer_becomes_a_message_with_reasoning_and_tool_calls(stream, fields, text, message, reason):
    tokenizer = chat_tokenizer("qwen3", QWEN3 + "{# reasoning_content tool_calls #}")
    request = ChatRequest(messages=CHAT, stream=stream, **fields)
    writer = ChatWriter(request, "tiny", tokenizer, [[1, 2]])
    tokens = tokenizer(text + "<|im_end|>")["input_ids"]
    steps = outputs(tokenizer, tokens, "eos", request.stops)
    if stream:
        sent = [writer.event(output) for output in steps]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in sent if event]
        found = {}
        for choice in choices:
            for key, value in choice["delta"].items():
                found[key] = found.get(key, "") + value if isinstance(value, str) else value
        if not request.parses_calls:  # a stream is not parsed without tools
            message = {"content": text.removesuffix(fields.get("stop", ""))}
    else:
        for output in steps:
            writer.add(output)
        choices = writer.body()["choices"]
        found = choices[0]["message"]
        assert found.pop("role") == "assistant"
    if "tool_calls" in found:
        (call,) = found["tool_calls"]
        assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"n": 1}'})
        assert len(call["id"]) == 9, "Mistral's templates reject other ids when the call is history"
        assert call["id"].isalnum()
        found["tool_calls"] = "f"
    assert found == message
    assert choices[-1]["finish_reason"] == reason


def test_tools_that_must_not_be_called_are_not_shown_to_the_model(client):
    """So that a chat template without tools is no error."""
    body = {"messages": CHAT, "max_tokens": 1, "return_token_ids": True}
    plain = client.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
    for fields, status in (({}, 400), ({"tool_choice": "none"}, 200)):
        answer = client.post("/v1/chat/completions", json=body | {"tools": [TOOL]} | fields)
        assert answer.status_code == status
    assert answer.json()["prompt_token_ids"] == plain


WRONG_COMPLETIONS = [
    ({"prompt": ""}, None),
    ({"prompt": [1] * 400}, None),
    ({"prompt": 5}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 100}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"echo": True}, "echo"),
    ({"temprature": 1}, "temprature"),
    ({"a" * 9000: 1}, "a" * 40),
]
WRONG_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"top_logprobs": 2}, "top_logprobs"),
]


def test_a_wrong_field_is_named_in_openais_error_form(client):
    cases = [("/v1/completions", {"prompt": "a", "max_tokens": 3}, *case) for case in WRONG_COMPLETIONS]
    cases += [("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}, *case) for case in WRONG_CHATS]
    for path, good, wrong, param in cases:
        answer = client.post(path, json=good | wrong)
        assert answer.status_code == 400, (wrong, answer.text)
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), wrong
        assert "\n" not in error["message"]


def test_a_prompt_that_is_too_long_is_named_as_clients_expect(client):
    """They shorten a chat by the code, or by OpenAI's words."""
    for path, body in (("completions", {"prompt": [1] * 400}), ("chat/completions", {"messages": [*CHAT] * 99})):
        error = client.post(f"/v1/{path}", json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 255 tokens for a prompt")


BODIES = [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "a", "temperature": NaN}']


def test_a_body_that_is_not_a_request_gets_status_400(client):
    headers = {"Content-Type": "application/json"}
    for body in BODIES:
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = client.post(path, content=body, headers=headers)
            assert answer.status_code == 400, (body[:60], answer.text)
            assert answer.json()["error"]["message"]
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain"])
def test_only_json_bodies_are_served_because_any_web_page_may_send_the_others(client, content_type):
    headers = {"Content-Type": content_type} if content_type else {}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        answer = client.post(path, content=json.dumps(body | {"max_tokens": 2}), headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["type"] == "invalid_request_error"
    headers = {"Content-Type": "application/json; charset=utf-8"}
    answer = client.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 2}', headers=headers)
    assert answer.status_code == 200


def test_a_client_that_disconnects_while_sending_is_not_a_failure(client, server, capfd, caplog):
    address = urlsplit(server)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head + b'{"prompt": ')
    until(lambda: 'path="/v1/completions",status="499"' in client.get("/metrics").text)
    assert "Traceback" not in caplog.text + capfd.readouterr().err


def test_other_paths_methods_and_models_get_their_status(client):
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 256
    for method, path, status in [
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
    ]:
        answer = client.request(method, path)
        assert (answer.status_code, "message" in answer.json()["error"]) == (status, True)
    answer = client.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/health").json() == {"status": "ok"}
    assert client.head("/health").status_code == 200


def test_a_body_that_is_too_large_gets_status_413(client):
    def pieces():
        for _ in range(160):
            yield b"x" * 65536

    for body in ({"json": {"prompt": "x" * 10_000_000}}, {"content": pieces()}):
        answer = client.post("/v1/completions", headers={"Content-Type": "application/json"}, **body)
        assert answer.status_code == 413
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_metrics_give_acceptance_length_and_rates(chat_target):
    drafter = NgramDrafter(3)
    traffic, engine = Traffic(), Engine(chat_target, drafter)
    metrics = Metrics(traffic, {"queue": ("Waiting", lambda: 3)})
    made = generate(chat_target, drafter, [[5, 6], [7]], max_new_tokens=40)
    for prompt in ([5, 6], [7]):
        request = engine.request(prompt, max_new_tokens=40)
        request.on_step = lambda new, _, request=request: traffic.count(request, len(new))
        engine.enqueue(request)
    while engine.busy:
        engine.step()
        assert metrics.page(), "at any time"
    text = metrics.page().decode()
    assert read_acceptance(text) == Acceptance.of(step for row in made.steps for step in row)
    lines = text.splitlines()
    page = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
    count, total = (float(page[f"speculator_acceptance_length_{name}"]) for name in ("count", "sum"))
    assert math.isclose(total / count, made.acceptance_length)
    accepted = [float(value) for name, value in page.items() if name.startswith("speculator_accepted_total{")]
    assert math.isclose(1 + sum(accepted) / count, made.acceptance_length)
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[0] > 0
    assert float(page["speculator_new_tokens_total"]) == sum(map(len, made.tokens))
    assert float(page["speculator_queue"]) == 3
    assert page['speculator_acceptance_length_bucket{le="17.0"}'] == page["speculator_acceptance_length_count"]


def test_the_log_tells_what_the_server_does_and_nothing_when_it_is_idle(chat_target, drafter, monkeypatch, capsys):
    monkeypatch.setattr(app, "_LOG_SECONDS", 0.2)
    with serving(chat_target, drafter) as (url, _):
        body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).is_success
        until(lambda: "tokens/s" in capsys.readouterr().err, 5)
        time.sleep(0.5)
        capsys.readouterr()  # of the seconds in which the answer ended
        time.sleep(0.5)
        # The server of the other tests, in this process, may print its line of the last ten seconds.
        assert "waiting, 1 answered" not in capsys.readouterr().err


def test_a_line_of_traffic_has_the_counts_since_the_last():
    assert not Traffic().line(10, 0, 0)
    before = Traffic(answers=1, tokens=100, acceptance=Acceptance([4]))
    line = Traffic(answers=3, tokens=152, acceptance=Acceptance([24, 20, 10])).since(before).line(10, 1, 3)
    assert line == "1 requests decoding, 3 waiting, 2 answered, 5.2 tokens/s, acceptance length 2.50"
    assert "acceptance" not in Traffic(tokens=1).line(10, 1, 0)


def test_a_prefill_is_no_verification_step(chat_target, drafter):
    traffic = Traffic()
    engine = Engine(chat_target, drafter)
    request = engine.request(PROMPT, max_new_tokens=12, eos_token_ids=())
    request.on_step = lambda new, _: traffic.count(request, len(new))
    engine.enqueue(request)
    while engine.busy:
        engine.step()
    assert (traffic.answers, traffic.tokens) == (1, 12)
    assert traffic.acceptance.steps == sum(not step.cut for step in request.steps)


def test_metrics_count_requests(client):
    before = client.get("/metrics").text
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
    client.post("/v1/completions", json={})
    page = client.get("/metrics").text

    def value(text: str, name: str) -> float:
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)

    for name, more in {
        'speculator_requests_total{path="/v1/completions",status="200"}': 1,
        'speculator_requests_total{path="/v1/completions",status="400"}': 1,
        "speculator_time_to_first_token_seconds_count": 1,
        "speculator_prompt_tokens_total": 1,
    }.items():
        assert value(page, name) == value(before, name) + more, name
    assert value(page, "speculator_slots") == 4
    assert value(page, "speculator_queue") == 0
    deadline = time.monotonic() + 10
    while value(page, "speculator_slots_in_use") and time.monotonic() < deadline:  # freed just after the answer is sent
        page = client.get("/metrics").text
    assert value(page, "speculator_slots_in_use") == 0


def test_a_failure_of_ours_is_counted(chat_target, monkeypatch):
    def fail(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(app.CompletionRequest, "samplings", fail)
    with serving(chat_target) as (url, _):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 500
        page = httpx.get(f"{url}/metrics").text
    assert 'speculator_requests_total{path="/v1/completions",status="500"} 1.0' in page


def test_too_many_prompts_are_refused_before_they_are_tokenized(client, monkeypatch):
    monkeypatch.setattr(app, "continued", None)  # not even an object is made of each: there may be millions
    answer = client.post("/v1/completions", json={"prompt": ["a"] * 13})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_a_body_has_a_largest_size_without_a_context(chat_target, monkeypatch):
    monkeypatch.setattr(chat_target, "context_length", 1 << 31)
    assert app._Routes(chat_target, Worker(lambda drafter: None), "tiny", 1, None).max_body == 16 << 20


def test_the_answer_to_an_encoders_source_is_a_text_of_its_own(monkeypatch):
    """With T5's kind of tokenizer: the first word's space belongs to a text that goes on."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "\u2581a": 1, "\u2581b": 2}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    request = CompletionRequest(prompt=[1])
    for continues, text in ((True, " b"), (False, "b")):
        writer = CompletionWriter(request, "tiny", tokenizer, [[1]], continues)
        writer.add(StepOutput(index=0, tokens=[2], logprobs=[], finish_reason="length"))
        assert writer.body()["choices"][0]["text"] == text
    seen = []
    monkeypatch.setattr(app, "CompletionWriter", lambda *given: seen.append(given[4]) or CompletionWriter(*given))
    model = tiny_encoder_decoder("t5")
    with serving(Target(model, chat_tokenizer("qwen3"))) as (url, _):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}).status_code == 200
    assert seen == [False]


def test_thoughts_are_split_where_the_template_knows_their_mark_and_an_end_token_is_no_text():
    tokenizer = chat_tokenizer("qwen3", CHATML + "{# content.split('</think>') #}")
    tokenizer.add_tokens([AddedToken("<end>", special=False)])
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<end>")
    for template, message in (
        (tokenizer.chat_template, {"content": "1.", "reasoning": "Hm."}),
        (tokenizer.chat_template.partition("{#")[0], {"content": THOUGHT + "1."}),
    ):
        tokenizer.chat_template = template
        writer = ChatWriter(ChatRequest(messages=CHAT), "tiny", tokenizer, [[1, 2]])
        tokens = tokenizer(THOUGHT + "1.<end>")["input_ids"]
        writer.add(StepOutput(index=0, tokens=tokens, logprobs=[], finish_reason="eos"))
        assert writer.body()["choices"][0]["message"] == {"role": "assistant", **message}


def test_a_key_is_required_under_v1_only(chat_target):
    app = create_app(chat_target, Worker(lambda drafter: None), api_key="secret")

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            for key, status in (
                ("", 401),
                ("Bearer secre", 401),
                ("Bearer secret", 200),
                ("bearer secret", 200),
                ("secret", 401),
            ):
                answer = await client.get("/v1/models", headers={"Authorization": key})
                assert answer.status_code == status
                if status == 401:
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert "secret" not in answer.text
            assert (await client.get("/health")).status_code == 503, "the worker was not started"

    asyncio.run(ask())


WRONG_AT_THE_END = [
    ({"prompt": [1] * 300_000 + ["a"]}, "prompt"),
    ({"prompt": ["a"] * 300_000 + [1.5]}, "prompt"),
    ({"prompt": "a", "stream": True, "stream_options": {f"a{i}": 1 for i in range(100_000)}}, "stream_options"),
    ({"prompt": "a", **{f"a{i}": 1 for i in range(100_000)}}, "a0"),
    ({"prompt": "a", "stop": ["a"] * 300_000}, "stop"),
    ({"messages": CHAT * 6_000 + [1]}, "messages"),
    ({"messages": CHAT, "tools": [TOOL] * 2_000 + [1]}, "tools"),
]


@pytest.mark.parametrize(("wrong", "param"), WRONG_AT_THE_END)
def test_a_long_body_with_a_mistake_costs_no_more_memory_than_a_good_one(wrong, param):
    """An error for each element took 0.6 GB of memory and seconds of the event loop."""
    body = json.dumps(wrong).encode()
    tracemalloc.start()
    with pytest.raises(APIError) as error:
        parse(ChatRequest if "messages" in wrong else CompletionRequest, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 * len(body)
    assert error.value.param == param
    assert len(error.value.message) < 200


def test_a_wrong_prompt_gets_a_message_in_words():
    with pytest.raises(APIError, match=r"^prompt: must be a text, a list of token ids, "):
        parse(CompletionRequest, b'{"prompt": [1.5]}')


def test_a_body_is_parsed_outside_of_the_event_loop(client, monkeypatch):
    threads = []
    monkeypatch.setattr(app, "parse", lambda *given: threads.append(threading.current_thread()) or parse(*given))
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert threads[0].name.startswith("asyncio_")


def test_one_tool_call_is_kept_if_the_client_wants_none_in_parallel():
    tokenizer = chat_tokenizer("qwen3", QWEN3 + "{# reasoning_content tool_calls #}")
    output = StepOutput(
        index=0, tokens=tokenizer(2 * f"{CALL}\n" + "<|im_end|>")["input_ids"], logprobs=[], finish_reason="eos"
    )
    for parallel, count in ((None, 2), (True, 2), (False, 1)):
        writer = ChatWriter(
            ChatRequest(messages=CHAT, tools=[TOOL], parallel_tool_calls=parallel), "tiny", tokenizer, [[1, 2]]
        )
        writer.add(output)
        assert len(writer.body()["choices"][0]["message"]["tool_calls"]) == count


def test_a_stream_that_fails_ends_with_an_error_event(client, monkeypatch, capfd):
    monkeypatch.setattr(app.CompletionWriter, "event", lambda *_: 1 // 0)
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True})
    (event,) = filter(None, answer.text.split("\n\n"))
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("server_error", "internal server error")
    monkeypatch.undo()
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_closed_stderr_does_not_end_the_task_that_writes_records(chat_target, monkeypatch):
    def closed(line):
        raise OSError("stderr is closed")

    class DueRows:
        count = 0

        def write_due(self):
            self.count += 1

        def chooses(self):
            return False

        def close(self):
            pass

    recorder = DueRows()
    monkeypatch.setattr(app, "_LOG_SECONDS", 0.05)
    monkeypatch.setattr(app, "log", closed)
    with serving(chat_target, recorder=recorder) as (url, _):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 30}, timeout=60).is_success
        before = recorder.count
        until(lambda: recorder.count > before + 3)


def test_every_message_of_a_chat_reaches_the_prompt_or_the_request_is_refused(client, chat_target):
    only = chat_tokenizer(
        "qwen3", QWEN3.replace("for m in messages %}{% if", "for m in messages if m.role in 'user' %}{% if")
    )
    with serving(Target(chat_target.model, only)) as (url, _):
        for fields, named in (
            ({"messages": [{"role": "system", "content": "x."}, *CHAT]}, "'system'"),
            ({"messages": CHAT, "tools": [TOOL]}, "leaves out the tools"),
        ):
            answer = httpx.post(f"{url}/v1/chat/completions", json=fields)
            assert (answer.status_code, named in answer.json()["error"]["message"]) == (400, True)
    body = {"max_tokens": 1, "return_token_ids": True}
    brief = [{"role": role, "content": "Be brief."} for role in ("system", "developer")]
    ids = [client.post("/v1/chat/completions", json=body | {"messages": [each, *CHAT]}).json() for each in brief]
    assert ids[0]["prompt_token_ids"] == ids[1]["prompt_token_ids"]
    assert "Be brief." in chat_target.tokenizer.decode(ids[0]["prompt_token_ids"])
    result = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    answer = client.post("/v1/chat/completions", json=body | {"messages": [*result, {"role": "tool", "content": None}]})
    assert (answer.status_code, "leaves out tool calls" in answer.text) == (400, True)


def test_long_work_is_done_outside_of_the_event_loop(chat_target, monkeypatch):
    """Its streams and /health stood still meanwhile. Answers to one prompt share it."""
    seen, made = {}, []

    def noting(name, original):
        def noted(*given, **how):
            seen.setdefault(name, set()).add(threading.current_thread().name)
            found = original(*given, **how)
            made.extend(found if name == "requests" else [])
            return found

        return noted

    monkeypatch.setattr(app, "new_requests", noting("requests", app.new_requests))
    monkeypatch.setattr(app, "JSONResponse", noting("dump", app.JSONResponse))
    monkeypatch.setattr(app.ChatWriter, "_parsed", noting("parsed", app.ChatWriter._parsed))
    body = {"messages": CHAT, "tools": [TOOL], "max_tokens": 3, "n": 3, "logprobs": True}
    target = Target(chat_target.model, chat_tokenizer("qwen3", QWEN3 + "{{ tools }}"))
    with serving(target) as (url, _):
        for stream in (False, True):
            answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": stream}, timeout=60)
            assert answer.status_code == 200
        assert answer.headers["x-accel-buffering"] == "no", "a proxy must not collect the events"
    loops = {thread.name for thread in threading.enumerate()} | {"MainThread"}
    assert len(made) == 6
    assert len({id(request.prompt) for request in made}) == 2
    assert not any(request.token_logprobs for request in made), "they have been sent"
    for name, threads in seen.items():
        assert all(thread.startswith(("ThreadPool", "asyncio_")) for thread in threads), (name, threads, loops)
    assert set(seen) == {"requests", "dump", "parsed"}


def test_requests_that_are_read_count_and_do_not_hold_up_answers(chat_target, monkeypatch):
    """Any number of chats was rendered at a time, before an overloaded server said so, in the threads of all others."""
    go, tokens, reading = threading.Event(), app._tokens, []

    def slow(*given):
        reading.append(0)
        go.wait(20)
        return tokens(*given)

    with serving(chat_target, slots=3, max_queue=5) as (url, _), ThreadPoolExecutor(9) as threads:
        monkeypatch.setattr(app, "_tokens", slow)
        body = {"max_tokens": 2, "temperature": 0}
        chats = [
            threads.submit(httpx.post, f"{url}/v1/chat/completions", json={"messages": CHAT, **body}, timeout=30)
            for _ in range(7)
        ]
        until(lambda: len(reading) == 2)
        time.sleep(0.2)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": [5], "n": 2, **body}, timeout=5)
        go.set()
        assert (refused.status_code, len(reading)) == (429, 2)
        assert [chat.result().status_code for chat in chats] == [200] * 7
        assert httpx.post(f"{url}/v1/completions", json={"prompt": [5], "n": 8, **body}).status_code == 200


def test_a_stop_string_that_is_a_special_token_ends_the_answer(chat_target):
    tokenizer = chat_target.tokenizer
    request = Engine(chat_target).request(PROMPT, stop_strings=["<|im_start|>"], eos_token_ids=())
    assert request.eos == {tokenizer.convert_tokens_to_ids("<|im_start|>")}


def test_a_stream_may_ask_for_no_padding(client):
    body = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_obfuscation": False}}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_web_pages_of_allowed_origins_may_ask(chat_target):
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    for origins, status in (((), 405), (["http://page.example"], 200), (["http://other.example"], 400)):
        made = create_app(chat_target, Worker(lambda drafter: None), api_key="secret", allowed_origins=origins)
        answer = ask(made, "OPTIONS", "/v1/completions", {**asked, "Access-Control-Request-Headers": "authorization"})
        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == (asked["Origin"] if status == 200 else None)


def test_a_loopback_server_answers_no_page_that_took_its_address(chat_target):
    made = create_app(chat_target, Worker(lambda drafter: None), hosts=("127.0.0.1", "::1", "localhost"))
    for host, status in (
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("LOCALHOST", 200),
        ("page.example:8000", 403),
        ("[", 403),
    ):
        answer = ask(made, "GET", "/v1/models", {"Host": host})
        assert answer.status_code == status
        assert status == 200 or "localhost" in answer.json()["error"]["message"]


def ask(made, method, path, headers):
    async def answer():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://x") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(answer())
