"""`python -m data generate` on the command line."""

import gzip
import json
import shutil

import pytest
import torch
from chat_templates import CHATML
from datasets import load_from_disk
from transformers import AutoTokenizer

from data.__main__ import main
from data.mixture import mixture_of
from data.sources import token_documents
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    torch.manual_seed(1)
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("drafting", [True, False])
def test_text_is_cut_into_prompts_and_continued(target_folder, head_folder, text_file, tmp_path, capsys, drafting):
    flags = ["--target", str(target_folder), "--sources", str(text_file), "--output", str(tmp_path / "out")]
    flags += ["--speculator", str(head_folder), "--num_speculative_tokens", "2"] if drafting else []
    sizes = ["--max_rows", "5", "--prompt_tokens", "16", "--max_new_tokens", "8", "--batch_size", "2", "--top_k", "50"]
    assert main(["generate", *flags, *sizes]) == 0
    rows = list(load_from_disk(tmp_path / "out" / "rows"))
    assert [len(row["input_ids"]) for row in rows] == [len(row["loss_mask"]) for row in rows]
    assert [row["loss_mask"].index(1) for row in rows] == [16] * 5
    assert {tuple(row["input_ids"][:16]) for row in rows} != 1
    text = AutoTokenizer.from_pretrained(target_folder).decode(rows[0]["input_ids"][:16])
    assert text in "".join(json.loads(line)["text"] for line in text_file.read_text().splitlines())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["sampling"]["top_k"] == 50
    assert (manifest["tokens_per_second"]["speculative"] is not None) == drafting
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"5 rows, {manifest['tokens']} new tokens" in line
    assert ("x)" in line) == drafting


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_prompts_come_from_a_file(target_folder, tmp_path, name):
    file = tmp_path / name
    with (gzip.open if name.endswith("gz") else open)(file, "wt") as stream:
        stream.write('{"prompt": "import os"}\n{"prompt": "def main():"}\n{"prompt": "x"}\n')
    flags = ["--target", str(target_folder), "--prompts", str(file), "--output", str(tmp_path / "out")]
    assert main(["generate", *flags, "--max_new_tokens", "4", "--max_rows", "2"]) == 0
    rows = list(load_from_disk(tmp_path / "out" / "rows"))
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    for row, prompt in zip(rows, ["import os", "def main():"], strict=True):
        ids = tokenizer(prompt)["input_ids"]
        assert row["input_ids"][: len(ids)] == ids
    read = list(token_documents(mixture_of([str(tmp_path / "out")]), None, tokenizer))
    assert [document["input_ids"] for document in read] == [row["input_ids"] for row in rows], "a source like any other"


def test_the_tools_of_a_chat_are_part_of_its_prompt(target_folder, tmp_path, capsys):
    template = "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML
    target, file = shutil.copytree(target_folder, tmp_path / "target"), tmp_path / "prompts.jsonl"
    (target / "chat_template.jinja").write_text(template)
    asked = [{"role": "user", "content": "Hi"}]
    rows = [
        {"messages": asked, "tools": [{"name": "search"}]},
        {"messages": [{"role": "user", "content": "Hi " * 200}]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "import os"}]))
    flags = ["--target", str(target), "--prompts", str(file), "--output", str(tmp_path / "out")]
    assert main(["generate", *flags, "--max_new_tokens", "4"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    first, second = (tokenizer.decode(row["input_ids"]) for row in load_from_disk(tmp_path / "out" / "rows"))
    assert first.startswith("search<|im_start|>user\nHi<|im_end|>")
    assert second.startswith("import os")
    assert "prompts.jsonl: 1 prompts are skipped" in capsys.readouterr().err

    out = [*flags[:-1], str(tmp_path / "none"), "--max_new_tokens", "128"]
    assert main(["generate", *out]) == 2
    assert "prompts.jsonl: none of its 3 prompts fits" in capsys.readouterr().err
    server = [*out, "--server", "http://127.0.0.1:9"]
    assert main(["generate", *server]) == 2
    assert "prompts.jsonl: none of its 3 prompts fits" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_answers_that_reach_their_limit_are_counted(target_folder, tmp_path, capsys):
    target, file = shutil.copytree(target_folder, tmp_path / "target"), tmp_path / "prompts.jsonl"
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("Hi", "Ho")]
    kinds = {"chats": (chats, 2), "texts": ([{"prompt": "import os"}], 0)}  # a continuation of text has no end
    (target / "chat_template.jinja").write_text(CHATML + "{# <think> #}")
    for name, (rows, cut) in kinds.items():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = ["--target", str(target), "--prompts", str(file), "--output", str(tmp_path / name)]
        assert main(["generate", *flags, *["--max_new_tokens", "2"]]) == 0
        assert json.loads((tmp_path / name / "manifest.json").read_text())["cut"] == cut
        warned = f"warning: {cut} of {len(rows)} answers reached --max_new_tokens 2" in capsys.readouterr().err
        assert warned == bool(cut)
    flags[-1] = str(tmp_path / "limit")
    assert main(["generate", *flags]) == 0
    assert json.loads((tmp_path / "limit" / "manifest.json").read_text())["max_new_tokens"] == 64, "half its context"


def test_an_output_folder_that_is_no_text_fails_in_one_line(target_folder, text_file, tmp_path, capsys):
    flags = ["--target", str(target_folder), "--sources", str(text_file), "--prompt_tokens", "8"]
    assert main(["generate", *flags, "--output", "out\udcff"]) == 2
    assert "--output" in capsys.readouterr().err


def test_an_output_folder_may_have_any_name(target_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    flags = ["--target", str(target_folder), "--prompts", "in.jsonl", "--max_new_tokens", "2"]
    for name in ("~", "a\x1b[2J"):
        assert main(["generate", *flags, "--output", name]) == 0
        assert (tmp_path / name / "rows").is_dir()
    assert "a\\x1b[2J: 1 rows, 2 new tokens" in capsys.readouterr().err
