"""A run is settled once: its sources are parsed, its head's config is built and its plan is made in one place."""

from collections import Counter

import pytest
from conftest import shorten_validation
from transformers import ViTConfig

from data import mixture
from speculator.errors import UserError
from speculator.heads import SpeculatorConfig
from train import run, server_command
from train.command_line import parse
from train.door import plan, settle
from train.door.gpus import GPUS, Place
from train.folder import write_record
from train.options.config import ROOT

STAGE = {"max_steps": 1, "warmup_steps": 0, "eval_steps": 1, "save_steps": 1, "per_device_train_batch_size": 2}
SIZES = {f"{stage}.{name}": value for stage in ("stage1", "stage2") for name, value in STAGE.items()}
SIZES |= {"stage2.generate.max_rows": 4, "stage2.generate.prompt_tokens": 8, "stage2.generate.max_new_tokens": 8}
SIZES |= {"stage2.generate.num_speculative_tokens": 2, "eval.temperatures": "[0.0]"}
SIZES |= {"data.max_tokens": 2000, "eval.validation_rows": 2, "eval.validation_prompts": 1, "eval.tune_prompts": 0}
SIZES |= {"eval.prompt_tokens": 8, "eval.max_prompts": 1, "eval.max_new_tokens": 4, "report_to": "none"}


@pytest.fixture
def flags(target_folder, text_file, tmp_path, monkeypatch):
    """The settings of a tiny run whose row length is its target's."""
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    named = {"config": ROOT / "tests/plain.yaml", "target.name_or_path": target_folder, "output_dir": tmp_path / "run"}
    settings = {**named, "data.sources": f"[{text_file}]", "data.seq_length": 0, **SIZES}
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@pytest.fixture
def counts(monkeypatch):
    """How often each thing was settled, on a machine with a large GPU."""
    made: Counter[str] = Counter()

    def counted(name, call):
        return lambda *given, **named: made.update([name]) or call(*given, **named)

    for_target = SpeculatorConfig.for_target.__func__
    monkeypatch.setattr(SpeculatorConfig, "for_target", classmethod(counted("head", for_target)))
    monkeypatch.setattr(mixture, "_parse", counted("source", mixture._parse))
    monkeypatch.setattr(plan.Plan, "__init__", counted("plan", plan.Plan.__init__))
    monkeypatch.setattr(settle, "place_of", lambda *_: Place(processes=1, name="H100", memory=10**12, gpu=GPUS["H100"]))
    return made


def test_a_run_is_settled_once(flags, counts, figures_only, monkeypatch):
    shorten_validation(monkeypatch)
    run.run(parse(flags))
    assert counts == {"source": 1, "head": 1, "plan": 1}


def test_a_plan_and_a_line_for_servers_are_settled_once(flags, counts, capsys):
    assert run.main(parse([*flags, "--plan"])) == 0
    assert counts == {"source": 1, "head": 1, "plan": 1}
    counts.clear()
    assert server_command.main(flags) == 0
    assert counts == {"source": 1, "head": 1}


def test_a_target_that_cant_be_read_is_named_before_the_folder_is_compared(flags, tmp_path):
    """Its row length would be another one, as if this were another run."""
    shape = ["--data.seq_length", "0", "--target.name_or_path", str(tmp_path / "moved")]
    write_record(tmp_path / "run", parse([*flags, "--data.seq_length", "64"]), 1)
    with pytest.raises(UserError, match=r"can't load the target .*moved"):
        run.run(parse([*flags, *shape]))


def test_a_finished_run_needs_no_target(flags, tmp_path, monkeypatch, capsys):
    config = parse([*flags, "--data.seq_length", "64"])
    write_record(tmp_path / "run", config, 1)
    monkeypatch.setattr(run, "is_finished", lambda _: True)
    monkeypatch.setattr(run, "summary", lambda _: "its results")
    monkeypatch.setattr(run, "write_card", lambda _: None)
    monkeypatch.setattr(settle, "load_config", None)
    run.run(config)
    assert "is done" in capsys.readouterr().out


def test_a_model_without_a_vocabulary_is_refused_in_one_line(flags, tmp_path):
    ViTConfig(hidden_size=8).save_pretrained(tmp_path / "vit")
    with pytest.raises(UserError, match="can't load the target"):
        run.run(parse([*flags, "--target.name_or_path", str(tmp_path / "vit"), "--speculator.draft_vocab_size", "64"]))
