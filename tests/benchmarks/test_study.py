"""The study's bookkeeping: rates are tuned inside the grid, results are kept, the table says what it compares."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks import study
from benchmarks.study import ARCHITECTURES, KNOBS, RECIPES, TABLES, Arm, Study, fresh_head, table
from speculator.target.model import Target


class Faked(Study):
    """Trains nothing: acceptance_length is best at a rate of 0.04, and results are counted."""

    def __init__(self, folder: Path):
        self.folder, self.made, self.steps = folder, [], 9

    def result(self, arm, rate, seed, budget=1):
        self.made.append((rate, seed))
        value = 2 - abs(rate - 0.04)
        return {
            "seconds": 1.0,
            **{
                split: {"T=0": value, "T=1": value + 0.01 * seed, "T=0, tree of 16": value}
                for split in ("validation", "held-out")
            },
        }


def test_a_rate_at_the_grids_edge_widens_the_grid(tmp_path):
    faked = Faked(tmp_path)
    assert faked.best_rate(Arm("any", study.HARD, rates=(0.005, 0.01))) == 0.04
    assert {rate for rate, _ in faked.made} == {0.005, 0.01, 0.02, 0.04, 0.08}
    assert faked.best_rate(Arm("any", study.HARD, rates=(0.08, 0.16, 0.32))) == 0.04


def test_a_row_has_the_mean_and_the_spread_over_seeds(tmp_path):
    row = Faked(tmp_path).row(RECIPES[2], (0, 1, 2))
    assert row["rate"] == 0.04
    assert row["T=0"] == pytest.approx((2.0, 0.0))
    assert row["T=1"] == pytest.approx((2.01, 0.01))


def test_the_table_compares_accepted_tokens_at_the_same_budget():
    def figures(greedy: float, sampled: float, spread: float) -> dict:
        return {"T=0": (greedy, spread), "T=1": (sampled, 0.0), "T=0, tree of 16": (greedy, spread)}

    rows = [
        {"arm": "a", "budget": 1, "tokens": 9, "seconds": 7.4, "rate": 1e-3, **figures(1.2, 1.5, 0.0)},
        {"arm": "b", "budget": 1, "tokens": 9, "seconds": 7.4, "rate": 5e-3, **figures(1.4, 2.0, 0.1)},
        {"arm": "a", "budget": 4, "tokens": 1_228_800, "seconds": 7.4, "rate": 1e-3, **figures(1.4, 2.0, 0.0)},
    ]
    lines = table(rows).splitlines()
    assert lines[3].endswith("| 7 | 0.005 | 1.40 ± 0.10 | 2.00 ± 0.00 | 1.40 ± 0.10 | +100% / +100% / +100% |")
    assert lines[4].startswith("| a | 1,228,800 |")
    assert lines[4].endswith("| +0% / +0% / +0% |")


@pytest.fixture
def deep_target(target_folder) -> Target:
    """With layers enough for an attention head's three taps."""
    config = AutoConfig.from_pretrained(target_folder, num_hidden_layers=7)
    return Target(AutoModelForCausalLM.from_config(config).eval(), AutoTokenizer.from_pretrained(target_folder))


def test_every_arm_has_a_head_and_one_of_each_kind_is_trained_and_measured(
    tmp_path, deep_target, text_file, monkeypatch
):
    small = {"SOURCES": [str(text_file)], "LENGTH": 32, "PROMPT_TOKENS": 8, "NEW_TOKENS": 4}
    for name, value in (small | {"PROMPTS": {"validation": 1, "held-out": 1}}).items():
        monkeypatch.setattr(study, name, value)
    real = Study(deep_target, tmp_path, steps=2)
    every = {arm.name: arm for table in TABLES.values() for arm in table}
    for arm in every.values():
        fresh_head(arm, 0, deep_target, Dataset.from_list([]))
    arms = [*ARCHITECTURES, RECIPES[0], KNOBS[-1], every["DFlash 2, 2 layers"]]
    for arm in arms:
        result = real.result(arm, 1e-3, seed=0)
        assert all(1 <= figure <= 5 for figure in result["held-out"].values())
    assert len(list(real.folder.glob("*_seed_0.json"))) == len({arm.name for arm in arms})
    with torch.no_grad():
        next(deep_target.model.parameters()).add_(1)
    other = Study(Target(deep_target.model, deep_target.tokenizer), tmp_path, steps=2)
    assert not list(other.folder.iterdir()), "results of one target are not those of another"


def test_independent_heads_see_the_hidden_state_alone(target, monkeypatch):
    for name in ("LENGTH", "PROMPT_TOKENS", "NEW_TOKENS"):
        monkeypatch.setattr(study, name, 32)
    head = fresh_head(ARCHITECTURES[1], 0, target, Dataset.from_list([]))
    hidden, tokens = head.probe()
    assert torch.equal(head.logits(hidden, tokens), head.logits(hidden, tokens + 1))
    assert len({logits.sum().item() for logits in head.logits(hidden, tokens)}) == head.n_predict
    assert fresh_head(ARCHITECTURES[0], 0, target, Dataset.from_list([])).logits(hidden, tokens).shape[0] == 4
