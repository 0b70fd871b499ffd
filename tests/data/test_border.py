"""One judgement of a row in every command: odd values make bad rows, and every row that is read is accounted for."""

import copy
import json
import re

import pytest
from chat_templates import CHATML, chat_tokenizer
from conftest import save_tiny, tiny_tokenizer

from data.__main__ import main
from data.mixture import mixture_of
from data.prompts import Cut, conversations
from data.rows import RowError, content, errors_of_row
from data.sources import token_documents
from data.tally import Tally
from eval.suites import load_suite
from speculator.errors import UserError
from speculator.prompts import prompt_of
from speculator.server.errors import APIError
from speculator.server.schema import ChatRequest, CompletionRequest, parse

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm.", "weight": 1, "train": True},
    {"role": "tool", "content": "22", "tool_call_id": "1", "name": "f"},
    {"role": "assistant", "content": "In Rome."},
]
GOOD = [
    {"messages": MESSAGES, "tools": [TOOL], "category": "a"},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 0}]},
    {"conversation": MESSAGES[1:2] + MESSAGES[4:]},
    {"prompt": "def f(x):", "completion": " return x", "label": True},
    {"prompt": MESSAGES[1:2], "chosen": MESSAGES[4:], "rejected": MESSAGES[4:]},
    {"instruction": "Say hi.", "input": "", "output": "Hi.", "system": "Be brief."},
    {"input": MESSAGES[1:2], "output": "Hello."},
    {"instruction": "Say hi.", "context": "x", "response": "Hi."},
    {"text": "Any text that is long enough to be cut."},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "rejected": [0, 0, 1], "document_ids": [0, 0, 1]},
    {"turns": ["One?", "Two?"], "category": "b"},
    {"question": "How many?", "category": "b"},
]
ODD = [None, 7, 0.5, True, "text", "\ud800", "", "[", [], [None], [[]], ["a"], {}, {"a": 1}, {"function": 5}]
TOOLS = "{{ tools | tojson if tools }}"
TEMPLATES = {
    "without calls": TOOLS + CHATML,
    "with calls": TOOLS
    + CHATML.replace(
        "{{ m.content }}",
        "{{ m.reasoning }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}",
    ),
    "careless": "{% for m in messages %}<|im_start|>{{ m.role + m.content.strip() }}<|im_end|>{% endfor %}"
    "{{ tools[0].function.name if tools }}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
}


def places(value, place=()):
    """Yield the path to every value inside a row."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places(value[key], (*place, key))


def odd_rows():
    """Yield rows in which one value is replaced, and rows that are no objects."""
    yield from ODD
    for row in GOOD:
        for *outer, key in places(row):
            for value in ODD:
                changed = holder = copy.deepcopy(row)
                for step in outer:
                    holder = holder[step]
                holder[key] = value
                yield changed


ROWS = list(odd_rows())


class Model:
    name, context_length, encoder = "tiny", 128, None

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


def tokenizer_of(name):
    return chat_tokenizer("qwen3", TEMPLATES[name])


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def accounted(tally):
    return tally.used + tally.skipped.total() + tally.bad


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_odd_value_anywhere_in_a_row_is_a_bad_row_and_no_traceback(tmp_path, template, capfd):
    assert len(ROWS) > 1000
    source, tokenizer = write(tmp_path / "rows.jsonl", ROWS), tokenizer_of(template)
    for read in (
        lambda tally: list(token_documents(mixture_of([source]), None, tokenizer, tally=tally)),
        lambda tally: conversations(mixture_of([source]), None, tokenizer, Cut(4), 10**6, tally=tally),
        lambda tally: conversations(mixture_of([source]), None, tokenizer, Cut(4, last_turn=True), 10**6, tally=tally),
    ):
        tally = Tally(max_share=1.0)
        read(tally)
        assert tally.rows == len(ROWS) == accounted(tally)
        assert tally.used > 100 < tally.bad
        assert not [kind for kind in tally.kinds if kind.startswith("can't be read")], "no type that nobody foresaw"
    capfd.readouterr()
    suite = load_suite(source, Model(tokenizer), prompt_tokens=4, max_prompts=10**6, max_new_tokens=4)
    read, used, left_out = counts(capfd.readouterr().err)
    assert read == len(ROWS) == used + left_out
    assert used == len(suite.prompts) > 100


def test_an_odd_value_in_a_prompt_or_a_request_is_one_line():
    tokenizer = tokenizer_of("careless")

    def asked(row):
        prompt_of("rows:1", row).tokens(tokenizer)

    def chat(row):
        body = {key: row[key] for key in ("messages", "tools") if key in row} if isinstance(row, dict) else row
        parse(ChatRequest, json.dumps(body).encode()).prompt().tokens(tokenizer)

    def completion(row):
        body = {"prompt": row["prompt"]} if isinstance(row, dict) and "prompt" in row else {"prompt": row}
        parse(CompletionRequest, json.dumps(body).encode())

    for read in (asked, chat, completion):
        faults = []
        for row in ROWS:
            try:
                read(row)
            except (APIError, UserError) as error:
                faults.append(str(error))
        assert 100 < len(faults) < len(ROWS)
        assert not [fault for fault in faults if "\n" in fault]


def counts(text):
    """Add up what the lines of a command say of rows: (read, used, left out)."""
    found = re.findall(r": ([\d,]+) rows read, ([\d,]+) used(?:, ([\d,]+) left out)?", text)
    assert found, text
    return [sum(int(each.replace(",", "") or 0) for each in column) for column in zip(*found, strict=True)]


def test_every_command_accounts_for_every_row(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    target = save_tiny("llama", tmp_path / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(target)
    odd = [
        {"messages": [{"role": "user", "content": 5}]},
        {"text": "  "},
        {"prompt": "a", "completion": "b", "label": False},
    ]
    good = [{"text": f"Text {i} that is long enough for a prompt."} for i in range(300)]
    rows = [*good[:10], *odd, *good[9:]]
    source = write(tmp_path / "rows.jsonl", rows)
    flags = ["--target", str(target)]
    output = ["--seq_length", "32", "--num_proc", "1", "--output", str(tmp_path / "out")]
    assert main(["prepare", *flags, "--sources", source, *output]) == 0
    assert counts(capfd.readouterr().err) == [len(rows), 300, 4]
    assert main(["view", source, *flags, "--rows", "999"]) == 0
    assert counts(capfd.readouterr().err) == [len(rows), 300, 4]
    size = ["--prompt_tokens", "4", "--max_new_tokens", "2", "--output", str(tmp_path / "own")]
    assert main(["generate", *flags, "--sources", source, *size]) == 0
    read, used, left_out = counts(capfd.readouterr().err)
    assert read == used + left_out


def test_an_error_that_nobody_foresaw_is_a_bad_row_too():
    with pytest.raises(RowError, match=r"^rows:1: can't be read: KeyError") as error, errors_of_row("rows:1"):
        {}["a"]
    assert error.value.kind == "can't be read: KeyError"


def test_rows_name_what_is_near_and_preferences_are_read_by_their_choice():
    asked, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    chat = {"messages": [asked, answer]}
    for row in (
        {"prompt": [asked], "chosen": [answer], "rejected": [asked]},
        {"prompt": "Q", "chosen": [asked, answer], "rejected": [asked, asked]},
        {"instruction": "Q", "response": "A"},
        {"input": [asked], "output": "A"},
        {"conversation": [asked, answer]},
    ):
        assert content(row, "f:1") == chat
    assert content({"prompt": "Q", "chosen": "A", "rejected": "B"}, "f:1") == {"prompt": "Q", "completion": "A"}
    with pytest.raises(RowError, match='"Mesages" is near "messages"; its keys are id, Mesages'):
        content({"id": 1, "Mesages": []}, "f:1")
