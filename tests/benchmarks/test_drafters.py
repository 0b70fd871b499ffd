"""The benchmarks run end to end on tiny models and say what they measured."""

import json

import pytest
import torch
from conftest import VOCAB, exit_code, tiny_head, write_tuning

from benchmarks import drafters
from speculator.drafters import HeadDrafter
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig


@pytest.mark.soak
def test_every_drafter_has_a_row_in_the_report(target_folder, tmp_path):
    torch.manual_seed(0)
    head = MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3))
    head.save_pretrained(tmp_path / "head")
    command = ["--target", str(target_folder), "--speculator", str(tmp_path / "head")]
    command += ["--draft_model", str(target_folder), "--output", str(tmp_path / "out"), "--batch_size", "2"]
    assert drafters.main([*command, "--max_prompts", "4", "--max_new_tokens", "12", "--prompt_tokens", "8"]) == 0
    rows = json.loads((tmp_path / "out" / "drafters.json").read_text())["rows"]
    assert {row["temperature"] for row in rows} == {0.0, 0.7, 1.0}
    greedy = {row["decoder"]: row for row in rows if row["temperature"] == 0}
    assert greedy["none"]["acceptance_length"] == 1.0
    assert greedy["none"]["speedup"]["value"] == 1.0
    # The target drafts for itself: every draft is kept whole.
    assert greedy["draft model chain"]["acceptance_length"] == 4.0


@pytest.mark.parametrize(("n_predict", "count"), [(1, 9), (20, 18)])
def test_every_head_gets_the_drafts_that_it_can_make(target, n_predict, count):
    config = MLPSpeculatorConfig(vocab_size=VOCAB, emb_dim=32, inner_dim=8, n_predict=n_predict, tie_weights=False)
    table = drafters.decoders(target, MLPSpeculator(config), model=None)
    assert len(table) == count
    heads = [decoder.drafter for decoder in table if isinstance(decoder.drafter, HeadDrafter)]
    assert all(drafter.num_speculative_tokens <= n_predict for drafter in heads)
    assert [decoder.drafter.num_speculative_tokens for decoder in table[1:] if decoder.drafter not in heads] == [8]


def test_the_tuning_of_a_head_from_the_hub_is_read(target, tmp_path, monkeypatch, capsys):
    write_tuning(tmp_path, n_predict=7)
    monkeypatch.setattr(drafters, "head_folder", lambda name: {"org/head": tmp_path}[name])
    monkeypatch.setattr(drafters, "load_head", lambda *_: tiny_head())
    monkeypatch.setattr(drafters, "first_turns", lambda *_: None)
    monkeypatch.setattr(drafters.model_flags, "load_target", lambda _: target)
    command = ["--target", "T", "--speculator", "org/head", "--output", str(tmp_path / "out")]
    assert exit_code(drafters.main, command) == 2
    assert "a head of another depth" in capsys.readouterr().err
