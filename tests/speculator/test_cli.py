import json
import subprocess
import sys

import pytest
from conftest import tiny_head
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculator.__main__ import main


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory):
    from speculator import MLPSpeculator, MLPSpeculatorConfig

    folder = tmp_path_factory.mktemp("head")
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("drafting", [[], ["--ngram"], ["--speculator"]])
def test_rows_out_are_the_targets_greedy_text(target_folder, head_folder, tmp_path, drafting):
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = ["def main():", "import sys", "class A"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    drafting = [*drafting, str(head_folder)] if drafting == ["--speculator"] else drafting
    flags = ["--prompts", str(prompts), "--output", str(output), "--max_new_tokens", "20", "--batch_size", "2"]
    assert main(["generate", "--target", str(target_folder), *drafting, *flags]) == 0
    tokenizer, model = AutoTokenizer.from_pretrained(target_folder), AutoModelForCausalLM.from_pretrained(target_folder)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == texts
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        expected = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
        assert row["tokens"] == expected
        assert row["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert row["tokens_per_step"] is None or row["tokens_per_step"] >= 1


def test_a_prompt_is_continued_on_the_terminal(target_folder):
    argv = [sys.executable, "-m", "speculator", "generate", "--target", str(target_folder), "--prompt", "import os"]
    done = subprocess.run([*argv, "--max_new_tokens", "8"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import os")
    assert "tokens/s" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "x", "--speculator", "nowhere"], "nowhere"),
        (["--prompt", ""], "prompt 1 is empty"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--max_new_tokens", "0"], "--max_new_tokens"),
    ],
)
def test_wrong_input_is_one_line(target_folder, capsys, flags, message):
    assert main(["generate", "--target", str(target_folder), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_heads_that_do_not_fit_are_refused(target_folder, head_folder, tmp_path, capsys):
    tiny_head().save_pretrained(tmp_path / "other")
    flags = ["generate", "--target", str(target_folder), "--prompt", "x", "--speculator"]
    assert main([*flags, str(tmp_path / "other")]) == 2
    assert "drafts from 32 tokens" in capsys.readouterr().err
    weights = tmp_path / "cut" / "model.safetensors"
    tiny_head().save_pretrained(weights.parent)
    weights.write_bytes(weights.read_bytes()[:100])
    assert main([*flags, str(weights.parent)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
