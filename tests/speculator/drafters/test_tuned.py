"""`generate` drafts as `tune` found best, unless a flag says how."""

import pytest
import torch
from conftest import tiny_head, write_tuned
from transformers import AutoModelForCausalLM

from speculator import (
    Chain,
    FixedTree,
    MLPSpeculator,
    MLPSpeculatorConfig,
    Target,
    UserError,
    generate,
    load_head,
    speculative,
)
from speculator.__main__ import main
from speculator.drafters import HeadDrafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.costs import CostEntry
from speculator.drafters.tuned import automatic, shapes_to_measure, tuned_drafter

SETTINGS = [{"temperature": 0.0, "num_speculative_tokens": 2}, {"temperature": 1.0, "tree": [[0], [1], [0, 0]]}]
MEASURED = [
    {
        "temperature": temperature,
        "batch_size": 1,
        "num_speculative_tokens": length,
        "acceptance_by_position": [0.6] * length,
    }
    for temperature in (0.0, 1.0)
    for length in (1, 2, 3)
]
STEPS = [{"num_speculative_tokens": n, "draft": 0.1 * n, "verify": 1 + 0.01 * n} for n in (0, 1, 3)]
COSTS = [
    {"rows": rows, "context": 64, "greedy": greedy, "seconds": 0.01, "steps": STEPS}
    for rows in (1, 8)
    for greedy in (True, False)
]
FIGURES = {"measured": MEASURED, "lookup": [0.2, 0.3, 0.4], "costs": COSTS}


@pytest.fixture
def tuned_folder(tmp_path):
    folder = tmp_path / "head"
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(folder)
    write_tuned(folder, SETTINGS)
    return folder


def shapes_of(monkeypatch):
    """The shapes of the head drafters that are made from here on."""
    made = []
    init = HeadDrafter.__init__

    def noting(self, *args):
        init(self, *args)
        made.append(self.shape)

    monkeypatch.setattr(HeadDrafter, "__init__", noting)
    return made


@pytest.mark.parametrize(
    ("flags", "kind", "nodes"),
    [
        ([], Chain, 2),
        (["--temperature", "0.7"], FixedTree, 3),
        (["--num_speculative_tokens", "3"], Chain, 3),
        (["--temperature", "0.7", "--rule", "block"], Chain, 3),
    ],
)
def test_the_tuned_shape_is_the_default(target_folder, tuned_folder, monkeypatch, capsys, flags, kind, nodes):
    made = shapes_of(monkeypatch)
    command = ["generate", "--target", str(target_folder), "--speculator", str(tuned_folder), "--prompt", "def f"]
    texts = []
    for present in (True, False):
        if not present:
            (tuned_folder / "decoding.json").unlink()
        assert main([*command, "--max_new_tokens", "12", *flags]) == 0
        output = capsys.readouterr()
        texts.append(output.out)
        given = {"--num_speculative_tokens", "--rule"} & set(flags)
        assert ("decoding.json: drafts" in output.err) == (present and not given)
    assert (type(made[0]), made[0].nodes) == (kind, nodes)
    assert (type(made[1]), made[1].nodes) == (Chain, 3)
    if not flags:
        assert texts[0] == texts[1], "at temperature 0 the text is the target's, whatever is drafted"


def test_what_was_tuned_for_a_deeper_head_is_refused(target_folder, tuned_folder, capsys):
    write_tuned(tuned_folder, [{"temperature": 0.0, "num_speculative_tokens": 5}])
    command = ["generate", "--target", str(target_folder), "--speculator", str(tuned_folder), "--prompt", "def f"]
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "decoding.json is for a head of 5 tokens: tune this one anew" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("otherwise", "said"),
    [
        ({"batch_size": 8}, "batch size 8, and this is"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"hardware": "CPU of another make, 96 threads"}, "CPU of another make, 96 threads"),
        ({"hardware": None}, "it does not say where"),  # as old files are
    ],
)
def test_what_was_measured_elsewhere_is_not_believed(target_folder, tuned_folder, caplog, otherwise, said):
    write_tuned(tuned_folder, SETTINGS, **otherwise)
    target = Target.load(str(target_folder))
    drafter = tuned_drafter(tuned_folder, target, 1.0)
    assert (type(drafter.shape), drafter.nodes) == (Chain, 3)
    (line,) = caplog.messages
    assert said in line
    assert f"python -m eval tune --target {target.name} --speculator {tuned_folder} --batch_size 1" in line


def test_a_batch_size_is_part_of_it(target_folder, tuned_folder):
    target = Target.load(str(target_folder))
    assert [tuned_drafter(tuned_folder, target, 0.0, rows).nodes for rows in (1, 2)] == [2, 3]


def test_a_folder_given_to_generate_of_transformers_drafts_as_tuned(target_folder, tuned_folder, monkeypatch, caplog):
    made = shapes_of(monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    drafted = speculative(tuned_folder)
    ids = torch.tensor([[5, 6, 7]])
    for settings in ({}, {}, {"do_sample": True, "temperature": 0.8}, {"num_return_sequences": 2, "do_sample": True}):
        model.generate(ids, max_new_tokens=6, custom_generate=drafted, **settings)
    assert [(type(shape), shape.nodes) for shape in made] == [(Chain, 2), (FixedTree, 3), (Chain, 3)]
    (line,) = caplog.messages
    assert "batch size 1, and this is" in line


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {},
        [{}],
        [{"temperature": "warm", "num_speculative_tokens": 2}],
        [{"temperature": 0.0}],
        [{"temperature": 0.0, "num_speculative_tokens": 0}],
        [{"temperature": 0.0, "num_speculative_tokens": "2"}],
        [{"temperature": 0.0, "num_speculative_tokens": 2.5}],
        [{"temperature": 0.0, "num_speculative_tokens": True}],
        [{"temperature": 0.0, "num_speculative_tokens": 10**9}],
        [{"temperature": 0.0, "tree": []}],
        [{"temperature": 0.0, "tree": [[1]]}],
        [{"temperature": 0.0, "tree": [["a"]]}],
        [{"temperature": 0.0, "tree": [[0.5]]}],
        [{"temperature": 0.0, "tree": [[i] for i in range(2000)]}],
        [{"temperature": float("nan"), "num_speculative_tokens": 2}],
    ],
)
def test_a_file_that_tune_did_not_write_is_refused(target_folder, tuned_folder, settings):
    refuse_file(target_folder, tuned_folder, settings)


@pytest.mark.parametrize(
    "damage",
    [
        {"measured": 3},
        {"measured": [{"acceptance_by_position": [0.5]}]},
        {"measured": [{**MEASURED[0], "num_speculative_tokens": -1}]},
        {"measured": [{**MEASURED[0], "acceptance_by_position": ["often"]}]},
        {"measured": [{**MEASURED[0], "acceptance_by_position": [float("nan")] * 3}]},
        {"measured": [{**MEASURED[0], "acceptance_by_position": []}]},
        {"costs": [{**COSTS[0], "seconds": 0}]},
        {"costs": [{**COSTS[0], "rows": 0}]},
        {"lookup": ["x"]},
        {"costs": [{**COSTS[0], "rows": "many"}]},
        {"costs": [{**COSTS[0], "steps": []}]},
        {"costs": [{**COSTS[0], "steps": [{"num_speculative_tokens": 1, "draft": None, "verify": 1.0}]}]},
    ],
)
def test_figures_that_tune_did_not_write_are_refused(target_folder, tuned_folder, damage):
    refuse_file(target_folder, tuned_folder, SETTINGS, **FIGURES | damage)


def test_chains_of_all_lengths_tell_together_how_often_a_depth_is_accepted(target_folder, tuned_folder):
    """By 1.5 and 2.12 tokens a step the first depth was tried in 1/1.5 and 1/2.12 steps of as many tokens; a tree's
    acceptance is its own."""
    figures = [{"num_speculative_tokens": 1}, {"num_speculative_tokens": 2}, {"tree": [[0], [1]]}]
    for each, chances in zip(figures, ([0.5], [0.7, 0.6], [0.9]), strict=True):
        each |= {"temperature": 0.0, "batch_size": 1, "acceptance_by_position": chances}
    write_tuned(tuned_folder, SETTINGS, **{**FIGURES, "measured": figures})
    choices = tuned_drafter(tuned_folder, Target.load(str(target_folder))).choices
    first = (0.5 / 1.5 + 0.7 / 2.12) / (1 / 1.5 + 1 / 2.12)
    assert [list(choice.acceptance[True]) for choice in choices] == [
        pytest.approx([first]),
        pytest.approx([first, 0.6]),
        [0.9],
    ]


def test_who_decodes_at_both_kinds_of_temperature_takes_one_that_was_tuned_for_the_other(target_folder, tuned_folder):
    figures = [{"num_speculative_tokens": 1}, {"num_speculative_tokens": 2}, {"tree": [[0], [1]]}]
    for each, chances in zip(figures, ([0.5], [0.7, 0.6], [0.9]), strict=True):
        each |= {"temperature": 0.0, "batch_size": 1, "acceptance_by_position": chances}
    write_tuned(tuned_folder, SETTINGS, **{**FIGURES, "measured": figures})
    target = Target.load(str(target_folder))
    head = load_head(tuned_folder, target)
    both = automatic(tuned_folder, target, head, [0.0, 1.0], 1)
    assert both is not None
    greedy, sampled = ([c.shape for c in both.choices if kind in c.acceptance] for kind in (True, False))
    assert len(greedy) == 3
    assert all(isinstance(shape, Chain) for shape in sampled)
    assert len(sampled) == 2
    assert automatic(tuned_folder, target, head, [1.0], 1) is None
    write_tuned(tuned_folder, SETTINGS[:1], **{**FIGURES, "measured": figures})
    alone = automatic(tuned_folder, target, head, [0.0, 1.0], 1).alone
    assert alone.depth == tuned_drafter(tuned_folder, target, 1.0, auto=False).shape.depth == 3


def test_a_file_of_an_older_version_says_what_to_draft_and_no_more(target_folder, tuned_folder):
    write_tuned(tuned_folder, SETTINGS, measured=[{"temperature": 0.0, "num_speculative_tokens": 2, "speedup": 1.2}])
    drafter = tuned_drafter(tuned_folder, Target.load(str(target_folder)))
    assert not isinstance(drafter, AdaptiveDrafter)
    assert drafter.shape.depth == SETTINGS[0]["num_speculative_tokens"]


def refuse_file(target_folder, tuned_folder, settings, **more):
    write_tuned(tuned_folder, settings, **more)
    with pytest.raises(UserError, match=r"decoding\.json is not what `python -m eval tune` writes"):
        tuned_drafter(tuned_folder, Target.load(str(target_folder)), 0.0)


# ---- where what was accepted and what steps cost was noted


def measured_here(monkeypatch, verify: float, most: int | None = None) -> list:
    """What is measured from here on: chains that cost little, passes that cost `verify` a token; time for `most`."""
    asked = []

    def measure(target, head, shapes, sizes, seconds):
        asked.append(sizes)
        steps = [(shape, 0.1 * shape.depth, 1 + verify * shape.nodes) for shape in shapes]
        return [CostEntry(rows, context, greedy, 0.01, steps) for rows, context, greedy in sizes[:most]]

    monkeypatch.setattr("speculator.drafters.tuned.measure_table", measure)
    return asked


def test_what_was_measured_here_is_believed(target_folder, tuned_folder, monkeypatch):
    asked = measured_here(monkeypatch, 9.0)
    write_tuned(tuned_folder, SETTINGS, **FIGURES)
    target = Target.load(str(target_folder))
    drafter = tuned_drafter(tuned_folder, target, 1.0, batch_size=4)
    assert isinstance(drafter, AdaptiveDrafter)
    assert not asked
    fixed = tuned_drafter(tuned_folder, target, 1.0, auto=False)
    assert isinstance(fixed.shape, FixedTree), "what was decoded fastest"
    assert drafter.alone.paths == fixed.shape.paths
    assert tuned_drafter(tuned_folder, target, 0.0, batch_size=8, auto=False).shape.depth == 3, "by what steps cost"


@pytest.mark.parametrize(("deepest", "lengths"), [(2, [0, 1, 2]), (5, [0, 1, 2, 5]), (20, [0, 1, 2, 8])])
def test_costs_are_those_of_no_draft_of_the_first_two_tokens_and_of_the_longest_chain(deepest, lengths):
    *chains, mixed = shapes_to_measure(tiny_head(n_predict=deepest), [])
    assert [shape.depth for shape in chains] == lengths
    assert mixed.inner.depth == lengths[-1]


def test_of_one_row_what_a_long_text_costs_is_measured_too(target_folder, tuned_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    asked = measured_here(monkeypatch, 9.0)
    write_tuned(tuned_folder, SETTINGS, **FIGURES | {"dtype": "bfloat16"})
    target = Target.load(str(target_folder))
    target.context_length = 4096
    tuned_drafter(tuned_folder, target, 1.0)
    assert asked == [[(1, 64, False), (1, 1024, False)]]


def test_what_there_was_no_time_for_is_measured_by_who_wants_it_most(
    target_folder, tuned_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    asked = measured_here(monkeypatch, 0.1, most=1)
    write_tuned(tuned_folder, SETTINGS, **FIGURES | {"dtype": "bfloat16"})
    target = Target.load(str(target_folder))
    for rows in (16, 4, 16, 4):
        tuned_drafter(tuned_folder, target, 1.0, batch_size=rows)
    assert [sizes[0] for sizes in asked] == [(16, 64, False), (1, 64, False), (4, 64, False)]


@pytest.mark.parametrize("elsewhere", [{"hardware": "CPU of another make, 96 threads"}, {"dtype": "bfloat16"}])
def test_what_was_measured_elsewhere_is_measured_anew_once(
    target_folder, tuned_folder, tmp_path, monkeypatch, elsewhere
):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    asked = measured_here(monkeypatch, 9.0)
    write_tuned(tuned_folder, SETTINGS, **FIGURES | elsewhere)
    target = Target.load(str(target_folder))
    drafters = [tuned_drafter(tuned_folder, target, 1.0, batch_size=4) for _ in range(2)]
    assert asked == [[(4, 64, False), (2, 64, False), (1, 64, False)]]
    assert [drafter.alone.depth for drafter in drafters] == [1, 1], "a verify pass is dear here"
    assert tuned_drafter(tuned_folder, target, 1.0, auto=False).shape.depth == 1
    assert len(asked) == 1
    (file,) = (tmp_path / "cache" / "steps").glob("*.json")
    for damaged in ("[", "[]", '{"entries": 3}', file.read_text().replace("false", "0")):
        file.write_text(damaged)
        tuned_drafter(tuned_folder, target, 1.0, batch_size=4)
    assert len(asked) == 5


def test_what_one_start_measured_no_other_measures_again(target_folder, tuned_folder, tmp_path, monkeypatch):
    """Several rows, and the one that is drafted for alone, whose long texts are wanted too."""
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    asked = measured_here(monkeypatch, 9.0)
    write_tuned(tuned_folder, SETTINGS, **FIGURES | {"dtype": "bfloat16"})
    target = Target.load(str(target_folder))
    target.context_length = 4096
    for _ in range(2):
        tuned_drafter(tuned_folder, target, 1.0, batch_size=4)
        assert asked == [[(4, 64, False), (2, 64, False), (1, 64, False)], [(1, 1024, False)]]


def test_steps_are_really_measured(target_folder, tuned_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    write_tuned(tuned_folder, SETTINGS, **FIGURES, hardware="another")
    target = Target.load(str(target_folder))
    drafter = tuned_drafter(tuned_folder, target, 1.0)
    text = generate(target, drafter, [[5, 6, 7]], max_new_tokens=20).tokens
    assert text == generate(target, None, [[5, 6, 7]], max_new_tokens=20).tokens


def test_generate_chooses_before_each_step_unless_told_otherwise(target_folder, tuned_folder, capsys):
    write_tuned(tuned_folder, SETTINGS, **FIGURES)
    command = ["generate", "--target", str(target_folder), "--speculator", str(tuned_folder), "--prompt", "def f"]
    texts = []
    for flags, said in (([], True), (["--num_speculative_tokens", "2"], False)):
        assert main([*command, "--max_new_tokens", "12", *flags]) == 0
        output = capsys.readouterr()
        texts.append(output.out)
        assert ("drafts what is the fastest before each step" in output.err) == said
    assert texts[0] == texts[1]
