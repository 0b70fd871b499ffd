"""Every fixed choice and auto, cell by cell."""

import json

import pytest
import torch
from conftest import tiny_model, write_tuned

from benchmarks import regret
from speculator import Engine, Target
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig


def test_the_best_choice_is_not_the_lucky_one():
    """Of a and b either has one batch that is twice as fast: the best of the other batch is the slower in this one."""
    batches = {"auto": [(10, 1.0)] * 2, "a": [(20, 1.0), (10, 1.0)], "b": [(10, 1.0), (20, 1.0)]}
    cell = {"batches": batches, "tokens_per_second": dict.fromkeys(batches, 0.0)}
    assert regret.without_luck(cell) == 1
    assert regret.without_luck({**cell, "batches": {name: own[:1] for name, own in batches.items()}}) is None


def test_only_steps_of_full_slots_count():
    """Of two slots: 3 steps beside 9, then the third text's 5; the last step of the longest is alone."""
    engine = Engine(Target(tiny_model(), tokenizer=None), slots=2)

    def requests():
        return [engine.submit([5, 6], max_new_tokens=count, eos_token_ids=()) for count in (4, 10, 6)]

    tokens, seconds, steps = regret.decoded(engine, requests())
    assert (tokens, steps) == (16, 16)
    everything = regret.decoded(engine, requests(), whole=True)
    assert everything[::2] == (17, 17)
    assert min(seconds, everything[1]) > 0


STEPS = [{"num_speculative_tokens": n, "draft": 0.1 * n, "verify": 1 + 0.01 * n} for n in (0, 1, 2)]


def test_every_choice_has_a_speed_in_every_cell(target_folder, text_file, tmp_path, capsys):
    torch.manual_seed(0)
    head = tmp_path / "head"
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=2)).save_pretrained(head)
    measured = [
        {"temperature": 0.0, "batch_size": 1, "num_speculative_tokens": n, "acceptance_by_position": [0.5] * n}
        for n in (1, 2)
    ]
    tree = {"temperature": 0.0, "batch_size": 1, "tree": [[0], [1]], "acceptance_by_position": [0.6]}
    costs = [{"rows": 1, "context": 64, "greedy": True, "seconds": 0.01, "steps": STEPS}]
    settings = [{"temperature": 0.0, "num_speculative_tokens": 2}]
    write_tuned(head, settings, measured=[*measured, tree], lookup=[0.2], costs=costs)
    command = ["--target", str(target_folder), "--speculator", str(head), "--suite", str(text_file)]
    sizes = ["--max_prompts", "2", "--max_new_tokens", "8", "--prompt_tokens", "8", "--batch_size", "1"]
    out = tmp_path / "out"
    assert regret.main([*command, *sizes, "--batch_size", "2", "--temperature", "0", "--output", str(out)]) == 0
    report = json.loads((out / "regret.json").read_text())
    assert [cell["batch_size"] for cell in report["cells"]] == [1, 2]
    names = {"none", "n-gram 2", "n-gram 4", "n-gram 8", "1 token", "2 tokens", "a tree of 2 tokens, 1 deep", "auto"}
    names.add("2 tokens, n-gram 4")
    for cell in report["cells"]:
        assert cell["tokens_per_second"].keys() == cell["acceptance_length"].keys() == names
        assert cell["acceptance_length"]["none"] == 1 <= min(cell["acceptance_length"].values())
        best = max(speed for name, speed in cell["tokens_per_second"].items() if name != "auto")
        assert (cell["auto_over_best_elsewhere"] is None) == (cell["batch_size"] == 2)
        assert cell["auto_over_best"] == pytest.approx(cell["tokens_per_second"]["auto"] / best)
    assert (out / "regret.png").stat().st_size > 1000
    assert regret.main([*command, *sizes, "--temperature", "1", "--output", str(tmp_path / "other")]) == 2
    assert "was not tuned at --temperature 1" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    write_tuned(head, settings, measured=[*measured, measured[0] | {"temperature": 1.0}], lookup=[0.2], costs=costs)
    several = ["--num_samples", "2", "--temperature", "0.7", "--output", str(tmp_path / "several")]
    assert regret.main([*command, *sizes[:-2], *several]) == 0
    (cell,) = json.loads((tmp_path / "several" / "regret.json").read_text())["cells"]
    speeds = cell["tokens_per_second"]
    assert speeds.keys() == {"none", "n-gram 4", "1 token", "none, apart", "auto, apart", "auto"}
    assert (cell["batch_size"], cell["num_samples"]) == (2, 2)
    assert cell["auto_over_apart"]["none, apart"] == pytest.approx(speeds["auto"] / speeds["none, apart"])
    assert regret.main([*command, *sizes, "--temperature", "0", "--num_samples", "2", "--output", str(out)]) == 2
    assert "would be equal texts" in capsys.readouterr().err
