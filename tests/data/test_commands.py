"""`python -m data prepare` and `view`: what they print and write."""

import json
import re

import pytest
from chat_templates import chat_tokenizer
from datasets import load_from_disk

from data.__main__ import main
from data.cli import view

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Question {i}?"},
            {"role": "assistant", "content": f"Answer {i}."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
        ]
    }
    for i in range(200)
]


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A folder with a tokenizer and no model."""
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    (tmp_path / "empty.jsonl").write_text("")
    chat_tokenizer("llama3").save_pretrained(tmp_path / "target")
    return "target"


def prepare(target, *flags):
    return main(["prepare", "--target", target, "--sources", "chats.jsonl", "--seq_length", "32", *flags])


def test_prepare_writes_rows_and_counts_them(target, tmp_path, capsys):
    assert prepare(target, "--output", "rows") == 0
    saved = load_from_disk("rows")
    lines = capsys.readouterr().out.splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert lines[0].split() == ["documents", "rows", "tokens", "with", "loss"]
    for split, rows in saved.items():
        mask = [value for row in rows["loss_mask"] for value in row]
        assert table[split][1:] == [str(len(rows)), f"{len(mask):,}", f"{sum(mask) / len(mask):.1%}"]
    documents = sum(int(row[0]) for row in table.values())
    assert 190 <= documents <= 200
    assert not list(tmp_path.glob("*.partial"))

    assert prepare(target, "--output", "rows") == 2
    assert capsys.readouterr().err.count("--output") == 1
    assert prepare(target, "--output", "few", "--max_tokens", "100") == 0
    assert {split: len(rows) for split, rows in load_from_disk("few").items()}["train"] == 3


def test_the_column_of_documents_counts_chats_and_not_the_rows_that_they_become(target, tmp_path, capsys):
    """Each answer with thoughts needs a row of its own, because Qwen 3's template drops those of earlier turns."""
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "target")
    turns = [
        ("user", "Why {i}?", None),
        ("assistant", "So.", "Hm."),
        ("user", "Sure?", None),
        ("assistant", "Yes.", "Well."),
    ]
    chats = [
        [{"role": role, "content": text.format(i=i), "reasoning_content": thought} for role, text, thought in turns]
        for i in range(30)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    assert prepare(target, "--output", "rows") == 0
    printed = capsys.readouterr()
    assert sum(int(line.split()[1]) for line in printed.out.splitlines()[1:-1]) == 30
    became = re.findall(r"(\d+) chats became (\d+) rows", printed.err)
    assert [sum(map(int, column)) for column in zip(*became, strict=True)] == [30, 60]


def test_view_marks_the_text_with_loss(target, monkeypatch, capsys):
    assert main(["view", "chats.jsonl", "--target", target, "--rows", "2"]) == 0
    first, second = re.split(r"\n(?=---)", capsys.readouterr().out)
    assert re.match(r"--- chats.jsonl:1: \d+ tokens, \d+ with loss\n", first)
    assert first.split("\n", 1)[1] == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQuestion 0?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Answer 0.<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Yes.<|eot_id|>]]"
    )
    assert "[[Answer 1.<|eot_id|>]]" in second

    monkeypatch.setattr(view, "colours", lambda stream: True)
    assert main(["view", "chats.jsonl", "--target", target, "--rows", "1"]) == 0
    out = capsys.readouterr().out
    assert "\n\x1b[2m<|begin_of_text|>" in out
    assert "\x1b[32mAnswer 0.<|eot_id|>\x1b[0m\x1b[2m<|start_header_id|>user" in out


def test_view_shows_no_escape_of_a_text_as_one(target, tmp_path, capsys):
    rows = ["{", json.dumps({"text": "\x1b]0;owned\x07\x1b[31mred\r"})]
    (tmp_path / "odd.jsonl").write_text("\n".join(rows))
    assert main(["view", "odd.jsonl", "--target", target]) == 0
    out, error = capsys.readouterr()
    assert r"\x1b]0;owned\x07\x1b[31mred\r" in out
    assert not set(out) & set("\x1b\x07\r")
    assert "odd.jsonl: 2 rows read, 1 used, 1 left out: 1 x not JSON" in error


def test_view_shows_a_prepared_row_document_by_document(target, capsys):
    prepare(target, "--output", "rows")
    capsys.readouterr()
    assert main(["view", "rows", "--target", target, "--rows", "9"]) == 0
    rows = re.split(r"^--- (?=rows:train:)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert len(rows) == 9
    stored = load_from_disk("rows")["train"].select(range(9))
    sizes = list(map(len, stored["input_ids"]))
    shown = zip(rows, sizes, strict=True)
    assert all(re.match(rf"rows:train:{i}: {n} tokens, \d+ with loss\n", row) for i, (row, n) in enumerate(shown, 1))
    assert [row.count("\n-\n") for row in rows] == [max(ids) - ids[0] for ids in stored["document_ids"]]
    assert max(map(max, stored["document_ids"])) > 0


def test_view_prints_when_there_are_more_rows(target, capsys):
    assert main(["view", "chats.jsonl", "--target", target]) == 0
    assert "--rows" in capsys.readouterr().err
    assert main(["view", "chats.jsonl", "--target", target, "--rows", "200"]) == 0
    assert "--rows" not in capsys.readouterr().err


def test_exact_copies_are_counted(target, tmp_path, capsys):
    rows = [CHATS[i % 2] for i in range(60)]
    (tmp_path / "copies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["prepare", "--target", target, "--output", "rows", "--sources", "copies.jsonl", "--seq_length", "500"]
    assert main(command) == 0
    read, used, copies = re.search(
        r"(\d+) rows read, (\d+) used, \d+ left out: (\d+) x exact copies", capsys.readouterr().err
    ).groups()
    assert int(read) == int(used) + int(copies)
    assert int(used) <= 2


def test_text_parts_are_read_as_text(target, tmp_path, capsys):
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "question?"}]
    shown = []
    for name, content in (("parts", parts), ("text", "One\nquestion?")):
        messages = [{"role": "user", "content": content}, *CHATS[0]["messages"][1:]]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
        assert main(["view", f"{name}.jsonl", "--target", target]) == 0
        shown.append(capsys.readouterr().out.partition("\n")[2])
    assert shown[0] == shown[1] != ""
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, *CHATS[0]["messages"][1:]]
    (tmp_path / "image.jsonl").write_text(json.dumps({"messages": image}) + "\n")
    assert main(["view", "image.jsonl", "--target", target]) == 2


def test_without_colours_text_with_loss_is_in_brackets(target, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = {}
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert main(["view", "chats.jsonl", "--target", target]) == 0
        shown[no_color] = capsys.readouterr().out
    assert "\x1b[32m" in shown[""]
    assert "\x1b" not in shown["1"]
    assert "[[" in shown["1"]


def test_rows_are_rendered_with_the_variables_of_the_run(target, capsys):
    tokenizer = chat_tokenizer("llama3")
    tokenizer.chat_template = "{{ style }}" + tokenizer.chat_template
    tokenizer.save_pretrained(target)
    variables = ["--chat_template_kwargs", '{"style": "STYLE"}', "--trust_remote_code"]
    assert main(["view", "chats.jsonl", "--target", target, *variables]) == 0
    assert "STYLE<|begin_of_text|>" in capsys.readouterr().out
    assert prepare(target, "--output", "rows", *variables) == 0
    assert "STYLE" in tokenizer.decode(load_from_disk("rows")["train"][0]["input_ids"])


def test_view_names_answers_that_the_row_excludes(target, tmp_path, capsys):
    asked, answer, *rest = CHATS[0]["messages"]
    (tmp_path / "marked.jsonl").write_text(json.dumps({"messages": [asked, {**answer, "weight": 0}, *rest]}) + "\n")
    assert main(["view", "marked.jsonl", "--target", target]) == 0
    out = capsys.readouterr().out
    assert "    1 answers have no loss: the row marks them" in out
    assert ("[[Yes.<|eot_id|>]]" in out, "[[Answer" in out) == (True, False)
