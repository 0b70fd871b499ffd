"""A fine-tune whose generation config kept the base model's EOS stops where its chat template ends a turn."""

import json
from itertools import pairwise

import httpx
import pytest
from chat_targets import chatty, save, tiny_llama
from datasets import load_from_disk
from serving_here import serving

from data.__main__ import main as data_main
from speculator import Target, generate
from speculator.prompts import read_prompts
from train.command_line import parse
from train.options.config import ROOT
from train.run import run as run_all

BASE_EOS = 7
LONG = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = chatty(tiny_llama())
    target.model.generation_config.eos_token_id = BASE_EOS
    return save(target, tmp_path_factory.mktemp("fine-tune"))


@pytest.fixture(scope="module")
def target(folder):
    return Target.load(str(folder))


@pytest.fixture
def prompts(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "prompts.jsonl"


def check(answers, end):
    """Some answers end with the end token, and none goes on after it."""
    assert any(answer[-1] == end for answer in answers)
    assert not any(end in answer[:-1] for answer in answers)


def test_the_end_is_known_and_logged_once(folder, capsys):
    target = Target.load(str(folder))
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert {BASE_EOS, end} <= target.eos_token_ids
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "generation config" in line]
    assert "<|im_end|>" in line
    target.model.generation_config.eos_token_id = None
    assert end in target.eos_token_ids


def test_generate_stops_at_the_end_token_of_the_template(target, prompts):
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [prompt.tokens(target.tokenizer) for _, prompt in read_prompts(prompts)]
    check(generate(target, None, ids, max_new_tokens=LONG).tokens, end)


def test_the_server_stops_at_the_end_token_of_the_template(target):
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    with serving(target) as (url, _):
        answers = []
        for seed in range(12):
            body = {"messages": [{"role": "user", "content": "q"}], "seed": seed, "max_tokens": LONG}
            body["return_token_ids"] = True
            (choice,) = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
            answers.append(choice["token_ids"])
            assert choice["finish_reason"] == ("stop" if choice["token_ids"][-1] == end else "length")
    check(answers, end)


def answers_in(rows):
    for row in rows:
        edges = [i for i, (a, b) in enumerate(pairwise([0, *row["loss_mask"], 0])) if a != b]
        yield from (row["input_ids"][a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))


def test_generated_data_stops_at_the_end_token_of_the_template(folder, target, prompts, tmp_path):
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    flags = ["--target", str(folder), "--prompts", str(prompts), "--max_new_tokens", str(LONG)]
    assert data_main(["generate", *flags, "--output", str(tmp_path / "out")]) == 0
    check(list(answers_in(load_from_disk(str(tmp_path / "out" / "rows")))), end)


@pytest.mark.soak
def test_stage_2_stops_at_the_end_token_of_the_template(folder, target, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = [[{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "a"}] for i in range(300)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    settings = {
        "config": ROOT / "tests/plain.yaml",
        "target.name_or_path": folder,
        "data.sources": f"[{tmp_path / 'chats.jsonl'}]",
        "output_dir": tmp_path / "run",
        "data.seq_length": 32,
        "stage2.generate.max_rows": 24,
        "stage2.generate.max_new_tokens": LONG,
        "speculator.n_predict": 2,
        "eval.validation_rows": 2,
        "eval.validation_prompts": 2,
        "eval.tune_prompts": 0,
        "eval.max_prompts": 2,
        "eval.max_new_tokens": 8,
        "report_to": "none",
    }
    for stage in ("stage1", "stage2"):
        settings |= {f"{stage}.{name}": 2 for name in ("per_device_train_batch_size", "max_steps", "save_steps")}
        settings |= {f"{stage}.eval_steps": 2, f"{stage}.warmup_steps": 0, f"{stage}.logging_steps": 1}
    run_all(parse([word for key, value in settings.items() for word in (f"--{key}", str(value))]))
    check(list(answers_in(load_from_disk(str(tmp_path / "run" / "generated" / "rows")))), end)
