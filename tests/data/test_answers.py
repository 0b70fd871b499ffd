"""Every answer has loss once, in the context in which the target would have written it; nothing else has loss."""

import json
import random
import re
from itertools import groupby

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import CHATML, FAMILIES, chat_tokenizer
from conftest import tiny_tokenizer

from data.documents import RowError
from data.mixture import SourceError
from data.readers import read
from data.rendering import render
from data.rows import content
from data.tally import Tally

ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
HEAD, TAIL = "{% for m in messages %}<|im_start|>{{ m.role }}\n", "<|im_end|>\n{% endfor %}"
EMPTY = "<think>\n\n</think>\n\n"
THOUGHT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"

TEMPLATES = {
    "ChatML with tools": HEAD + "{{ m.content or '' }}" + CALLS + TAIL + ASK,
    "Qwen 3: empty marks before the last answer": HEAD
    + "{% if m.role == 'assistant' and loop.last %}" + EMPTY + "{% endif %}{{ m.content or '' }}" + CALLS + TAIL + ASK,
    "Qwen 3.5: thinking after the last question, which the generation prompt opens": LAST_QUESTION + HEAD
    + "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    + "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    + "{{ m.content or '' }}" + CALLS + TAIL + ASK[:-11] + "<think>\n{% endif %}",
    "thinking of earlier turns is dropped": LAST_QUESTION + HEAD
    + "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}" + THOUGHT + "{% endif %}"
    + "{{ m.content or '' }}" + CALLS + TAIL + ASK,
    "R1: the generation prompt opens thinking, turns have none": HEAD + "{{ m.content or '' }}" + CALLS + TAIL
    + ASK[:-11] + "<think>\n{% endif %}",
    "Nemotron 3: the generation prompt opens thinking, turns have empty marks": HEAD
    + "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content or '' }}" + CALLS + TAIL
    + ASK[:-11] + "<think>\n{% endif %}",
    "Phi 3: a token closes the chat": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLS
    + TAIL + "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|close|>{% endif %}",
    "gpt-oss: the last turn ends with another token": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}" + CALLS
    + "{% if loop.last and m.role == 'assistant' %}<|close|>{% else %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "no generation prompt": HEAD + "{{ m.content or '' }}" + CALLS + TAIL,
    "GLM: the next turn's token ends a turn": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}" + CALLS
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "the prompt asks with another name": HEAD
    + "{{ m.content or '' }}" + CALLS + TAIL + ASK.replace("assistant", "bot"),
    "the last question is marked": LAST_QUESTION + "{% for m in messages %}"
    "{{ '[x]' if loop.index0 == ns.last else '[ ]' }}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + CALLS + TAIL + ASK,
}  # fmt: skip


def tokenizer_of(template):
    tokenizer = chat_tokenizer("qwen3", template)
    tokenizer.add_tokens(["<|close|>", "<|user|>", "<|assistant|>", "<|tool|>"], special_tokens=True)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def rows_of(tokenizer, tally=None, where="chats.jsonl:7", **row):
    """Rows of a chat as [(text, has loss), ...]."""
    document = {"id": "7", "where": where, **content(row, where)}
    rows = []
    for each in render([document], tokenizer, tally):
        parts, end = [], 0
        for has_loss, run in groupby(each["loss_mask"]):
            start, end = end, end + len(list(run))
            parts.append((tokenizer.decode(each["input_ids"][start:end]), bool(has_loss)))
        rows.append(parts)
    return rows


def answers_of(rows):
    return [[text for text, has_loss in row if has_loss] for row in rows]


def said(role, text="", **more):
    return {"role": role, "content": text, **more}


def call(arguments='{"city": "Rome"}', name="look_up"):
    return [{"id": "abcdefgh1", "type": "function", "function": {"name": name, "arguments": arguments}}]


TWO = [said("user", "a"), said("assistant", "1."), said("user", "b"), said("assistant", "2."), said("user", "c")]
THINKS = [
    said("user", "a"),
    said("assistant", "1.", reasoning_content="One."),
    said("user", "b"),
    said("assistant", "2.", reasoning_content="Two."),
]
TOOLS = [
    said("user", "q"),
    {"role": "assistant", "content": None, "tool_calls": call()},
    said("tool", "22"),
    said("assistant", "It is 22."),
    said("user", "r"),
    said("assistant", "33."),
]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
END = "<|im_end|>"
CASES = [
    ("ChatML with tools", TWO, [["1." + END, "2." + END]]),
    ("ChatML with tools", TOOLS, [[CALL, "It is 22." + END, "33." + END]]),
    ("Qwen 3: empty marks before the last answer", TWO, [["1." + END, "2." + END]]),
    ("Qwen 3: empty marks before the last answer", TOOLS, [[CALL, "It is 22." + END, EMPTY + "33." + END]]),
    (
        "Qwen 3.5: thinking after the last question, which the generation prompt opens",
        TOOLS,
        [[CALL, "It is 22." + END, "\n</think>\n\n33." + END]],
    ),
    (
        "Qwen 3.5: thinking after the last question, which the generation prompt opens",
        THINKS,
        [["One.\n</think>\n\n1." + END], ["Two.\n</think>\n\n2." + END]],
    ),
    (
        "thinking of earlier turns is dropped",
        THINKS,
        [["<think>\nOne.\n</think>\n\n1." + END], ["<think>\nTwo.\n</think>\n\n2." + END]],
    ),
    ("thinking of earlier turns is dropped", TOOLS, [[CALL, "It is 22." + END, "33." + END]]),
    ("R1: the generation prompt opens thinking, turns have none", TWO, [["1." + END, "2." + END]]),
    (
        "Nemotron 3: the generation prompt opens thinking, turns have empty marks",
        TWO,
        [["<think></think>1." + END, "<think></think>2." + END]],
    ),
    ("Phi 3: a token closes the chat", TWO, [["1." + END, "2." + END]]),
    ("gpt-oss: the last turn ends with another token", TWO[:4], [["1.<|close|>"], ["2.<|close|>"]]),
    ("no generation prompt", TWO, [["1." + END, "2." + END]]),
    ("GLM: the next turn's token ends a turn", TWO, [["1.<|user|>", "2.<|user|>"]]),
    ("GLM: the next turn's token ends a turn", TWO[:4], [["1.<|user|>", "2."]]),
    ("the prompt asks with another name", TWO, [["1." + END, "2." + END]]),
    ("the last question is marked", TWO, [["1." + END], ["2." + END]]),
]


@pytest.mark.parametrize(("name", "messages", "right"), CASES)
def test_every_answer_has_loss_whatever_a_template_writes_around_it(name, messages, right):
    assert answers_of(rows_of(tokenizer_of(TEMPLATES[name]), messages=messages)) == right


def chats(draw, tools, thoughts):
    """A random chat whose turns have words of their own (u3, a4, t5, r6) among words that all turns share."""
    shared = [
        "the",
        "same",
        "日本",
        "naïve ✓",
        "assistant\n",
        "<|im_end|",
        "u",
        "\n\n",
        "a?",
        "</tool_call>"[:5],
        "  x",
    ]

    def words(own):
        return " ".join([own, *draw.choices(shared, k=draw.randrange(5))]).strip()

    messages = [said("system", words("s0"))] if draw.random() < 0.3 else []
    for _ in range(draw.randrange(1, 5)):
        messages.append(said("user", words(f"u{len(messages)}.")))
        for _ in range(draw.randrange(3) if tools else 0):
            text = words(f"a{len(messages)}.") if draw.random() < 0.5 else None
            messages.append({"role": "assistant", "content": text, "tool_calls": call(name=f"f{len(messages)}.")})
            messages.append(said("tool", words(f"t{len(messages)}.")))
        answer = said("assistant", words(f"a{len(messages)}."))
        if thoughts and draw.random() < 0.4:
            answer["reasoning_content"] = words(f"r{len(messages)}.")
        messages.append(answer)
    return messages if draw.random() < 0.7 else [*messages, said("user", "u99.")]


def without_marks(text):
    return re.sub(r"<think>\s*</think>\n*", "", text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_chats_have_loss_on_every_answer_once_and_on_nothing_else(name):
    tokenizer, draw = tokenizer_of(TEMPLATES[name]), random.Random(name)
    for number in range(60):
        messages = chats(draw, tools=number % 2, thoughts="reasoning_content" in TEMPLATES[name])
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        owned = {i: f"f{i}." if "tool_calls" in messages[i] else f"a{i}." for i in answers}
        seen = []
        for row in rows_of(tokenizer, messages=messages):
            context = ""
            for text, has_loss in row:
                if has_loss:
                    [i] = [i for i, own in owned.items() if own in text]
                    seen.append(i)
                    assert not re.search(r"\b[ust]\d+\.", text), "no text of a user, a system or a tool"
                    assert "<|im_start|>" not in text
                    assert "<|assistant|>" not in text
                    asked, written = (
                        tokenizer.apply_chat_template(
                            rows_as_templates_take_them(messages[:count]), tokenize=False, add_generation_prompt=ask
                        )
                        for count, ask in ((i, True), (i + 1, False))
                    )
                    if written.startswith(asked) and name != "no generation prompt":
                        opened = "<think>\n"  # a prompt opens what history leaves out
                        ends = [without_marks(each).removesuffix(opened) for each in (context, asked)]
                        assert ends[0] == ends[1]
                    assert without_marks(written).startswith(
                        without_marks(context + re.sub(r"<\|(user|tool)\|>$", "", text))
                    )
                context += text
        assert sorted(seen) == answers


def rows_as_templates_take_them(messages):
    """Tool calls with objects and without nulls, by another way than the package's."""
    taken = json.loads(json.dumps(messages).replace(r'"{\"city\": \"Rome\"}"', '{"city": "Rome"}'))
    return [{**message, "content": message["content"] or ""} for message in taken]


def test_answers_that_share_a_context_share_a_row():
    tokenizer = tokenizer_of(TEMPLATES["thinking of earlier turns is dropped"])
    tools = [said("user", "q"), {**said("assistant", "", reasoning_content="Hm."), "tool_calls": call()}]
    tools += [said("tool", "22"), said("assistant", "It is 22.", reasoning_content="So."), *TWO[:4]]
    rows = answers_of(rows_of(tokenizer, messages=tools))
    assert [len(row) for row in rows] == [2, 2], "two with their thinking, then two after it is dropped"


@pytest.mark.parametrize("name", ["counts the turns", "shortens what lies behind"])
def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_each_answer(name):
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    template = {
        "counts the turns": "{{ messages | length }} turns\n" + CHATML,
        "shortens what lies behind": "{% for m in messages %}{% if loop.last %}" + turn + "{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content[:4] }}<|im_end|>\n{% endif %}{% endfor %}" + ASK,
    }[name]
    messages = [
        said("user", "When?"),
        said("assistant", "On the 3rd."),
        said("user", "Where?"),
        said("assistant", "Fresno"),
    ]
    rows = rows_of(tokenizer_of(template), messages=messages)
    assert answers_of(rows) == [["On the 3rd." + END], ["Fresno" + END]]


def test_answers_of_templates_that_write_thinking_in_their_own_way_are_found():
    one_line = (
        HEAD
        + "{% if '</think>' in m.content %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1] | trim }}"
        "\n</think>\n\n{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}" + TAIL + ASK
    )
    messages = [said("user", "2+2?"), said("assistant", "<think>Two and two.</think>4")]
    assert answers_of(rows_of(tokenizer_of(one_line), messages=messages)) == [
        ["<think>\nTwo and two.\n</think>\n\n4" + END]
    ]


REPEATS = [
    [said("user", "Say: ok"), said("assistant", "Say: ok"), said("user", "ok"), said("assistant", "ok")],
    [said("user", "<|im_start|>assistant\nHi"), said("assistant", "Hi"), said("user", "1"), said("assistant", "11")],
]


@pytest.mark.parametrize("name", ["ChatML with tools", "no generation prompt"])
@pytest.mark.parametrize("messages", REPEATS)
def test_an_answer_that_repeats_the_question_or_another_answer_has_loss_once(name, messages):
    rows = rows_of(tokenizer_of(TEMPLATES[name]), messages=messages)
    assert answers_of(rows) == [[messages[1]["content"] + END, messages[3]["content"] + END]]


# What storage and servers add


def stored(tmp_path, rows, form):
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        return tmp_path / "rows.parquet"
    if form == "jsonl":
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "rows.jsonl"
    how = {"on_mixed_types": "use_json"} if form == "Json columns" else {}
    data = datasets.Dataset.from_list(rows, **how)
    if form == "Json columns in parquet":
        datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(tmp_path / "rows.parquet")
        return tmp_path / "rows.parquet"
    data.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


JSON = pytest.mark.skipif(not hasattr(datasets, "Json"), reason="needs a version of datasets with Json columns")


@pytest.mark.parametrize(
    "form",
    [
        "jsonl",
        "parquet",
        "saved dataset",
        pytest.param("Json columns", marks=JSON),
        pytest.param("Json columns in parquet", marks=JSON),
    ],
)
def test_nulls_that_a_table_adds_are_no_arguments_and_no_tools(tmp_path, form):
    rows = [
        {
            "messages": [said("user", "q"), {**said("assistant"), "tool_calls": call(arguments, name)}],
            "tools": [tool(name, **{key: {"type": kind} for key in arguments})],
        }
        for name, kind, arguments in (("f", "string", {"city": "Rome"}), ("g", "integer", {"n": 1}))
    ]
    template = "{{ tools | tojson }}" + TEMPLATES["ChatML with tools"]
    tokenizer, texts = tokenizer_of(template), []
    for document in read(str(stored(tmp_path, rows, form))):
        (row,) = render([document], tokenizer)
        texts.append(tokenizer.decode(row["input_ids"]))
    for text, row in zip(texts, rows, strict=True):
        tools, _, written = text.partition("<|im_start|>")
        assert json.loads(tools) == row["tools"]
        assert json.loads(re.search(r"<tool_call>(.*)</tool_call>", written, re.DOTALL)[1]) == {
            key: row["messages"][1]["tool_calls"][0]["function"][key] for key in ("name", "arguments")
        }


def test_a_null_that_the_model_wrote_stays():
    messages = [said("user", "q"), {**said("assistant"), "tool_calls": call('{"city": null}')}]
    assert (
        '{"city": null}' in answers_of(rows_of(tokenizer_of(TEMPLATES["ChatML with tools"]), messages=messages))[0][0]
    )


STRICT = (
    HEAD + "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}" + TAIL
)
TEXT_ARGUMENTS = CALLS.replace(
    "{{ c.function | tojson }}", "{{ '{' + c.function.arguments + '}' }}{{ c.function.name }}"
)
NULL_CONTENT = HEAD + "{% if m.content is string %}{{ m.content }}{% else %}" + CALLS + "{% endif %}" + TAIL + ASK
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("template", "row", "right"),
    [
        (STRICT + ASK, {"messages": [said("user", "q"), said("assistant", "1.", tool_calls=[])]}, "1." + END),
        (
            "{{ tools[0].function.name }}" + CHATML,
            {"messages": TWO[:2], "tools": json.dumps([tool("f")])},
            "1." + END,
        ),
        (CHATML, {"messages": json.dumps(TWO[:2])}, "1." + END),
        (CHATML, {"messages": [json.dumps(message) for message in TWO[:2]], "tools": None}, "1." + END),
        (CHATML, {"messages": [said("user", "q"), said("assistant", PARTS)]}, "one\ntwo" + END),
        (CHATML, {"messages": [said("assistant", "Hello!"), *TWO[:2]]}, "1." + END),
        (NULL_CONTENT, {"messages": TOOLS[:2]}, CALL),
        (
            HEAD + "{{ m.content or '' }}" + TEXT_ARGUMENTS + TAIL + ASK,
            {"messages": [said("user", "q"), {**said("assistant"), "tool_calls": call({"city": "Rome"})}]},
            '<tool_call>\n{{"city": "Rome"}}look_up\n</tool_call>' + END,
        ),
    ],
    ids=[
        "tool_calls: []",
        "tools as JSON text",
        "messages as JSON text",
        "each message as JSON text",
        "parts of text",
        "the assistant begins",
        "a template that writes calls without content only",
        "a template that takes arguments as text",
    ],
)
def test_tool_calls_are_read_as_servers_and_tables_store_them(template, row, right):
    assert answers_of(rows_of(tokenizer_of(template), **row)) == [[right]]


def test_a_call_under_a_template_without_tools_has_no_loss_and_is_counted(capsys):
    tally = Tally(0.05)
    template = HEAD + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + ASK
    assert answers_of(rows_of(tokenizer_of(template), tally, messages=TOOLS)) == [["It is 22." + END, "33." + END]]
    tally.warn("the train split")
    line = (
        "1 chats became 1 rows; 2 answers have loss, 1 have none: 1 x the chat template leaves out the answer's content"
    )
    assert line in capsys.readouterr().err
    with pytest.raises(
        SourceError, match=r"1 of 3 answers have no loss.*max_bad_rows 0\.05.*chats\.jsonl:7, message 2"
    ):
        tally.check("the train split")


def test_a_greeting_is_dropped_and_counted(capsys):
    tally = Tally()
    rows_of(tokenizer_of(CHATML), tally, messages=[said("assistant", "Hello!"), *TWO])
    tally.check("chats")
    tally.warn("chats")
    assert "1 answers before the first question are dropped" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_several_answers_is_tokenised_as_a_server_tokenises_each_request(family):
    tokenizer = chat_tokenizer(family)
    [document] = render([{"id": "0", "where": "x:1", "messages": TWO}], tokenizer)
    starts = [
        i
        for i, pair in enumerate(zip([0, *document["loss_mask"]], document["loss_mask"], strict=False))
        if pair == (0, 1)
    ]
    for count, start in zip((1, 3), starts, strict=True):
        asked = tokenizer.apply_chat_template(TWO[:count], tokenize=False, add_generation_prompt=True)
        assert tokenizer(asked, add_special_tokens=False)["input_ids"] == document["input_ids"][:start]


CLOSES = "<|im_end|><|assistant|>"
COHERE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|user|>"
    "{% if m.tool_calls %}<|tool|>" + CALLS + "<|close|>{% else %}<|assistant|>{{ m.content }}<|close|>{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|user|><|im_end|>{% endif %}"
)


def test_an_answer_begins_where_it_departs_from_the_generation_prompt():
    """Cohere's prompt opens thinking by a token that stands for itself; an answer without it begins with another."""
    rows = answers_of(rows_of(tokenizer_of(COHERE), messages=TOOLS[:4]))
    call_with_marks = "<|tool|>" + CALL.removesuffix(END) + "<|close|>"
    assert rows == [[call_with_marks, "<|assistant|>It is 22.<|close|>"]]


def test_a_template_that_reminds_of_its_tools_after_every_chat_gives_the_reminder_no_loss():
    """Command R+ does so: what follows an answer is the same for all of them, and is not the model's."""
    remind = "<|im_start|>system\nUse a tool.<|im_end|>\n"
    template = HEAD + "{{ m.content or '' }}" + CALLS + "{% if not m.tool_calls %}<|im_end|>{% endif %}\n{% endfor %}"
    rows = rows_of(tokenizer_of(template + remind + ASK), messages=TOOLS[:2])
    assert answers_of(rows) == [[CALL.removesuffix(END)]]


def test_tokens_after_the_first_end_token_are_not_of_the_answer():
    template = HEAD + "{{ m.content or '' }}" + CALLS + "{% if m.tool_calls %}" + CLOSES + "{% endif %}" + TAIL + ASK
    assert answers_of(rows_of(tokenizer_of(template), messages=TOOLS[:4])) == [[CALL, "It is 22." + END]]


THINKING = TEMPLATES["thinking of earlier turns is dropped"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_have_loss_under_each_of_their_names_or_the_answer_has_none(monkeypatch, name):
    """Also with a transformers that knows one name, as 5.17 to 5.20."""
    monkeypatch.setattr("transformers.utils.chat_template_utils._REASONING_FIELDS", (), raising=False)
    chat = [said("user", "a"), said("assistant", "1.", **{name: "One and none."})]
    ((answer,),) = answers_of(rows_of(tokenizer_of(THINKING), messages=chat))
    assert "One and none." in answer
    drops = THINKING.replace("m.reasoning_content", "m.other")
    with pytest.raises(RowError, match="leaves out the answer's thoughts"):
        rows_of(tokenizer_of(drops), messages=chat)


def test_a_template_without_thoughts_gives_loss_to_what_the_answers_say(capsys):
    """A dataset with thoughts would else have no answer to train on."""
    tally = Tally(0.05)
    chat = [said("user", "a"), said("assistant", "1.", reasoning_content="One and none.")]
    assert answers_of(rows_of(tokenizer_of(CHATML), tally, messages=chat)) == [["1." + END]]
    tally.check("chats")
    tally.warn("chats")
    assert "1 answers have loss; 1 without their thoughts, as the chat template is" in capsys.readouterr().err


def test_answers_that_a_row_marks_are_context_without_loss_and_are_counted(capsys):
    chat = [said("user", "a"), said("assistant", "1."), said("user", "b"), said("assistant", "2."), said("user", "c")]
    for mark in ({"weight": 0}, {"train": False}):
        tally = Tally(0.05)
        marked = [*chat[:1], {**chat[1], **mark}, *chat[2:], said("assistant", "3.", weight=1)]
        ((*answers,),) = answers_of(rows_of(tokenizer_of(CHATML), tally, messages=marked))
        assert answers == ["2." + END, "3." + END]
        tally.check("chats")
        tally.warn("chats")
        assert "2 answers have loss; 1 more are marked as not to be learnt" in capsys.readouterr().err
    tally = Tally(0.05)
    rejected = {"prompt": "a", "completion": "1.", "label": False}
    for tokenizer in (tokenizer_of(CHATML), tiny_tokenizer()):
        assert not list(render([{"id": "1", "where": "f:1", **content(rejected, "f:1")}], tokenizer, tally))
    assert (tally.bad, tally.skipped.total()) == (0, 2)


def test_every_message_of_a_context_is_written_or_its_answers_have_no_loss():
    only = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")
    chat = [said("user", "a"), said("assistant", "1."), said("function", "22"), said("assistant", "It is 22.")]
    tally = Tally(1.0)
    assert answers_of(rows_of(tokenizer_of(only), tally, messages=chat)) == [["1." + END]]
    assert list(tally.left_out) == ["the chat template leaves out messages of the role 'function'"]
