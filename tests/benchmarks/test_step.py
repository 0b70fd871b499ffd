"""Steps at a shape: what must be read is counted right, what is measured is set against it."""

import json

import pytest
import torch

from benchmarks import shapes
from benchmarks.shapes import PRESETS, draft_bytes, random_head, random_target, step_bytes
from benchmarks.step import main
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig


def test_the_bound_counts_every_weight_that_is_read_and_the_live_cache():
    """tiny: D 64, V 512, inner 128, 2 layers, 2 of 4 heads of 16 with keys of their own; two bytes a number."""
    target = random_target("tiny")
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    assert step_bytes(target, rows=3, live=0) == 2 * (2 * layer + 64 + 512 * 64), "the embedding is not read"
    cache = target.cache(3, 10)
    target.extend(cache, torch.zeros(3, 10, dtype=torch.long))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert step_bytes(target, rows=3, live=10) - step_bytes(target, rows=3, live=0) == held


def test_a_draft_reads_its_projection_and_its_output_matrix():
    head = random_head(random_target("tiny"), PRESETS["tiny"].head)
    first, later = 2 * (64 * 32 + 32 * 512), 2 * (32 * 32 + 32 * 512)
    assert draft_bytes(head, 1) == first
    assert draft_bytes(head, 3) == pytest.approx((first + 2 * later) / 3)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-13b"])
def test_presets_are_the_published_shapes(name, monkeypatch):
    """8.03 and 13.02 billion weights; IBM's heads have 3.19 and 0.84 billion."""
    monkeypatch.setattr(shapes, "resolve_device", lambda: torch.device("meta"))
    monkeypatch.setattr(shapes, "Target", lambda model, tokenizer: model)
    model = random_target(name)
    expected = {"llama-3-8b": 8.03e9, "llama-2-13b": 13.02e9}[name]
    assert model.num_parameters() == pytest.approx(expected, rel=1e-3)
    config = MLPSpeculatorConfig(vocab_size=model.vocab_size, emb_dim=model.config.hidden_size, **PRESETS[name].head)
    with torch.device("meta"):
        head = MLPSpeculator(config)
    assert head.num_parameters() == pytest.approx({"llama-3-8b": 3.19e9, "llama-2-13b": 0.84e9}[name], rel=5e-3)


def test_a_projection_takes_the_length_of_drafts_as_long_as_those_whose_cost_it_takes():
    """A published 2.43 is of 6 drafted tokens, which is a rate of 0.6: 4 tokens give 1 + 0.6 + 0.36 + 0.216 + 0.13."""
    assert PRESETS["llama-3-8b"].length_at(6) == pytest.approx(2.43)
    assert PRESETS["llama-3-8b"].length_at(4) == pytest.approx(2.306, abs=0.005)


def test_the_table_and_the_json_say_the_same(tmp_path, capsys):
    command = ["--preset", "tiny", "--context", "16", "--blocks", "1", "--batch_size", "1", "--batch_size", "2"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "step-tiny.json").read_text())
    assert [(row["batch_size"], row["num_speculative_tokens"]) for row in report["rows"]] == [
        (rows, length) for rows in (1, 2) for length in (1, 2, 3)
    ]
    for row in report["rows"]:
        assert row["verify_seconds"] == pytest.approx(row["verify_over_decode"] * row["decode_seconds"])
        assert 0 < row["draft_over_decode_by_bytes"] < 1
        assert row["decode_over_bound"] > 1, "nothing reads faster than the machine copies"
    last = report["rows"][-1]
    assert last["acceptance_length"] == pytest.approx(PRESETS["tiny"].acceptance_length)
    cost = 3 * last["draft_over_decode"] + last["verify_over_decode"]
    assert last["projected_speedup"] == pytest.approx(PRESETS["tiny"].acceptance_length / cost)
    out = capsys.readouterr().out
    assert (tmp_path / "step-tiny.md").read_text().strip() == out.strip()
    assert "a projection, not a measurement" in out
    assert f"| 2 | 3 | {1e3 * last['decode_seconds']:.2f} | {last['decode_over_bound']:.2f} |" in out


@pytest.mark.parametrize(
    "flags",
    [["--context", "1024"], ["--blocks", "0"]],
    ids=" ".join,
)
def test_wrong_input_fails_in_one_line_that_names_the_flag(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    assert main(["--preset", "tiny", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert flags[0] in error or "a_file" in error
