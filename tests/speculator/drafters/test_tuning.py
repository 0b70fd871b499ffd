"""`decoding.json` decides what adaptive drafting starts from; without it, typical figures and measured costs do."""

import pytest
from conftest import tiny_head, write_tuning

from speculator import Chain, FixedTree, Target, UserError, generate, load_drafter, load_head, speculative
from speculator.__main__ import main
from speculator.checkpoints import load_any
from speculator.drafters import tuning
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.costs import CostEntry
from speculator.drafters.tuning import adaptive_drafter, choices_of, measured_on, read_tuning, untuned


@pytest.fixture
def tuned_folder(tmp_path):
    folder = tmp_path / "head"
    tiny_head(vocab_size=300).save_pretrained(folder)
    write_tuning(folder)
    return folder


@pytest.fixture
def never_measured(monkeypatch):
    monkeypatch.setattr(tuning, "measure_costs", None)


def test_a_tuned_head_drafts_with_the_files_figures(target_folder, tuned_folder, never_measured):
    drafter = load_drafter(tuned_folder, Target.load(str(target_folder)))
    assert [choice.shape.nodes for choice in drafter.choices] == [1, 2, 3]
    assert drafter.choices[1].acceptance == {True: [0.6, 0.5], False: [0.6, 0.5]}
    assert drafter.cost(Chain(2), 2, False, True, 1) == pytest.approx(1.35)  # 1 + head + 2 levels + 2 tokens
    assert drafter.lookup == {True: [0.2, 0.4], False: [0.2, 0.4]}
    fixed = load_drafter(tuned_folder, Target.load(str(target_folder)), num_speculative_tokens=2)
    assert (fixed.name, fixed.nodes) == ("head", 2)


def test_a_tree_is_for_the_temperature_that_it_was_tuned_for(tuned_folder, target_folder, never_measured):
    write_tuning(tuned_folder, trees={"greedy": [], "sampled": [[[0], [1], [0, 0]]]})
    *_, tree = load_drafter(tuned_folder, Target.load(str(target_folder))).choices
    assert isinstance(tree.shape, FixedTree)
    assert tree.acceptance == {False: [pytest.approx(0.7), pytest.approx(0.6 * 0.5 / 0.7)]}


@pytest.mark.parametrize("changes", [{"processor": "another"}, {"dtype": "bfloat16"}, {"costs": []}])
def test_costs_of_another_place_are_measured_once(target_folder, tuned_folder, monkeypatch, tmp_path, changes):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    write_tuning(tuned_folder, **changes)
    target, measured, measure = Target.load(str(target_folder)), [], tuning.measure_costs
    monkeypatch.setattr(tuning, "measure_costs", lambda *given: measured.append(given) or measure(*given))
    drafters = [load_drafter(tuned_folder, target, batch_size=2) for _ in range(2)]
    other = load_any(tuned_folder)  # trained on something else: its steps cost the same
    other.config.training_data, other.config.trained_length = ["other"], 99
    other.save_pretrained(tuned_folder)
    load_drafter(tuned_folder, target, batch_size=2)
    assert len(measured) == 1
    assert {(entry.rows, entry.greedy) for entry in drafters[0].cost.entries} == {
        (rows, greedy) for rows in (1, 2) for greedy in (True, False)
    }
    first, second = (generate(target, drafter, [[1, 2, 3]], max_new_tokens=20) for drafter in drafters)
    assert first.steps == second.steps


def test_costs_that_other_code_measured_are_measured_again(target_folder, tuned_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    write_tuning(tuned_folder, costs=[])
    target, measured, digest = Target.load(str(target_folder)), [], tuning.code_digest
    entry = CostEntry(rows=1, greedy=True, head=0.0, path=0.0, level=0.1, token=0.02)
    monkeypatch.setattr(tuning, "measure_costs", lambda *given: measured.append(given) or [entry])
    monkeypatch.setattr(tuning, "code_digest", lambda folder: digest(tmp_path / "code"))
    (tmp_path / "code" / "decoding").mkdir(parents=True)
    for text in ("old", "old", "new"):
        (tmp_path / "code" / "decoding" / "engine.py").write_text(text)
        load_drafter(tuned_folder, target)
    assert len(measured) == 2
    monkeypatch.setattr(tuning, "version", lambda library: f"another {library}")
    load_drafter(tuned_folder, target)
    assert len(measured) == 3, "transformers has the code of the target's layers"


def test_costs_of_another_place_are_used_if_there_is_no_time_to_measure(
    target_folder, tuned_folder, monkeypatch, tmp_path
):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))  # no test before has measured them
    monkeypatch.setattr(tuning, "SECONDS", 0.0)
    write_tuning(tuned_folder, processor="another")
    target = Target.load(str(target_folder))
    assert load_drafter(tuned_folder, target).cost(Chain(1), 1, False, True, 1) == pytest.approx(1.2)
    head = load_head(tuned_folder, target)
    assert adaptive_drafter(head, target).cost(Chain(1), 1, False, True, 1) > 1, "typical costs"


def test_costs_that_there_was_no_time_to_measure_are_measured_by_the_next_process(
    target_folder, tuned_folder, monkeypatch, tmp_path
):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    write_tuning(tuned_folder, costs=[])
    target, results = (
        Target.load(str(target_folder)),
        [[], [CostEntry(rows=1, greedy=True, head=0.5, path=0.0, level=0.0, token=0.0)]],
    )
    monkeypatch.setattr(tuning, "measure_costs", lambda *given: results.pop(0))
    found = [load_drafter(tuned_folder, target).cost(Chain(1), 1, False, True, 1) for _ in range(3)]
    assert found == [pytest.approx(1.12), 1.5, 1.5], "typical costs, and measured ones from then on"


def test_the_number_of_threads_is_no_other_place(target, monkeypatch):
    here = measured_on(target)
    monkeypatch.setattr("torch.get_num_threads", lambda: 99)
    assert measured_on(target) == here


def test_a_head_without_the_file_drafts_adaptively_too(target_folder, tuned_folder):
    (tuned_folder / "decoding.json").unlink()
    target = Target.load(str(target_folder))
    drafter = load_drafter(tuned_folder, target)
    assert isinstance(drafter, AdaptiveDrafter)
    plain = generate(target, None, [[1, 2, 3]], max_new_tokens=20)
    assert generate(target, drafter, [[1, 2, 3]], max_new_tokens=20).tokens == plain.tokens


def test_a_head_without_a_depth_limit_drafts_deeper_while_it_may_pay():
    """0.6^5 is above 0.05 and 0.6^6 below; the other head's depth is fixed by its weights."""
    assert [len(choices_of(head, untuned(head))) for head in (tiny_head(), tiny_head(architecture="eagle3"))] == [3, 5]


OLD_COSTS = [{"rows": 1, "greedy": True, "verify": [[8, 1.4]], "drafts": [{"chain": 1, "cost": 1.2}]}]
NO_NUMBERS = [{"rows": 1, "greedy": True, "head": "a", "level": 0.1, "token": 0.1}]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"acceptance": 1, "trees": {}, "lookup": [], "costs": []}'])
def test_a_file_that_tune_did_not_write_is_refused(tuned_folder, text):
    (tuned_folder / "decoding.json").write_text(text)
    with pytest.raises(UserError, match=r"decoding\.json"):
        read_tuning(tuned_folder, tiny_head(vocab_size=300))


@pytest.mark.parametrize("lookup", [[], {"greedy": [0.2]}, {"greedy": [0.2], "sampled": ["a"]}])
def test_rates_of_lookup_in_another_form_are_refused(tuned_folder, lookup):
    write_tuning(tuned_folder, lookup=lookup)
    with pytest.raises(UserError, match=r"decoding\.json"):
        read_tuning(tuned_folder, tiny_head(vocab_size=300))


@pytest.mark.parametrize("costs", [OLD_COSTS, NO_NUMBERS])
def test_step_costs_in_another_form_are_refused(tuned_folder, costs):
    write_tuning(tuned_folder, costs=costs)
    with pytest.raises(UserError, match=r"decoding\.json"):
        read_tuning(tuned_folder, tiny_head(vocab_size=300))


def test_a_file_for_a_head_of_another_depth_is_refused(tuned_folder):
    write_tuning(tuned_folder, n_predict=5)
    with pytest.raises(UserError, match="depth"):
        read_tuning(tuned_folder, tiny_head(vocab_size=300))


@pytest.mark.parametrize("flags", [["--num_speculative_tokens", "3"], ["--rule", "block", "--temperature", "0.7"]])
def test_a_flag_that_names_a_draft_ends_adaptive_drafting(target_folder, tuned_folder, capsys, flags):
    (tuned_folder / "decoding.json").write_text("not read")
    command = ["generate", "--target", str(target_folder), "--speculator", str(tuned_folder), "--prompt", "def f"]
    assert main([*command, "--max_new_tokens", "8", *flags]) == 0
    assert main([*command, "--max_new_tokens", "8"]) == 2
    assert "decoding.json" in capsys.readouterr().err


def test_custom_generate_drafts_adaptively_from_a_folder(target_folder, tuned_folder, never_measured):
    target = Target.load(str(target_folder))
    ids = target.tokenizer("def f", return_tensors="pt").input_ids
    ours = target.model.generate(ids, custom_generate=speculative(tuned_folder), max_new_tokens=12, do_sample=False)
    assert ours.tolist() == target.model.generate(ids, max_new_tokens=12, do_sample=False).tolist()
