"""`generate` drafts as `tune` found best, unless it is told how."""

import pytest
import torch
from conftest import write_tuned
from transformers import AutoModelForCausalLM

from speculator import Chain, FixedTree, MLPSpeculator, MLPSpeculatorConfig, Target, UserError, speculative
from speculator.__main__ import main
from speculator.drafters import HeadDrafter
from speculator.drafters.tuned import tuned_drafter

SETTINGS = [{"temperature": 0.0, "draft_length": 2}, {"temperature": 1.0, "tree": [[0], [1], [0, 0]]}]


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
        (["--draft_length", "3"], Chain, 3),
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
        given = {"--draft_length", "--rule"} & set(flags)
        assert ("decoding.json: drafts" in output.err) == (present and not given)
    assert (type(made[0]), made[0].nodes) == (kind, nodes)
    assert (type(made[1]), made[1].nodes) == (Chain, 3)
    if not flags:
        assert texts[0] == texts[1], "at temperature 0 the text is the target's, whatever is drafted"


def test_what_was_tuned_for_a_deeper_head_is_refused(target_folder, tuned_folder, capsys):
    write_tuned(tuned_folder, [{"temperature": 0.0, "draft_length": 5}])
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
        [{"temperature": "warm", "draft_length": 2}],
        [{"temperature": 0.0}],
        [{"temperature": 0.0, "draft_length": 0}],
        [{"temperature": 0.0, "draft_length": "2"}],
        [{"temperature": 0.0, "draft_length": 2.5}],
        [{"temperature": 0.0, "draft_length": True}],
        [{"temperature": 0.0, "draft_length": 10**9}],
        [{"temperature": 0.0, "tree": []}],
        [{"temperature": 0.0, "tree": [[1]]}],
        [{"temperature": 0.0, "tree": [["a"]]}],
        [{"temperature": 0.0, "tree": [[0.5]]}],
        [{"temperature": 0.0, "tree": [[i] for i in range(2000)]}],
        [{"temperature": float("nan"), "draft_length": 2}],
    ],
)
def test_a_file_that_tune_did_not_write_is_refused(target_folder, tuned_folder, settings):
    write_tuned(tuned_folder, settings)
    with pytest.raises(UserError, match=r"decoding\.json is not what `python -m eval tune` writes"):
        tuned_drafter(tuned_folder, Target.load(str(target_folder)), 0.0)
