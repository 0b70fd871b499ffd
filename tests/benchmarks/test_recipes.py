"""The recipes on a GPU, rehearsed on the CPU: the same code at tiny sizes."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import plan, recipes
from benchmarks.plan import sizes
from benchmarks.recipes import CASES, Case, rows_of, run
from train.place import Place
from train.plan import MOMENTS, TARGET, WEIGHTS

CPU = torch.device("cpu")


def tiny():
    return LlamaConfig(**sizes(64, 7, 3000), bos_token_id=None, eos_token_id=None, pad_token_id=None)


@pytest.fixture
def small(monkeypatch):
    """Recipes of a few short rows, with heads of few weights."""
    own = Case.config

    def config(case):
        made = own(case)
        head = replace(made.speculator, inner_dim=64, n_predict=2, draft_vocab_size=0, options={})
        stage = replace(made.stage1, per_device_train_batch_size=2)
        generate = replace(made.stage2.generate, batch_size=2, prompt_tokens=8, max_new_tokens=4)
        stage2, data = replace(made.stage2, generate=generate), replace(made.data, seq_length=32)
        return replace(made, speculator=head, stage1=stage, stage2=stage2, data=data)

    monkeypatch.setattr(Case, "config", config)


def test_a_recipe_trains_and_generates(small, tmp_path, capsys):
    case = replace(CASES[0], target=tiny)
    rows = run(CPU, tmp_path, (case,))["rows"]
    trained, generated = rows
    assert not any("error" in row for row in rows)
    assert [row["name"] for row in rows] == [case.name, f"{case.name}, generating"]
    assert generated["tokens"] == 8
    assert {part: trained["parts"][part] for part in (TARGET, WEIGHTS, MOMENTS)} == trained["held"]
    assert len(trained["step_seconds"]) == 3
    assert trained["tokens"] == 2 * 2 * 32
    assert json.loads((tmp_path / "plan.json").read_text())["rows"] == json.loads(json.dumps(rows))
    assert (tmp_path / "plan.md").read_text() in capsys.readouterr().out


def test_a_recipe_that_fails_is_a_row_and_the_next_goes_on(small, monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 | 2 GiB\nmore")

    monkeypatch.setattr(recipes, "train", full)
    monkeypatch.setattr(recipes, "generate", lambda *_: {})
    first = replace(CASES[0], target=tiny)
    rows = run(CPU, None, (first,))["rows"]
    assert ["error" in row for row in rows] == [True, False], "it still generates"
    assert "| OutOfMemoryError: CUDA out of memory. Tried to allocate 1 / 2 GiB |" in capsys.readouterr().out

    def broken():
        raise ValueError("no such sizes")

    (row,) = rows_of(replace(first, target=broken), Place("cpu", 1, "CPU"), CPU)
    assert row["error"] == "ValueError: no such sizes"


def test_what_a_gpu_would_say_is_in_the_table(monkeypatch):
    """The columns that a CPU leaves empty."""
    row = {"name": "a", "planned": 50e9, "measured": 40e9, "reserved": 60e9, "tokens": 1000, "planned_seconds": 0.5}
    table = recipes.markdown({"hardware": "H100", "torch": "2", "rows": [{**row, "step_seconds": [3.0, 2.0]}]})
    assert "| a | 50.00 | 40.00 | +25.0% | 60.00 | 0.50 | 2.00 | 500 | 25% |" in table


def test_recipes_keep_their_rows_and_their_targets_sizes():
    stages = [case.config().stage1 for case in CASES]
    assert [stage.per_device_train_batch_size for stage in stages] == [8, 8, 8, 64, 8]
    assert {stage.gradient_accumulation_steps for stage in stages} == {2}
    assert len({case.name for case in CASES}) == len(CASES)
    assert [case.target().vocab_size for case in CASES] == [128_256, 128_256, 151_936, 49_152, 128_256]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan.main(["--device", "cuda"]) == 2
    assert "this machine has no CUDA device" in capsys.readouterr().err
    assert plan.main(["--output", "x"]) == 2
