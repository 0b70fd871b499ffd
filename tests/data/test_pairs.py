"""Rows of encoder-decoder targets: what the encoder reads stays apart from what the decoder writes."""

import json

import pytest
from conftest import tiny_tokenizer
from datasets import load_from_disk
from encoder_decoders import save_encoder_decoder

from data.__main__ import main
from data.documents import RowError
from data.mixture import mixture_of
from data.prompts import Cut, conversations
from data.rendering import render
from data.rows import content


def test_targets_without_an_encoder_refuse_sources():
    row = content({"source_ids": [5], "input_ids": [299, 6]}, "line 1")
    with pytest.raises(RowError, match="encoder-decoder"):
        list(render([{"id": "a", "where": "line 1", **row}], tiny_tokenizer()))


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_generated_rows_keep_the_source_apart_and_are_prompts(tmp_path, family, monkeypatch):
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
