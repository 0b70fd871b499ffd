"""Any value in any documented field of a request gets an answer, or status 400 with one line in words."""

import re
from pathlib import Path

import httpx
import pytest
from chat_templates import chat_tokenizer
from odd_rows import CALLS, MESSAGES, TOOL, with_odd_values
from serving_here import serving, tiny_target

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "http.md").read_text()
TABLE = PAGE.partition("## Fields")[2].partition("\n## ")[0]
DOCUMENTED = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", TABLE, re.MULTILINE)))
ODD = [None, -1.5, "text", [{"a": [None]}], {"a": [None]}]
HUGE = 10**400
BOTH = {
    **dict.fromkeys(DOCUMENTED),
    "model": "tiny",
    "max_tokens": 1,
    "min_tokens": 1,
    "n": 1,
    "stop": ["###"],
    "seed": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "ignore_eos": True,
    "return_token_ids": True,
    "store": False,
}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
QUESTION = {"role": "user", "content": "Why?"}
CHAT = {"messages": [*MESSAGES, QUESTION], "tools": [TOOL], "max_completion_tokens": 1, "logprobs": True}
CHAT |= {"top_logprobs": 1, "tool_choice": "auto", "parallel_tool_calls": False, "chat_template_kwargs": {"a": 1}}
"""A chat with every field, in every message too."""
BODIES = {
    "/v1/completions": {**BOTH, "prompt": [[5, 6]], "logprobs": 1},
    "/v1/chat/completions": {**BOTH, **CHAT, **STREAM},
}


@pytest.fixture(scope="module")
def client():
    target = tiny_target(chat_tokenizer("qwen3", CALLS))
    target.context_length = 1024
    with serving(target, max_queue=8) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_an_odd_value_in_any_field_is_obeyed_or_refused_in_one_line(client, path):
    good = BODIES[path]
    answer = client.post(path, json=good)
    assert answer.status_code == 200, answer.text
    assert len(DOCUMENTED) > 40
    numbers = [name for name, value in good.items() if isinstance(value, int | float) and "max_" not in name]
    huge = [{**good, name: HUGE} for name in numbers]
    refused = 0
    unlimited = {**{name: value for name, value in good.items() if "max_" not in name}, "min_tokens": HUGE}
    huge += [unlimited, {**good, "max_tokens": HUGE, "max_completion_tokens": HUGE, "min_tokens": HUGE}]
    for body in [*with_odd_values([good], ODD), *huge, {**good, "prompt": [HUGE]}]:
        odd = {name: value for name, value in body.items() if value != good.get(name)}
        if not odd:
            continue
        answer = client.post(path, json=body)
        assert answer.status_code in (200, 400, 404), (odd, answer.text)
        assert "server_error" not in answer.text, odd
        if answer.status_code == 200:
            continue
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error", odd
        assert (answer.status_code == 404) == isinstance(odd.get("model"), str), odd
        assert re.search("[a-z]+ [a-z]+", error["message"]), odd
        assert error["message"].isprintable(), odd
        assert len(error["message"]) < 300, odd
        refused += 1
    assert refused > 100
    assert client.post(path, json=good).status_code == 200


NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "best_of": 1}
NEUTRAL |= {"echo": False, "suffix": "", "functions": [], "function_call": "none", "modalities": ["text"]}
NEUTRAL |= {"response_format": {"type": "text"}, "stop_token_ids": [], "skip_special_tokens": True, "user": "me"}


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_clients_send_at_their_neutral_values_change_nothing(client, path):
    body = {"messages": [QUESTION]} if "chat" in path else {"prompt": [5, 6]}
    body |= {"seed": 1, "max_tokens": 8}
    plain, neutral = (client.post(path, json=each).json()["choices"] for each in (body, body | NEUTRAL))
    assert neutral == plain
    for name in ("frequency_penalty", "repetition_penalty", "best_of"):
        assert client.post(path, json=body | {name: 2}).json()["error"]["param"] == name
