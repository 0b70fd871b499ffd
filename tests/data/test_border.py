"""One judgement of a row in every command: odd values make bad rows, and every row that is read is accounted for."""

import json

import pytest
from chat_templates import CHATML, chat_tokenizer
from odd_rows import ODD, said_of_rows, with_odd_values, write

from data.documents import RowError
from data.mixture import mixture_of
from data.prompts import Cut, conversations
from data.rows import content, errors_of_row
from data.sources import token_documents
from data.tally import Tally
from data.writers.server import TextOnly
from eval.suites import load_suite
from speculator.errors import UserError
from speculator.prompts import prompt_of
from speculator.server.errors import APIError
from speculator.server.schema import ChatRequest, CompletionRequest, parse

TEMPLATES = {
    "without calls": "{{ tools | tojson if tools }}" + CHATML,
    "careless": "{% for m in messages %}<|im_start|>{{ m.role + m.content.strip() }}<|im_end|>{% endfor %}"
    "{{ tools[0].function.name if tools }}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
}


ROWS = [*ODD, *with_odd_values()]


def tokenizer_of(name):
    return chat_tokenizer("qwen3", TEMPLATES[name])


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
    target = TextOnly(name="tiny", tokenizer=tokenizer, context_length=128)
    suite = load_suite(source, target, prompt_tokens=4, max_prompts=10**6, max_new_tokens=4)
    ((read, used, left_out),) = said_of_rows(capfd.readouterr().err).values()
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
