"""`generate` drafts as `tune` found best, unless it is told how."""

import json

import pytest

from speculator import Chain, FixedTree, MLPSpeculator, MLPSpeculatorConfig
from speculator.__main__ import main
from speculator.drafters import HeadDrafter

SETTINGS = [{"temperature": 0.0, "draft_length": 2}, {"temperature": 1.0, "tree": [[0], [1], [0, 0]]}]


@pytest.fixture
def tuned_folder(tmp_path):
    folder = tmp_path / "head"
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(folder)
    (folder / "decoding.json").write_text(json.dumps({"settings": SETTINGS}))
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
        told = {"--draft_length", "--rule"} & set(flags)
        assert ("decoding.json: drafts" in output.err) == (present and not told)
    assert (type(made[0]), made[0].nodes) == (kind, nodes)
    assert (type(made[1]), made[1].nodes) == (Chain, 3)
    if not flags:
        assert texts[0] == texts[1], "at temperature 0 the text is the target's, whatever is drafted"


def test_what_was_tuned_for_a_deeper_head_is_refused(target_folder, tuned_folder, capsys):
    (tuned_folder / "decoding.json").write_text(json.dumps({"settings": [{"temperature": 0.0, "draft_length": 5}]}))
    command = ["generate", "--target", str(target_folder), "--speculator", str(tuned_folder), "--prompt", "def f"]
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "decoding.json is for a head of 5 tokens: tune this one anew" in error
    assert error.count("\n") == 1
