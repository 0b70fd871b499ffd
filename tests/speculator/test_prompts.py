import json

import pytest
from chat_templates import CHATML, chat_tokenizer

from speculator.errors import UserError
from speculator.prompts import Conversation, continued, prompt_of, read_prompts

CHAT = [{"role": "user", "content": "Hi"}]


def test_a_chat_has_the_same_tokens_as_in_transformers():
    for family in ("llama3", "qwen3", "gemma"):
        tokenizer = chat_tokenizer(family)
        expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert Conversation(messages=CHAT, chat=True).tokens(tokenizer) == expected
        assert continued("Hi", chat=True).tokens(tokenizer) == expected


def test_tools_reach_the_template(tmp_path):
    tokenizer = chat_tokenizer("qwen3", "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": CHAT, "tools": [{"name": "search"}]}) + "\n" + json.dumps({"prompt": "x"}))
    (_, with_tools), _ = read_prompts(file)
    assert tokenizer.decode(with_tools.tokens(tokenizer)).startswith("search<|im_start|>")


def test_special_tokens_in_a_prompt_are_special():
    tokenizer = chat_tokenizer("qwen3")
    assert tokenizer.eos_token_id in continued("Hi<|im_end|>").tokens(tokenizer)
    in_a_chat = continued("<|im_end|>", chat=True).tokens(tokenizer)
    assert in_a_chat.count(tokenizer.eos_token_id) == 2


def test_the_first_key_that_is_not_null_counts():
    row = {"prompt": "Hi", "messages": CHAT, "turns": None}
    assert not prompt_of("f:1", row, ("prompt", "messages")).chat
    assert prompt_of("f:1", row).chat
    turns = prompt_of("f:1", {"prompt": ["a", "b"]})  # as MT-Bench has them on the hub
    assert (turns.chat, turns.text, turns.later) == (True, "a", [[{"role": "user", "content": "b"}]])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "f:1: .*prompt.*messages.*question"),
        ([1], "f:1"),
        ({"prompt": 5}, 'f:1: "prompt"'),
        ({"messages": []}, "f:1: a chat without messages"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 5}, 'f:1: "tools" is not a list of objects'),
        ({"messages": ["x"]}, 'f:1: "messages"'),
        ({"turns": []}, "f:1: .*prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]}, "f:1: message 1 .*'image'"),
    ],
)
def test_a_malformed_row_names_its_line_and_key(row, message):
    with pytest.raises(UserError, match=message):
        prompt_of("f:1", row, ("prompt", "messages"))


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]
    assert prompt_of("f:1", {"messages": [{"role": "user", "content": parts}]}).text == "Hi\n!"


def test_a_lone_surrogate_names_its_row():
    with pytest.raises(UserError, match="f:1: character 2"):
        prompt_of("f:1", {"prompt": "x\ud800"}).tokens(chat_tokenizer("qwen3"))
