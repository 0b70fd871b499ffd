"""The tree that is chosen is the best there is, and what was measured is what the loop keeps."""

import itertools
import json

import pytest
import torch
from conftest import tiny_head

from eval.__main__ import main
from eval.suites import Suite
from eval.tune import best_tree, chains, expected_tokens, lookup_acceptance, rank_acceptance, write_tuned
from speculator import Candidates, FixedTree, HeadDrafter, Sampling, Target, generate, load_head, tuned_drafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.tuned import measured_on
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig


def every_tree(acceptance, nodes):
    """All sets of paths in which parents and elder siblings are present."""
    ranks = [range(len(level)) for level in acceptance]
    paths = [path for depth in range(1, len(ranks) + 1) for path in itertools.product(*ranks[:depth])]
    for chosen in itertools.combinations(paths, nodes):
        known = {(), *chosen}
        if all(p[:-1] in known and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in known) for p in chosen):
            yield chosen


@pytest.mark.parametrize("nodes", range(1, 7))
def test_no_tree_beats_the_chosen_one(nodes):
    generator = torch.Generator().manual_seed(nodes)
    for _ in range(5):
        acceptance = torch.rand(3, 2, generator=generator).mul(0.5).tolist()
        best = max(expected_tokens(acceptance, tree) for tree in every_tree(acceptance, nodes))
        chosen = best_tree(acceptance, nodes)
        assert len(chosen) == nodes
        assert expected_tokens(acceptance, chosen) == pytest.approx(best)
        FixedTree(chosen)


def test_expected_tokens_by_hand():
    """Children kept with 0.5 and 0.2, theirs with 0.4 and 0.1: the second node is the grandchild, 0.5 * 0.4 = 0.2."""
    acceptance = [[0.5, 0.15], [0.4, 0.1]]
    assert best_tree(acceptance, 2) == [(0,), (0, 0)]
    assert expected_tokens(acceptance, [(0,), (0, 0)]) == pytest.approx(1.7)
    assert best_tree(acceptance, 3) == [(0,), (1,), (0, 0)]


def test_a_budget_beyond_the_ranks_is_not_used_up():
    assert best_tree([[0.5], [0.4]], 9) == [(0,), (0, 0)]


@pytest.mark.parametrize(
    ("temperature", "eos", "architecture"),
    [
        (0.0, (), "mlp"),
        (1.0, (), "mlp"),
        (0.0, {3, 17}, "mlp"),
        (1.0, {3, 17}, "mlp"),
        (0.0, (), "eagle3"),
        (1.0, {3, 17}, "eagle3"),
    ],
)
def test_ranks_kept_are_those_of_the_loop(target, temperature, eos, architecture):
    """With one child at each depth, acceptance by rank is acceptance by position; no step after a text's end counts."""
    head = tiny_head(architecture=architecture)
    branches = Candidates((6, 3, 2))
    prompts, sampling = [[1, 2, 3, 4], [5, 6, 7, 8]], Sampling(temperature, seed=3)
    acceptance = rank_acceptance(target, head, prompts, sampling, steps=12, eos=eos)
    assert [len(level) for level in acceptance] == [6, 3, 2]
    steps = [
        step
        for prompt in prompts
        for step in generate(
            target, HeadDrafter(head, branches), [prompt], sampling, max_new_tokens=80, eos_token_ids=eos
        ).steps[0][:12]
        if not step.cut
    ]
    for depth, level in enumerate(acceptance):
        reached = sum(step.accepted >= depth for step in steps)
        assert sum(level) == pytest.approx(sum(step.accepted > depth for step in steps) / max(1, reached))


def test_tune_writes_what_generate_then_drafts(target_folder, text_file, tmp_path, capsys):
    torch.manual_seed(0)
    folder = tmp_path / "head"
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(folder)
    command = ["--target", str(target_folder), "--speculator", str(folder)]
    sizes = ["--suite", str(text_file), "--prompt_tokens", "8", "--max_new_tokens", "24", "--max_prompts", "3"]
    assert main(["tune", *command, *sizes]) == 0
    tuned = json.loads((folder / "decoding.json").read_text())
    assert [each["temperature"] for each in tuned["settings"]] == [0.0, 1.0]
    target = Target.load(str(target_folder))
    assert measured_on(target, 1).items() <= tuned.items()
    assert "hardware" in tuned
    for setting in tuned["settings"]:
        shape = tuned_drafter(folder, target, setting["temperature"], auto=False).shape
        drafted = [list(path) for path in shape.paths] if "tree" in setting else shape.depth
        assert drafted == setting.get("tree", setting.get("num_speculative_tokens"))
    for setting in tuned["settings"]:
        rows = [row for row in tuned["measured"] if row["temperature"] == setting["temperature"]]
        assert [row["num_speculative_tokens"] for row in rows if row["tree"] is None] == [1, 2, 3]
        assert any(row["nodes"] == 3 and row["tree"] for row in rows), "a tree as wide as the longest chain"
        (chosen,) = (row for row in rows if row["chosen"])
        assert chosen["predicted_speedup"] == max(row["predicted_speedup"] for row in rows)
        assert setting.get("tree") == chosen["tree"]
    assert "chosen" in capsys.readouterr().out
    assert all(len(row["acceptance_by_position"]) == row["num_speculative_tokens"] for row in tuned["measured"])
    assert len(tuned["lookup"]) == 16
    assert {(entry["rows"], entry["greedy"]) for entry in tuned["costs"]} >= {(1, True), (1, False)}
    drafter = tuned_drafter(folder, target, 1.0)
    assert isinstance(drafter, AdaptiveDrafter)
    assert {choice.shape.nodes for choice in drafter.choices} >= {1, 2, 3}


def test_chains_go_deeper_than_an_attention_head_was_trained_while_that_may_pay():
    """0.6^5 is above 0.05 and 0.6^6 below."""

    def deepest(head, rate: float, new_tokens: int = 100) -> int:
        return len(chains(head, [[rate, 0.1], [rate], [rate]], new_tokens))

    head = tiny_head(architecture="eagle3")
    assert [deepest(head, rate) for rate in (0.3, 0.6, 0.9)] == [3, 5, 12]
    assert deepest(head, 0.9, new_tokens=8) == 6, "a whole step has to fit"
    assert deepest(tiny_head(), 0.9) == 3


def test_a_chain_deeper_than_training_is_tuned_and_then_drafted(target, tmp_path, monkeypatch):
    monkeypatch.setattr("eval.tune.rank_acceptance", lambda *given, **more: [[0.5], [0.5], [0.5]])
    tiny_head(architecture="eagle3").save_pretrained(tmp_path)
    suite, head = Suite("two", [[1, 2, 3, 4], [5, 6, 7, 8]]), load_head(tmp_path, target)
    rows = write_tuned(target, head, suite, tmp_path / "decoding.json", temperatures=[0.0], max_new_tokens=16)
    lengths = [row["num_speculative_tokens"] for row in rows if row["tree"] is None]
    assert lengths == [1, 2, 3, 4]
    assert len(rows[3]["acceptance_by_position"]) == 4
    drafter = tuned_drafter(tmp_path, target)
    assert max(choice.shape.depth for choice in drafter.choices) == 4
    tuned = json.loads((tmp_path / "decoding.json").read_text())
    tuned["settings"] = [{"temperature": 0.0, "batch_size": 1, "num_speculative_tokens": 4}]
    (tmp_path / "decoding.json").write_text(json.dumps(tuned))
    fixed = tuned_drafter(tmp_path, target, auto=False)
    assert fixed.shape.depth == 4
    plain = generate(target, None, suite.prompts, max_new_tokens=16).tokens
    assert generate(target, fixed, suite.prompts, max_new_tokens=16).tokens == plain


def test_lookups_are_right_as_often_as_the_text_repeats_itself():
    """After 3 4 5 always the same, and a match is soon as long as any; a third is taken as right where nothing is
    known. What never comes again is never matched."""
    texts = [([3, 4, 5], [3, 4, 5] * 20), ([9], [8])]
    chances = lookup_acceptance(texts)
    assert chances == sorted(chances)
    assert chances[-1] == pytest.approx((0.1 + 45) / (0.3 + 45), abs=0.02)
    assert lookup_acceptance([([1, 2, 3, 4], [5, 6, 7, 8, 9])]) == pytest.approx([1 / 3] * 16)


def test_a_longer_match_is_never_the_less_trusted():
    """Right after one token, wrong after two: all sizes are taken together, the fourteen unknown ones too."""
    texts = [([5, 1, 8, 1], [8]), ([4, 6, 7, 9, 4, 6], [3])]
    assert lookup_acceptance(texts) == pytest.approx([(1.1 + 0.1 + 1.4) / (1.3 + 1.3 + 4.2)] * 16)


def test_wrong_input_is_one_line(target_folder, tmp_path, capsys):
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=8)).save_pretrained(tmp_path / "head")
    capsys.readouterr()
    command = ["tune", "--target", str(target_folder), "--speculator", str(tmp_path / "head"), "--prompt_tokens", "8"]
    suite = tmp_path / "suite.jsonl"
    suite.write_text("".join(f'{{"prompt": "import os, sys, re # {i}"}}\n' for i in range(3)))
    for flags, message in (
        (["--max_new_tokens", "4"], "--max_new_tokens must be at least 5"),
        (
            ["--suite", str(suite), "--batch_size", "16", "--max_new_tokens", "16"],
            "--batch_size 16",
        ),
        (["--batch_size", "0"], "--batch_size must be at least 1"),
        (["--speculator", str(tmp_path / "nowhere")], "no folder"),
        (["--output", str(tmp_path)], "not a regular file"),
    ):
        assert main([*command, *flags]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (tmp_path / "head" / "decoding.json").exists()
