"""Heads of encoder-decoder targets: a row is trained on with its own source, and drafts as it was trained."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import shorten_validation, tiny_head, tiny_tokenizer
from encoder_decoders import VOCAB, random_texts, save_encoder_decoder, tiny_encoder_decoder

from data.onpolicy import generate_rows
from data.writing import Writing
from eval.suites import Suite
from eval.validation import real_acceptance
from speculator import Sampling, Target, UserError
from speculator.heads import Speculator
from train import trainer
from train.command_line import parse
from train.config import ROOT, LossConfig
from train.kept_states import KeptStates
from train.run import main
from train.trainer import SOURCES, Collator, SpeculatorTrainer, arguments


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_encoder_decoder("flan"), tokenizer=None)


def trainer_of(target: Target, head: Speculator, rows: list[dict], folder: Path, **settings) -> SpeculatorTrainer:
    return SpeculatorTrainer(
        model=head,
        target=target,
        loss=LossConfig(cross_entropy=1.0, kl=0.0),
        decode=lambda head: dict.fromkeys(("acceptance_length", "acceptance_length_sampled"), 1.0),
        args=arguments(output_dir=str(folder), report_to="none", **settings),
        data_collator=Collator(head.config),
        train_dataset=rows,
        eval_dataset=rows,
    )


def test_each_row_of_a_batch_is_trained_on_with_its_own_source(target, tmp_path):
    texts = zip(random_texts(9, 5), random_texts(9, 9, seed=2), strict=True)
    rows, head = (
        [{"source_ids": source, "input_ids": [0, *text]} for source, text in texts],
        tiny_head(vocab_size=VOCAB),
    )
    own = trainer_of(target, head, rows, tmp_path, max_steps=1)

    def loss(rows: list[dict], swap: bool = False) -> float:
        batch = own.data_collator(rows)
        batch[SOURCES] = batch[SOURCES][::-1] if swap else batch[SOURCES]
        return own.compute_loss(head, batch, num_items_in_batch=torch.tensor(1)).item()

    alone = sum(loss([row]) for row in rows)
    assert loss(rows) == pytest.approx(alone, rel=1e-5)
    assert loss(rows, swap=True) != pytest.approx(alone, rel=1e-2)


def test_kept_states_of_one_text_differ_by_its_source(target, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path))
    rows = [{"source_ids": source, "input_ids": [0, 5, 6, 7]} for source in random_texts(2, 9)]
    kept = KeptStates(target, (), normalisers=False)
    collate = Collator(tiny_head(vocab_size=VOCAB).config, documents=True)
    first, second = kept.take(collate(rows)).hidden
    assert not torch.allclose(first, second, atol=1e-2)
    assert torch.equal(kept.take(collate(rows[1:])).hidden[0], second)


@pytest.mark.parametrize("architecture", ["mlp", pytest.param("lstm", marks=pytest.mark.soak)])
def test_a_head_learns_to_draft_the_targets_answers(target, tmp_path, architecture):
    prompts = random_texts(5, 9, 7, 12)
    greedy = Writing(samplings=(Sampling(0.0),), max_new_tokens=16)
    rows = generate_rows(target, None, prompts, tmp_path / "rows", greedy)
    torch.manual_seed(0)
    head = tiny_head(architecture=architecture, vocab_size=VOCAB)
    before = real_acceptance(target, head, Suite("train", prompts), 0, 16)["acceptance_length"]
    settings = {"max_steps": 70, "learning_rate": 2e-2, "eval_steps": 500, "save_steps": 500, "logging_steps": 70}
    trainer_of(target, head, rows, tmp_path / "run", **settings).train()
    after = real_acceptance(target, head, Suite("train", prompts), 0, 16)["acceptance_length"]
    assert before < 1.5
    assert after > 3.5  # of 4


_SETTINGS = {
    "data.seq_length": 32,
    "speculator.n_predict": 3,
    "stage1.max_steps": 8,
    "stage1.per_device_train_batch_size": 4,
    "stage1.warmup_steps": 2,
    "stage1.logging_steps": 3,
    "stage1.eval_steps": 4,
    "stage2.max_steps": 4,
    "stage2.eval_steps": 4,
    "stage2.per_device_train_batch_size": 4,
    "stage2.generate.max_rows": 8,
    "stage2.generate.max_new_tokens": 8,
    "stage2.generate.num_speculative_tokens": 2,
    "eval.validation_rows": 3,
    "eval.validation_prompts": 2,
    "eval.tune_prompts": 0,
    "eval.max_prompts": 1,
    "eval.max_new_tokens": 8,
    "report_to": "none",
}


def report(config, *_) -> None:
    """Stands in for the final evaluation, which takes most of a small run's time."""
    folder = Path(config.output_dir) / "eval"
    folder.mkdir()
    (folder / "report.json").write_text("{}")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs of train.py on pairs of texts: (output folder, settings) -> exit code."""
    folder = tmp_path_factory.mktemp("runs")
    save_encoder_decoder(folder / "target", "flan")
    pairs = folder / "pairs.jsonl"
    texts = [(f"import {n} as name", f"def name{n}(self): return {n}") for n in range(40)]
    pairs.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in texts))

    def run(output: Path, **settings) -> int:
        given = {"target.name_or_path": folder / "target", "data.sources": f"[{pairs}]", **_SETTINGS, **settings}
        flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECULATOR_CACHE", str(output.with_name(f"cache-of-{output.name}")))
            patch.setattr("train.run.measure", report)
            patch.setattr("train.run.summary", lambda *_: "")
            shorten_validation(patch)
            return main(parse([f"--config={ROOT / 'tests/plain.yaml'}", f"--output_dir={output}", *flags]))

    return run


def test_a_stopped_run_resumes_to_the_same_head(run, tmp_path, monkeypatch):
    """The first stage is stopped after step 6; the second one trains on answers that the target wrote.

    Both keep the target's states, and the stopped run has other files of them than the whole one.
    """
    run = partial(run, **{"stage1.keep_states": True, "stage2.keep_states": True})
    assert run(tmp_path / "whole") == 0
    config = json.loads((tmp_path / "whole/stage1/speculator/config.json").read_text())
    longest = max(len(tiny_tokenizer()(f"def name{n}(self): return {n}")["input_ids"]) for n in range(40))
    assert config["trained_length"] == longest + 2  # with start token and EOS; rows may have 32 tokens
    asked = iter(range(1, 100))
    monkeypatch.setattr(trainer, "stop_asked", lambda: next(asked) >= 7)
    assert run(tmp_path / "stopped") == 143
    monkeypatch.undo()
    assert run(tmp_path / "stopped") == 0
    for name in ("stage1/checkpoint-8", "stage2/checkpoint-4", "speculator"):
        whole, stopped = ((tmp_path / each / name / "model.safetensors").read_bytes() for each in ("whole", "stopped"))
        assert whole == stopped, name


def test_a_target_that_does_not_decode_is_not_trained_for(run, tmp_path, monkeypatch, capfd):
    def fail(target):
        raise UserError("unfit")

    monkeypatch.setattr("speculator.target.model.probe", fail)
    assert run(tmp_path / "run", **{"stage2.max_steps": 0}) == 2
    assert "unfit" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculator.architecture": "eagle3", "speculator.options": "{aux_layers: [0, 1]}"}, "mlp and lstm"),
        ({"data.sources": "[self]"}, "encoder needs prompts"),
        ({"plan": "here"}, "encoder-decoder"),
        ({"dry_run": "true"}, "encoder-decoder"),
        ({"target.server": "[http://localhost:1]", "stage2.max_steps": 0}, "encoder-decoder"),
        ({"data.sources": f"[{ROOT / 'README.md'}]"}, '"prompt" and "completion"'),
        ({"data.seq_length": 6}, "data.seq_length"),
    ],
)
def test_what_is_missing_is_refused_in_one_line(run, tmp_path, capfd, settings, message):
    assert run(tmp_path / "run", **settings) == 2
    assert message in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
