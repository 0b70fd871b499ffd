"""What rows ask of a target, and its tokens."""

import json

import pytest
from chat_templates import CHATML, chat_tokenizer

from speculator.errors import UserError
from speculator.prompts import Prompt, continued, prompt_of, read_prompts

CHAT = [{"role": "user", "content": "Hi"}]


def test_a_chat_has_the_tokens_of_transformers():
    for family in ("llama3", "qwen3", "gemma"):
        tokenizer = chat_tokenizer(family)
        expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert Prompt(CHAT, chat=True).tokens(tokenizer) == expected
        assert continued("Hi", chat=True).tokens(tokenizer) == expected


def test_tools_reach_the_template(tmp_path):
    tokenizer = chat_tokenizer("qwen3", "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": CHAT, "tools": [{"name": "search"}]}) + "\n" + json.dumps({"prompt": "x"}))
    (_, with_tools), _ = read_prompts(file)
    assert tokenizer.decode(with_tools.tokens(tokenizer)).startswith("search<|im_start|>")


def test_what_is_asked_may_spell_special_tokens():
    """As transformers and servers read it: a template written by hand is one."""
    tokenizer = chat_tokenizer("qwen3")
    assert tokenizer.eos_token_id in continued("Hi<|im_end|>").tokens(tokenizer)
    in_a_chat = continued("<|im_end|>", chat=True).tokens(tokenizer)
    assert in_a_chat.count(tokenizer.eos_token_id) == 2


def test_the_first_of_the_keys_counts_and_a_null_is_none():
    row = {"prompt": "Hi", "messages": CHAT, "turns": None}
    assert not prompt_of("f:1", row, ("prompt", "messages")).chat
    assert prompt_of("f:1", row).chat


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "x"},
            r'f:1: a row needs "prompt" \(text\) or "messages" \(a list of objects\); its keys are question',
        ),
        ([1], "f:1: a row needs .* it is no object"),
        ({"prompt": 5}, 'f:1: "prompt" is not text'),
        ({"messages": []}, 'f:1: "messages" is not a list of objects'),
        ({"messages": ["x"]}, 'f:1: "messages" is not a list of objects'),
        ({"prompt": "x", "category": ["y"]}, 'f:1: "category" is not text'),
    ],
)
def test_a_row_of_another_shape_is_one_line(row, message):
    with pytest.raises(UserError, match=message):
        prompt_of("f:1", row, ("prompt", "messages"))


def test_half_of_a_surrogate_pair_is_named_by_its_row():
    with pytest.raises(UserError, match="f:1: character 2 is half of a surrogate pair"):
        prompt_of("f:1", {"prompt": "x\ud800"}).tokens(chat_tokenizer("qwen3"))
