"""Bad rows are skipped, counted and reported; too many of them are an error."""

import json
import re

import datasets
import pytest
from chat_templates import chat_tokenizer

from data.__main__ import main
from data.mixture import SourceError, mixture_of
from data.prepare import RowRequest, save_rows, token_rows
from data.prompts import Cut, conversations
from data.rows import content
from data.sources import SPLITS, documents, token_documents
from data.tally import Tally
from speculator.errors import UserError

GOOD = [
    {"conversations": [{"from": "human", "value": f"Question {i}?"}, {"from": "gpt", "value": f"Answer {i}."}]}
    for i in range(200)
]
BAD = {
    "a chat without messages": {"conversations": []},
    '"from" is not one of': {"conversations": [{"from": ["human"], "value": "x"}]},
    'the "content" of a message is not a text': {"conversations": [{"from": "human", "value": {"text": "x"}}]},
    "not JSON": "{",
}


GOOD_CHAT = [{"role": "user", "content": "y"}, {"role": "assistant", "content": "z"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    yield tmp_path / "cache"
    datasets.enable_progress_bars()


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def prepared(source, most=0.05, length=16):
    return token_rows(
        RowRequest(
            mixture=mixture_of([source]),
            split="train",
            tokenizer=chat_tokenizer("llama3"),
            length=length,
            max_bad_rows=most,
        )
    )


def test_bad_rows_are_skipped_and_counted_by_reason(tmp_path, capsys):
    source = write(tmp_path / "chats.jsonl", [*GOOD, *BAD.values()])
    rows = prepared(source)
    assert len(rows) > 50
    said = capsys.readouterr().err.splitlines()
    (tmp_path / "good").mkdir()
    assert rows["input_ids"][:] == prepared(write(tmp_path / "good" / "chats.jsonl", GOOD))["input_ids"][:]
    assert capsys.readouterr().err.endswith("181 chats became 181 rows; 181 answers have loss\n")
    assert "chats.jsonl: 185 rows read, 181 used, 4 left out: " in said[0]
    assert all(f"1 x {kind}" in said[0] or f"1 x the chat {kind}" in said[0] for kind in BAD)
    assert [line[:2] for line in said[1:-1]] == ["  "] * 3
    assert all("chats.jsonl:20" in line for line in said[1:-1])


def test_cached_rows_repeat_the_warning(tmp_path, capsys):
    source = write(tmp_path / "chats.jsonl", [*GOOD, *BAD.values()])
    prepared(source)
    first = capsys.readouterr().err
    assert " left out: " in first
    prepared(source)
    assert capsys.readouterr().err == first
    with pytest.raises(SourceError, match=r"more than max_bad_rows 0\.001 allows"):
        prepared(source, most=0.001)


def test_too_many_bad_rows_fail_in_one_line_and_leave_nothing(tmp_path, cache):
    source = write(tmp_path / "chats.jsonl", [*GOOD[:40], *list(BAD.values()) * 5])
    with pytest.raises(SourceError, match=r"rows \(\d+\.\d%\) can't be used, more than max_bad_rows 0.05") as error:
        prepared(source)
    assert "\n" not in str(error.value)
    assert "; the first is " in str(error.value)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert len(prepared(source, most=0.5)) > 5


def test_a_hopeless_source_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("data.tally._HOPELESS", 10)
    tally = Tally(0.05)
    rows = documents(write(tmp_path / "rows.jsonl", [{"txt": str(i)} for i in range(1000)]), "train", tally=tally)
    with pytest.raises(SourceError, match="the first rows: 10 of 10 rows"):
        next(rows)


def test_a_chat_that_the_template_rejects_is_a_bad_row(tmp_path):
    system = {"messages": [{"role": "system", "content": "x"}, *GOOD_CHAT]}
    source = write(tmp_path / "rows.jsonl", [*GOOD, system])
    tally = Tally(0.05)
    assert len(list(token_documents(mixture_of([source]), None, chat_tokenizer("gemma"), tally=tally))) == 200
    assert tally.rows == 201
    assert list(tally.kinds) == ["the chat template rejects the messages: System role not supported"]
    with pytest.raises(SourceError, match=r"rows.jsonl:201: .*System role"):
        list(token_documents(mixture_of([source]), None, chat_tokenizer("gemma")))


def test_saved_rows_and_prompts_skip_bad_rows_too(tmp_path, capsys):
    source = write(tmp_path / "chats.jsonl", [*GOOD, *BAD.values()])
    request = RowRequest(
        mixture=mixture_of([source]), split="train", tokenizer=chat_tokenizer("llama3"), length=16, max_bad_rows=0.05
    )
    counts = save_rows(request, tmp_path / "rows")
    assert set(counts) == set(SPLITS)
    assert " left out: " in capsys.readouterr().err
    tally = Tally(0.05)
    assert len(conversations(mixture_of([source]), None, chat_tokenizer("llama3"), Cut(8), 999, tally=tally)[0]) == 200
    assert tally.bad == 4


def test_the_command_counts_bad_rows_and_limits_them(tmp_path, target_folder, capsys):
    texts = [{"text": f"def function_{i}(x):\n    return x + {i}\n"} for i in range(60)]
    source = write(tmp_path / "texts.jsonl", [*texts, {"txt": "x"}, {"text": 5}])
    flags = ["--target", str(target_folder), "--sources", source, "--output", str(tmp_path / "out")]
    sizes = ["--prompt_tokens", "8", "--max_new_tokens", "4", "--max_rows", "99"]
    assert main(["generate", *flags, *sizes, "--max_bad_rows", "0.001"]) == 2
    assert "max_bad_rows 0.001" in capsys.readouterr().err
    assert main(["generate", *flags, *sizes, "--max_bad_rows", "2"]) == 2
    assert "--max_bad_rows" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["generate", *flags, *sizes]) == 0
    read, used = re.search(r"(\d+) rows read, (\d+) used, 2 left out: ", capsys.readouterr().err).groups()
    assert int(read) == int(used) + 2


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "x"}] * 1001},
        {"text": "x" * 2_000_001},
        {"messages": [{"role": "user", "content": "x" * 1_500_000}] * 2},
        {"input_ids": [True, False]},
        {"input_ids": [1, 2.0]},
    ],
)
def test_rows_beyond_the_limits_are_errors(row):
    with pytest.raises(UserError, match=r"^rows:1: "):
        content(row, "rows:1")


def test_labels_mark_the_tokens_with_loss():
    row = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]}
    assert content(row, "f:1") == {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    assert content({**row, "loss_mask": [0, 0, 1]}, "f:1")["loss_mask"] == [0, 0, 1]
    with pytest.raises(UserError, match="2 values"):
        content({**row, "labels": [6, 7]}, "f:1")


def test_alpaca_and_conversational_prompts_are_chats():
    asked, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    chat = {"messages": [asked, answer]}
    assert content({"prompt": [asked], "completion": [answer]}, "f:1") == chat
    assert content({"instruction": "Q", "output": "A"}, "f:1") == chat
    assert content({"instruction": "Q", "input": "", "output": "A", "text": "all of it"}, "f:1") == chat
    longer = content({"system": "S", "instruction": "Q", "input": "I", "output": "A"}, "f:1")["messages"]
    assert longer == [{"role": "system", "content": "S"}, {**asked, "content": "Q\n\nI"}, answer]
    beside = {"system": "S", "messages": [asked, answer]}
    assert content(beside, "f:1")["messages"] == [{"role": "system", "content": "S"}, asked, answer]
    own = [{"role": "system", "content": "T"}, asked, answer]
    assert content({**beside, "messages": own}, "f:1")["messages"] == own
    sharegpt = {"system": "S", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}
    assert content(sharegpt, "f:1") == content(beside, "f:1")
    plain = {"prompt": "[1]", "completion": "[2]"}
    assert content(plain, "f:1") == plain
    with pytest.raises(UserError, match='"output" is not a text'):
        content({"instruction": "Q", "output": 3}, "f:1")
