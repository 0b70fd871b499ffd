import pytest
from chat_templates import chat_tokenizer

from speculator.chat import RefusedError, chat_text

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_an_error_in_a_template_is_one_line(template):
    with pytest.raises(RefusedError, match="chat template") as error:
        chat_text(chat_tokenizer("qwen3", template), CHAT)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"city": "Rome"}', '{"city": "Rome"}'),
        ({"city": "Rome"}, '{"city": "Rome"}'),
        ("not JSON", '"not JSON"'),
    ],
)
def test_tool_call_arguments_reach_the_template_as_objects(arguments, written):
    """Templates of Llama 3.1 and Qwen 2.5 need objects; OpenAI's format has JSON text."""
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert chat_text(chat_tokenizer("qwen3", template + "{% endfor %}"), messages) == written
    assert call["function"]["arguments"] == arguments


def test_malformed_tool_calls_reach_the_template_unchanged():
    template = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    for calls in ("search", [None], [{"name": "search"}], [{"function": "search"}], [{"function": {}}]):
        messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
        assert chat_text(chat_tokenizer("qwen3", template), messages) == str(calls)
