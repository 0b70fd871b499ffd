"""Rows of encoder-decoder targets: what the encoder reads stays apart from what the decoder writes."""

import json

import pytest
from conftest import tiny_tokenizer
from datasets import load_from_disk
from encoder_decoders import save_encoder_decoder

from data.__main__ import main
from data.mixture import mixture_of
from data.prepare import RowRequest, token_rows
from data.prompts import Cut, conversations
from data.rendering import Pairs, render
from data.rows import RowError, content
from data.sources import documents

_PAIRS = Pairs((299,), 8)


def document(**row) -> dict:
    return {"id": "a", "where": "line 1", **content(row, "line 1")}


def rendered(pairs: Pairs | None = _PAIRS, **row) -> dict:
    (made,) = render([document(**row)], tiny_tokenizer(), pairs=pairs)
    return made


@pytest.mark.parametrize("start", [[299], [299, 7]])
def test_the_encoder_reads_the_prompt_and_the_loss_covers_the_completion(start):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"  # not applied: the source is the prompt as it is
    prompt, completion = (tokenizer(text)["input_ids"] for text in ("import os", "def main"))
    (row,) = render([document(prompt="import os", completion="def main")], tokenizer, pairs=Pairs(start, 99))
    assert row["source_ids"] == prompt
    assert row["input_ids"] == [*start, *completion, 0]
    assert row["loss_mask"] == [0] * len(start) + [1] * (len(completion) + 1)


def test_a_forced_token_that_the_tokenizer_adds_is_not_doubled():
    first = tiny_tokenizer()("def main")["input_ids"][0]
    row = rendered(Pairs((299, first), 99), prompt="x", completion="def main")
    assert row["input_ids"][:2] == [299, first]
    assert row["input_ids"].count(first) == 1


def test_written_rows_are_read_as_they_are():
    row = {"source_ids": [5, 6, 7], "input_ids": [299, 8, 9, 0], "loss_mask": [0, 1, 1, 1]}
    assert rendered(**row) == {"id": "a", **row}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"text": "a text"}, '"prompt" and "completion"'),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, '"completion"'),
        ({"input_ids": [299, 5]}, '"completion"'),
        ({"source_ids": [5], "input_ids": [5, 6]}, "start tokens"),
        ({"source_ids": [300], "input_ids": [299, 6]}, "token 300"),
        ({"prompt": "", "completion": "a"}, "empty prompt"),
        ({"prompt": "import os " * 9, "completion": "a"}, "more than 8"),
    ],
)
def test_other_rows_are_refused_by_what_they_lack(row, fault):
    with pytest.raises(RowError, match=fault) as error:
        rendered(**row)
    assert "\n" not in str(error.value)


def test_targets_without_an_encoder_refuse_sources():
    with pytest.raises(RowError, match="encoder-decoder"):
        rendered(None, source_ids=[5], input_ids=[299, 6])


def test_every_pair_has_a_row_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    file, tokenizer = tmp_path / "pairs.jsonl", tiny_tokenizer()
    # The same answer to different prompts is no copy.
    pairs = [{"source_ids": [n, 7], "input_ids": [299, 8, 0], "loss_mask": [0, 1, 1]} for n in range(1, 41)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in [*pairs, pairs[0]]))
    assert len(list(documents(str(file), None))) == 40
    rows = token_rows(
        RowRequest(mixture=mixture_of([str(file)]), split="train", tokenizer=tokenizer, length=2, pairs=_PAIRS)
    )
    assert len({row["source_ids"][0] for row in rows}) == len(rows) >= 36
    assert {len(row["input_ids"]) for row in rows} == {2}  # cut at the row length
    assert (
        len(
            token_rows(
                RowRequest(
                    mixture=mixture_of([str(file)]),
                    split="train",
                    tokenizer=tokenizer,
                    length=2,
                    pairs=_PAIRS,
                    max_tokens=7,
                )
            )
        )
        == 3
    )


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_generated_rows_keep_the_source_apart_and_are_a_source_of_training(tmp_path, family, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    target = save_encoder_decoder(tmp_path / "target", family)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    texts = [f"import {name}" for name in ("os", "sys", "re", "json", "math", "time")]
    prompts.write_text("".join(json.dumps({"prompt": text, "completion": "x"}) + "\n" for text in texts))
    flags = ["--target", str(target), "--output", str(out), "--max_new_tokens", "6", "--batch_size", "4"]
    assert main(["generate", *flags, "--prompts", str(prompts)]) == 0
    tokenizer, rows = tiny_tokenizer(), list(load_from_disk(out / "rows"))
    assert [row["source_ids"] for row in rows] == [tokenizer(text)["input_ids"] for text in texts]
    assert all(row["input_ids"][0] == 299 and row["loss_mask"][:2] == [0, 1] for row in rows)
    read = list(
        token_rows(
            RowRequest(
                mixture=mixture_of([str(out)]), split="train", tokenizer=tokenizer, length=16, pairs=Pairs((299,), 16)
            )
        )
    )
    assert {tuple(row["source_ids"]) for row in read} < {tuple(row["source_ids"]) for row in rows}
    found, _ = conversations(mixture_of([str(out)]), None, tokenizer, Cut(4), 6)
    assert [prompt.ids for prompt in found] == [row["source_ids"] for row in rows]


@pytest.mark.parametrize(
    "flags",
    [
        ["generate", "--sources", "self"],
        ["generate", "--sources", "x.jsonl", "--server", "http://localhost:1"],
        ["prepare", "--sources", "x.jsonl", "--seq_length", "8"],
    ],
)
def test_what_cannot_make_such_rows_says_so_in_one_line(tmp_path, capsys, flags):
    target = save_encoder_decoder(tmp_path / "target")
    assert main([*flags, "--target", str(target), "--output", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "needs prompts" in line or "encoder-decoder" in line
    assert not (tmp_path / "out").exists()
