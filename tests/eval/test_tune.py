"""The tree that is chosen is the best there is, and what was measured is what the loop keeps."""

import itertools
import json
from math import prod

import pytest
import torch
from conftest import DFLASH2, tiny_block_head, tiny_head

from eval.__main__ import main
from eval.tune import _with_costs, best_tree, lookup_acceptance, rank_acceptance
from speculator import Candidates, FixedTree, HeadDrafter, Sampling, Target, generate, load_drafter
from speculator.drafters import price
from speculator.drafters.costs import CostEntry
from speculator.drafters.tuning import Tuning, measured_on, rates_by_depth
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig


def expected_tokens(acceptance, paths) -> float:
    """Expected tokens of a step with a tree: 1 plus the chance that each node is accepted."""
    return 1 + sum(prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in paths)


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
        by_depth = rates_by_depth(FixedTree(chosen), acceptance)
        assert price.expected_tokens(by_depth) == pytest.approx(best)


def test_expected_tokens_equal_a_sum_by_hand():
    """Children kept with 0.5 and 0.2, theirs with 0.4 and 0.1: the second node is the grandchild, 0.5 * 0.4 = 0.2."""
    acceptance = [[0.5, 0.15], [0.4, 0.1]]
    assert best_tree(acceptance, 2) == [(0,), (0, 0)]
    assert expected_tokens(acceptance, [(0,), (0, 0)]) == pytest.approx(1.7)
    assert best_tree(acceptance, 3) == [(0,), (1,), (0, 0)]
    assert best_tree([[0.5], [0.4]], 9) == [(0,), (0, 0)], "a budget beyond the ranks is not used up"


@pytest.mark.parametrize(
    ("settings", "eos", "architecture"),
    [
        ({"temperature": 0.0}, (), "mlp"),
        ({"temperature": 1.0}, (), "mlp"),
        ({"temperature": 1.0, "top_k": 3}, (), "mlp"),
        ({"temperature": 0.0}, {3, 17}, "mlp"),
        ({"temperature": 1.0}, {3, 17}, "mlp"),
        ({"temperature": 0.0}, (), "eagle3"),
        ({"temperature": 1.0}, {3, 17}, "eagle3"),
    ],
)
def test_measured_acceptance_by_rank_is_that_of_decoding(target, settings, eos, architecture):
    """With one child at each depth, acceptance by rank is acceptance by position; no step after a text's end counts."""
    head = tiny_head(architecture=architecture)
    branches = Candidates((4, 2, 1))
    prompts, sampling = [[1, 2, 3, 4], [5, 6, 7, 8]], Sampling(**settings, seed=3)
    acceptance = rank_acceptance(target, head, prompts, sampling, steps=12, eos=eos)
    assert [len(level) for level in acceptance] == [4, 2, 1]
    steps = [
        step
        for row in generate(
            target, HeadDrafter(head, branches), prompts, sampling, max_new_tokens=80, eos_token_ids=eos
        ).steps
        for step in row[:12]
        if not step.cut
    ]
    for depth, level in enumerate(acceptance):
        reached = sum(step.accepted >= depth for step in steps)
        assert sum(level) == pytest.approx(sum(step.accepted > depth for step in steps) / max(1, reached))


def test_no_more_children_are_measured_than_a_selector_has_candidates(target):
    head = tiny_block_head(target, **{**DFLASH2, "selector_top_k": 3})
    acceptance = rank_acceptance(target, head, [[1, 2, 3, 4]], Sampling(0.0), steps=2)
    assert [len(level) for level in acceptance] == [3, 2, 1]


def test_tune_writes_what_generate_then_drafts_with(target_folder, text_file, tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("eval.tune.ROWS", (1, 2))
    folder = tmp_path / "head"
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(folder)
    command = ["--target", str(target_folder), "--speculator", str(folder)]
    sizes = ["--suite", str(text_file), "--prompt_tokens", "8", "--max_new_tokens", "24", "--max_prompts", "3"]
    assert main(["tune", *command, *sizes]) == 0
    assert capsys.readouterr().out.count("best") == 2, "one draft per temperature"
    tuned = json.loads((folder / "decoding.json").read_text())
    target = Target.load(str(target_folder))
    assert measured_on(target).items() <= tuned.items()
    assert {(entry["rows"], entry["greedy"]) for entry in tuned["costs"]} == {
        (rows, greedy) for rows in (1, 2) for greedy in (True, False)
    }
    monkeypatch.setattr("speculator.drafters.tuning.measure_costs", None)  # the file has the costs
    drafter = load_drafter(folder, target)
    assert {choice.shape.nodes for choice in drafter.choices} >= {1, 2, 3}
    plain = generate(target, None, [[1, 2, 3]], max_new_tokens=16).tokens
    assert generate(target, drafter, [[1, 2, 3]], max_new_tokens=16).tokens == plain


@pytest.mark.parametrize(("token", "best"), [(0.001, 8), (0.05, 5), (0.06, 3), (0.5, 1)])
def test_of_drafts_that_are_about_as_fast_the_smallest_is_kept(target, monkeypatch, token, best):
    """Trees of 3, 5 and 8 tokens give 2.05, 2.33 and 2.63 tokens a step: at 0.05 each 1.78, 1.86 and 1.88 per cost."""
    ranks = [[0.5, 0.3, 0.1, 0.1], [0.5, 0.2], [0.5], [0.5]]
    kinds = dict.fromkeys(("greedy", "sampled"), ranks)
    trees = {kind: [best_tree(ranks, nodes) for nodes in (3, 5, 8)] for kind in kinds}
    entries = [CostEntry(rows=1, greedy=greedy, head=0.0, path=0.0, level=0.0, token=token) for greedy in (True, False)]
    monkeypatch.setattr("eval.tune.measure_costs", lambda *given: entries)
    tuning, rows = _with_costs(target, tiny_head(n_predict=4), Tuning(kinds, trees))
    marked = [row["draft"] for row in rows if row["best"]]
    assert len(marked) == 2
    assert all(str(best) in draft for draft in marked)
    assert [len(tree) for tree in tuning.trees["greedy"]] == ([best] if best > 1 else [])


def test_a_target_that_is_too_slow_to_be_measured_is_one_line(target_folder, text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("eval.tune._COST_SECONDS", 0.0)
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(tmp_path)
    command = ["--target", str(target_folder), "--speculator", str(tmp_path), "--suite", str(text_file)]
    assert main(["tune", *command, "--prompt_tokens", "8", "--max_new_tokens", "8", "--max_prompts", "1"]) == 2
    assert "no step of" in capsys.readouterr().err


def test_lookups_are_right_as_often_as_the_text_repeats_itself():
    """Where nothing is known, a third of the lookups counts as right."""
    chances = lookup_acceptance([([3, 4, 5], [3, 4, 5] * 20), ([9], [8])])
    assert chances[-1] > 0.95
    assert lookup_acceptance([([1, 2, 3, 4], [5, 6, 7, 8, 9])]) == pytest.approx([1 / 3] * 8)
