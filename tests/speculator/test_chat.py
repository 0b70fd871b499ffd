import json
import time

import pytest
from chat_templates import CHATML, QWEN3, chat_tokenizer
from serving_here import outputs
from transformers import PreTrainedTokenizerBase

from speculator import chat
from speculator.chat import (
    RefusedError,
    answer_message,
    chat_text,
    clean_messages,
    end_token,
    set_template_variables,
)
from speculator.errors import UserError
from speculator.server.responses import ChatWriter
from speculator.server.schema import ChatRequest
from speculator.server.worker import StepOutput

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


# What ends an answer, and how an answer becomes history

GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if loop.last and m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
    "{% endif %}"
    "{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if m.content %}<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# message.thinking #}"
)
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
HARD = "<|channel|>analysis<|message|>Hard é.<|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
    "{% endif %}"
)


def tokenizer_with(template, added=()):
    tokenizer = chat_tokenizer("qwen3", template)
    tokenizer.add_tokens(list(added), special_tokens=True)
    return tokenizer


@pytest.mark.parametrize(
    ("template", "added", "end"),
    [
        (QWEN3, [], "<|im_end|>"),
        (GPT_OSS, HARMONY, "<|return|>"),
        (GLM, ["<|user|>", "<|assistant|>"], "<|user|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", [], None),
        ("{{ raise_exception('no') }}", [], None),
        (None, [], "<|im_end|>"),
    ],
)
def test_the_token_that_ends_an_answer_is_the_first_that_the_template_writes_after_it(template, added, end):
    tokenizer = tokenizer_with(template, added)
    assert end_token(tokenizer) == (end and tokenizer.convert_tokens_to_ids(end))


def as_history(tokenizer, answer, tools=None):
    """The message that an answer becomes, and the render of a chat that goes on after it."""
    prompt = tokenizer(chat_text(tokenizer, CHAT, tools, ask=True), add_special_tokens=False)["input_ids"]
    message = answer_message(tokenizer, prompt, tokenizer(answer, add_special_tokens=False)["input_ids"], tools)
    return message, chat_text(tokenizer, [*CHAT, message, *CHAT], tools, ask=True)


def test_an_answer_of_gpt_oss_is_history_without_its_analysis_and_its_marks():
    answer = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>One.<|return|>"
    tokenizer = tokenizer_with(GPT_OSS, HARMONY)
    message, text = as_history(tokenizer, answer)
    assert message == {"role": "assistant", "content": "One.", "thinking": "Easy."}
    written = chat_text(tokenizer, [*CHAT, {"role": "assistant", "content": "One."}, *CHAT], ask=True)
    assert text == written
    assert "analysis" not in text


@pytest.mark.parametrize(
    "before",
    [
        "<|channel|>commentary to=functions.weather json",
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        " to=functions.weather<|channel|>commentary json",
        " to=functions.weather<|channel|>commentary <|constrain|>json",
    ],
)
@pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"])
def test_a_tool_call_of_gpt_oss_is_history_as_a_tool_call(before, thought):
    answer = f'{thought}{before}<|message|>{{"city": "Rome"}}<|call|>'
    message, text = as_history(tokenizer_with(GPT_OSS, HARMONY), answer)
    assert (message["content"], message.get("thinking")) == ("", "Hm." if thought else None)
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    ]
    assert 'to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>' in text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("1.<|im_end|>", {"content": "1."}),
        ("<think>\nHm.\n</think>\n\n1.<|im_end|>", {"content": "1.", "reasoning_content": "Hm."}),
        ("Hm.\n</think>\n\n1.<|im_end|>", {"content": "1.", "reasoning_content": "Hm."}),
        ("<think>\nHm, cut off", {"content": "<think>\nHm, cut off"}),
        (
            '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call><|im_end|>',
            {"content": "", "tool_calls": "f"},
        ),
        ("<tool_call>\nnot JSON\n</tool_call><|im_end|>", {"content": "<tool_call>\nnot JSON\n</tool_call>"}),
    ],
)
def test_an_answer_is_parsed_by_its_marks(answer, message):
    tools = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    parsed, _ = as_history(tokenizer_with(tools + QWEN3), answer)
    if "tool_calls" in message:
        function = {"name": "f", "arguments": {"n": 1}}
        message = {**message, "tool_calls": [{"type": "function", "function": function}]}
    assert parsed == {"role": "assistant", **message}


def test_a_template_without_reasoning_gets_the_answer_as_it_was():
    parsed, _ = as_history(tokenizer_with(CHATML), "Hm.\n</think>\n\n1.<|im_end|>")
    assert parsed["content"] == "Hm.\n</think>\n\n1."


PARSES = pytest.mark.skipif(
    not hasattr(PreTrainedTokenizerBase, "get_response_parser"), reason="needs transformers 5.23"
)


def parsing_tokenizer(**fields) -> PreTrainedTokenizerBase:
    """A tokenizer with a response template of these fields and the content."""
    tokenizer = tokenizer_with("{{ tools if tools }}" + CHATML)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {**fields, "content": {"close": "<|im_end|>"}},
    }
    return tokenizer


@PARSES
def test_a_tokenizers_response_template_parses_the_answer():
    tokenizer = parsing_tokenizer(reasoning_content={"open": "((", "close": "))"})
    parsed, _ = as_history(tokenizer, "((Hm.))1.<|im_end|>")
    assert parsed == {"role": "assistant", "content": "1.", "reasoning_content": "Hm."}


@PARSES
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', {}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"arguments": {}}', None),
        ("5", None),
        ('{"name": "f", "arguments": 7}', None),
    ],
)
def test_an_answers_call_needs_a_name_and_a_malformed_one_stays_text(call, arguments):
    wanted = {"type": "function", "function": "{content}"}
    calls = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True, "transform": wanted}
    for each in (parsing_tokenizer(tool_calls=calls), tokenizer_with(CHATML + "{# tool_calls #}")):
        message, _ = as_history(each, f"<tool_call>{call}</tool_call><|im_end|>")
        if arguments is None:
            assert message == {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}
        else:
            function = {"name": "f", "arguments": arguments}
            assert message["tool_calls"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize("given", [{"arguments": each} for each in ("", "  ", None, "null", {})] + [{}])
def test_a_call_without_arguments_has_an_empty_object(given):
    for call in ({"function": {"name": "now", **given}}, {"name": "now", **given}):
        message = {"role": "assistant", "tool_calls": [call]}
        (cleaned,) = clean_messages([message])[0]["tool_calls"]
        assert cleaned.get("function", cleaned) == {"name": "now", "arguments": {}}
        assert message["tool_calls"][0].get("function", call) == {"name": "now", **given}, "the row is unchanged"


def test_parts_may_have_their_text_as_value():
    parts = [{"type": "text", "value": "a"}, {"type": "text", "text": "b"}]
    assert clean_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]
    with pytest.raises(UserError, match="message 1 has a part of type 'text' without a text"):
        clean_messages([{"role": "user", "content": [{"type": "text", "value": 3}]}])


@PARSES
def test_the_token_that_ends_an_answer_is_not_content():
    """A model may end with an EOS that its response template does not know."""
    tokenizer = parsing_tokenizer()
    prompt = tokenizer(chat_text(tokenizer, CHAT, ask=True), add_special_tokens=False)["input_ids"]
    writer = ChatWriter(ChatRequest(messages=CHAT), "tiny", tokenizer, [prompt])
    tokens = tokenizer("Yes.<|im_start|>")["input_ids"]
    writer.add(StepOutput(index=0, tokens=tokens, logprobs=[], finish_reason="eos"))
    assert writer.body()["choices"][0]["message"]["content"] == "Yes."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "answer", "message"),
    [
        ({}, "<|channel|>final<|message|>One é.<|return|>", {"content": "One é."}),
        ({}, f"{HARD}<|channel|>final<|message|>One é.<|return|>", {"content": "One é.", "reasoning": "Hard é."}),
        ({}, f"{HARD}<|channel|>fin", {"content": "", "reasoning": "Hard é."}),
        ({}, "no channels<|return|>", {"content": "no channels"}),
        ({"stop": "e"}, f"{HARD}<|channel|>final<|message|>One", {"content": "On", "reasoning": "Hard é."}),
        ({"stop": "é. no"}, f"{HARD}<|channel|>final<|message|>é. né. no", {"content": "é. n", "reasoning": "Hard é."}),
        ({"stop": "<|return|>"}, f"{HARD}<|channel|>final<|message|>One", {"content": "One", "reasoning": "Hard é."}),
        (
            {"stop": "rd", "min_tokens": 20},
            f"{HARD}<|channel|>final<|message|>bird",
            {"content": "bi", "reasoning": "Hard é."},
        ),
        ({}, "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>One", {"content": "One", "reasoning": "Hm"}),
        ({"tools": [TOOL]}, f"{HARD}{CALLED}", {"content": None, "reasoning": "Hard é.", "tool_calls": "weather"}),
        ({"tools": [TOOL], "tool_choice": "none"}, f"{HARD}{CALLED}", {"content": "", "reasoning": "Hard é."}),
    ],
)
def test_an_answer_in_channels_is_sent_without_their_marks(stream, fields, answer, message):
    tokenizer = tokenizer_with(GPT_OSS, HARMONY)
    writer = ChatWriter(ChatRequest(messages=CHAT, stream=stream, **fields), "tiny", tokenizer, [[1, 2]])
    tokens, sent, pieces = tokenizer(answer, add_special_tokens=False)["input_ids"], {}, 0
    end, stops = "eos" if answer.endswith("|>") else "length", [fields["stop"]] if "stop" in fields else []
    for output in outputs(tokenizer, tokens, end, stops, fields.get("min_tokens", 0)):
        event = writer.event(output) if stream else writer.add(output) and ""
        delta = json.loads(event.removeprefix("data: "))["choices"][0]["delta"] if event else {}
        pieces += bool(delta)
        for name, text in delta.items():
            sent[name] = sent.get(name, "") + text if isinstance(text, str) else text
    if not stream:
        sent = writer.body()["choices"][0]["message"]
        sent.pop("role")
    elif "tools" not in fields and HARD in answer:
        assert pieces > 3
    if "tool_calls" in sent:
        sent["tool_calls"] = sent["tool_calls"][0]["function"]["name"]
    assert {name: text for name, text in sent.items() if text} == {name: text for name, text in message.items() if text}


@PARSES
def test_arguments_of_a_call_get_the_types_of_its_tool():
    calls = {
        "open_pattern": r"<call=(?P<name>\w+)>",
        "close": "</call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    tokenizer = parsing_tokenizer(tool_calls=calls)
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}]
    answer = "<call=f><n>7</n><s>7</s></call><|im_end|>"
    for given, number in ((tools, 7), (None, "7")):
        message, _ = as_history(tokenizer, answer, given)
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"n": number, "s": "7"}]
    writer = ChatWriter(ChatRequest(messages=CHAT, tools=tools), "tiny", tokenizer, [[1, 2]])
    writer.add(StepOutput(index=0, tokens=tokenizer(answer)["input_ids"], logprobs=[], finish_reason="eos"))
    (call,) = writer.body()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"n": 7, "s": "7"}'


def test_a_template_renders_the_same_after_variables_are_set():
    for template in ("\n{{ x }}", "\n  {% if x %}{{ x }}{% endif %}", "{{ x }}\n", "  {% set y = 1 %}\n{{ x }}"):
        plain, with_variables = (
            chat_tokenizer("qwen3", "{% set x = 1 %}\n" + template),
            chat_tokenizer("qwen3", template),
        )
        set_template_variables(with_variables, {"x": 1})
        assert chat_text(with_variables, CHAT) == chat_text(plain, CHAT)


# Messages that a template does not know


def test_a_developer_is_the_system_of_a_template_without_that_role():
    chat = [{"role": "developer", "content": "Be brief."}, *CHAT]
    assert chat_text(chat_tokenizer("qwen3", CHATML), chat).startswith("<|im_start|>system\nBe brief.")
    own = "{# developer #}" + CHATML
    assert chat_text(chat_tokenizer("qwen3", own), chat).startswith("<|im_start|>developer\nBe brief.")


@pytest.mark.parametrize("role", ["developer", "function", "ipython", "system"])
def test_a_message_that_the_template_does_not_write_is_refused(role):
    only = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")
    with pytest.raises(RefusedError, match=r"leaves out messages of the role '\w+'"):
        chat_text(chat_tokenizer("qwen3", only), [{"role": role, "content": "Be brief."}, *CHAT])
    chat_text(chat_tokenizer("qwen3", only), [{"role": role, "content": " "}, *CHAT])


def test_a_message_that_the_template_escapes_is_written():
    escaped = CHATML.replace("{{ m.content }}", "{{ m.content | tojson }}")
    result = {"role": "tool", "content": 'a "quoted"\nline'}
    assert r"a \"quoted\"\nline" in chat_text(chat_tokenizer("qwen3", escaped), [*CHAT, result])


def test_tools_that_the_template_does_not_write_are_refused():
    """The model would answer without them, and nobody would know why."""
    with pytest.raises(RefusedError, match="leaves out the tools"):
        chat_text(chat_tokenizer("qwen3", CHATML), CHAT, [TOOL])
    for written in ("{{ tools | tojson }}", "{% if messages | length > 2 %}{{ tools[0].function.name }}{% endif %}"):
        text = chat_text(chat_tokenizer("qwen3", written + CHATML), CHAT * 3, [TOOL])
        assert "weather" in text


NESTED = "<tool_call>" + '{"a":' * 20_000 + "1" + "}" * 20_000 + "</tool_call>"


@pytest.mark.parametrize("answer", ["<tool_call>{}" * 20_000, '<tool_call>{"a"x' * 20_000, NESTED])
def test_calls_without_an_end_take_no_longer_than_their_text(answer, monkeypatch):
    """They took 20 seconds, in which no other thread of the server ran."""
    monkeypatch.setattr(chat, "decoded", lambda *_, **__: answer)
    tokenizer = chat_tokenizer("qwen3", QWEN3 + "{# reasoning_content tool_calls #}")
    began = time.perf_counter()
    assert answer_message(tokenizer, [], []) == {"role": "assistant", "content": answer}
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("answer", ["<|channel|>" + "a" * 40_000, "to=" * 20_000])
def test_channels_without_an_end_take_no_longer_than_their_text(answer, monkeypatch):
    monkeypatch.setattr(chat, "decoded", lambda *_, **__: answer)
    began = time.perf_counter()
    assert answer_message(chat_tokenizer("qwen3", GPT_OSS), [], [])["content"] == answer
    assert time.perf_counter() - began < 1


def test_a_call_may_have_the_marks_of_a_call_in_its_arguments():
    tokenizer = chat_tokenizer("qwen3", QWEN3 + "{# tool_calls #}")
    call = {"name": "f", "arguments": {"text": "<tool_call> and } </tool_call>"}}
    answer = f"Now: <tool_call> {json.dumps(call)}\n</tool_call> <tool_call>{{"
    message = answer_message(tokenizer, [], tokenizer(answer)["input_ids"])
    assert message["tool_calls"] == [{"type": "function", "function": call}]
    assert message["content"] == "Now:  <tool_call>{"


SHOUTED = QWEN3.replace("m.content }}<|im_end|>", "m.content | replace('e', 'E') }}<|im_end|>")


@pytest.mark.parametrize(
    ("template", "renderings"),
    [(QWEN3, 1), (SHOUTED, 2), (QWEN3.replace("m.content }}<|im_end|>", "m.content | tojson }}<|im_end|>"), 1)],
)
def test_a_long_chat_is_checked_in_the_time_of_its_text(template, renderings, monkeypatch):
    """Each of its messages was searched in the whole text, or rendered with all others."""
    made, tokenizer = [], chat_tokenizer("qwen3", template)
    render = chat._render
    monkeypatch.setattr(chat, "_render", lambda *given: made.append(0) or render(*given))
    messages = [*CHAT, *({"role": "tool", "content": f"one\n{number}"} for number in range(20_000))]
    began = time.perf_counter()
    text = chat_text(tokenizer, messages)
    assert time.perf_counter() - began < 2
    assert len(made) == renderings
    assert "19999" in text


def test_a_message_out_of_its_order_is_found():
    """Some templates write the system message last."""
    late = "{% for m in messages if m.role != 'system' %}{{ m.content }}.{% endfor %}{{ messages[0].content }}"
    messages = [{"role": role, "content": role} for role in ("system", "user", "tool", "ipython")]
    assert chat_text(chat_tokenizer("qwen3", late), messages) == "user.tool.ipython.system"
    with pytest.raises(RefusedError, match="'ipython'"):
        chat_text(chat_tokenizer("qwen3", late.replace("!= 'system'", "in ('user', 'tool')")), messages)
