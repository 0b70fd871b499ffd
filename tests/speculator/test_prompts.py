import pytest
from chat_templates import chat_tokenizer

from speculator.errors import UserError
from speculator.prompts import Conversation, continued, prompt_of

CHAT = [{"role": "user", "content": "Hi"}]


def test_a_chat_has_the_same_tokens_as_in_transformers():
    for family in ("llama3", "qwen3", "gemma"):
        tokenizer = chat_tokenizer(family)
        expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert Conversation(messages=CHAT, chat=True).tokens(tokenizer) == expected
        assert continued("Hi", chat=True).tokens(tokenizer) == expected


def test_special_tokens_in_a_prompt_are_special():
    tokenizer = chat_tokenizer("qwen3")
    assert tokenizer.eos_token_id in continued("Hi<|im_end|>").tokens(tokenizer)
    in_a_chat = continued("<|im_end|>", chat=True).tokens(tokenizer)
    assert in_a_chat.count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "x"}, "f:1: .*prompt.*question.*answer"),
        ([1], "f:1"),
        ({"prompt": 5}, 'f:1: "prompt"'),
        ({"messages": []}, "f:1: a chat without messages"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 5}, 'f:1: "tools" is not a list of objects'),
        ({"messages": ["x"]}, 'f:1: "messages"'),
        ({"turns": []}, "f:1: .*turns"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]}, "f:1: message 1 .*'image'"),
    ],
)
def test_a_malformed_row_names_its_line_and_key(row, message):
    with pytest.raises(UserError, match=message):
        prompt_of("f:1", row)


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]
    assert prompt_of("f:1", {"messages": [{"role": "user", "content": parts}]}).text == "Hi\n!"


def test_a_lone_surrogate_names_its_row():
    with pytest.raises(UserError, match="f:1: character 2"):
        prompt_of("f:1", {"prompt": "x\ud800"}).tokens(chat_tokenizer("qwen3"))
