"""What is asked of a target: rows, and chats as its template writes them."""

import json
import signal
import time

import pytest
from chat_templates import CHATML, chat_tokenizer

from speculator.cli.prompts import RefusedError, chat_text, encode, read_rows
from speculator.errors import UserError

CHAT = [{"role": "user", "content": "Hi"}]


def test_a_chat_has_the_tokens_of_transformers():
    for family in ("llama3", "qwen3", "gemma"):
        tokenizer = chat_tokenizer(family)
        expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert encode(tokenizer, {"messages": CHAT}, chat=False) == expected
        assert encode(tokenizer, {"prompt": "Hi"}, chat=True) == expected


def test_tools_reach_the_template(tmp_path):
    tokenizer = chat_tokenizer("qwen3", "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": CHAT, "tools": [{"name": "search"}]}) + "\n" + json.dumps({"prompt": "x"}))
    with_tools, _ = read_rows(file)
    assert tokenizer.decode(encode(tokenizer, with_tools, chat=False)).startswith("search<|im_start|>")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages[7].content }}",
        "{{ messages + 5 }}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{{ [1] | random | nosuchfilter }}",
        "{% for %}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 'x' * 5000000 }}",
    ],
)
def test_whatever_a_template_raises_is_one_line(template):
    with pytest.raises(RefusedError, match="the chat template") as error:
        chat_text(chat_tokenizer("qwen3", template), CHAT)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
        ("{{ 'x' * 10**10 }}", "takes too much memory"),
        (
            "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(99999) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "takes too much memory",
        ),
    ],
)
def test_a_template_without_end_or_bound_is_stopped(template, message, monkeypatch):
    monkeypatch.setattr("speculator.cli.prompts._TEMPLATE_SECONDS", 1.0)
    tokenizer, handler = chat_tokenizer("qwen3", template), signal.getsignal(signal.SIGALRM)
    started = time.monotonic()
    with pytest.raises(UserError, match=f"the chat template of .*{message}"):
        chat_text(tokenizer, CHAT)
    assert time.monotonic() - started < 10
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert len("x" * (600 << 20)) == 600 << 20, "the process has its memory back"


def test_what_is_asked_may_spell_special_tokens():
    """As transformers and servers read it: a template written by hand is one."""
    tokenizer = chat_tokenizer("qwen3")
    assert tokenizer.eos_token_id in encode(tokenizer, {"prompt": "Hi<|im_end|>"}, chat=False)
    assert (
        encode(tokenizer, {"messages": [{"role": "user", "content": "<|im_end|>"}]}, False).count(
            tokenizer.eos_token_id
        )
        == 2
    )
