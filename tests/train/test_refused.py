"""Tokens that took a refused draft's place count more: from the rows to the loss, in stage 2 alone."""

import pytest
import torch
from conftest import settled, tiny_head
from datasets import Dataset
from transformers import TrainingArguments

from eval.suites import Suite
from speculator.heads.training import IGNORE
from train import stages
from train.config import LossConfig, RunConfig, Stage2Config, StageConfig
from train.inputs import Inputs
from train.sizes import with_steps
from train.trainer import Collator, SpeculatorTrainer

CONFIG = tiny_head(3).config
ROWS = [
    {
        "input_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "loss_mask": [0, 0, 1, 1, 1, 1, 1, 1],
        "rejected": [0, 0, 0, 1, 0, 1, 0, 1],
    },
    {"input_ids": [9, 8, 7, 6, 5, 4], "loss_mask": [0, 1, 1, 1, 1, 1], "rejected": [0, 0, 0, 0, 1, 0]},
]


def test_marked_tokens_get_the_configured_weight():
    assert "token_weights" not in Collator(CONFIG)(ROWS)
    weights = Collator(CONFIG, 2.5)(ROWS)["token_weights"]
    assert weights.tolist() == [[1, 1, 1, 2.5, 1, 2.5, 1, 2.5], [1, 1, 1, 1, 2.5, 1, 1, 1]]
    without = [{name: row[name] for name in ("input_ids", "loss_mask")} for row in ROWS]
    assert torch.equal(Collator(CONFIG, 2.5)(without)["token_weights"], torch.ones(2, 8))


def test_the_loss_weighs_tokens_after_rejected_drafts_as_configured(target, tmp_path):
    head = tiny_head().train()
    how = TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    trainer = SpeculatorTrainer(model=head, target=target, loss=LossConfig(), decode=lambda _: {}, args=how)

    def gradients(batch):
        head.zero_grad()
        trainer.compute_loss(head, batch, num_items_in_batch=torch.tensor(7.0)).backward()
        return [parameter.grad.clone() for parameter in head.parameters()]

    plain, weighted = Collator(CONFIG)(ROWS), Collator(CONFIG, 2.5)(ROWS)
    alone = Collator(CONFIG)(ROWS)  # the labels of refused tokens, no others: head i at t predicts x[t+2+i]
    refused = torch.nn.functional.pad(weighted["token_weights"], (0, CONFIG.n_predict - 1)) > 1
    for i, labels in enumerate(alone["labels"].unbind(1)):
        labels[~refused[:, i + 2 : i + 2 + labels.shape[1]]] = IGNORE
    assert (alone["labels"] != IGNORE).any(-1).all(), "every head has some"
    for whole, part, both in zip(gradients(plain), gradients(alone), gradients(weighted), strict=True):
        torch.testing.assert_close(both, whole + 1.5 * part, rtol=1e-4, atol=1e-6)
    head.eval()
    with torch.no_grad():
        losses = [trainer.compute_loss(head, batch).item() for batch in (plain, weighted)]
    assert losses[0] == losses[1], "what is evaluated does not know of weights"


class Begun(BaseException):
    """Training would begin here."""


def settled_and_read(config, target, rows):
    run = settled(config, target)
    return (
        target,
        tiny_head,
        Inputs(
            run=run,
            length=8,
            train_rows=rows,
            validation_rows=rows,
            suites={"validation": Suite("text", [[1, 2]])},
            own_prompts=None,
            plan=None,
        ),
    )


@pytest.mark.parametrize(("stage", "weight"), [("stage1", None), ("stage2", 3.0)])
def test_stage_1_has_no_token_weights_unless_configured(target, tmp_path, monkeypatch, stage, weight):
    def begin(*, data_collator, **_):
        raise Begun(data_collator.rejected_token_weight)

    monkeypatch.setattr(stages, "SpeculatorTrainer", begin)
    config = RunConfig(output_dir=str(tmp_path), report_to="none", stage2=Stage2Config(rejected_token_weight=3.0))
    rows = Dataset.from_list(ROWS)
    with pytest.raises(Begun) as stopped:
        stages.train_stage(stage, *settled_and_read(config, target, rows))
    assert stopped.value.args == (weight,)


@pytest.mark.parametrize("epochs", [1.0, 50.0])
def test_a_warm_up_longer_than_its_epochs_is_a_warning(target, tmp_path, epochs, monkeypatch, capsys):
    settings = with_steps(StageConfig(max_steps=7, epochs=epochs, warmup_steps=50), len(ROWS), 1, 16)

    def begin(**_):
        raise Begun

    monkeypatch.setattr(stages, "SpeculatorTrainer", begin)
    config = RunConfig(output_dir=str(tmp_path), report_to="none", stage1=settings)
    rows = Dataset.from_list(ROWS)
    with pytest.raises(Begun):
        stages.train_stage("stage1", *settled_and_read(config, target, rows))
    assert ("stage1.warmup_steps (50) exceeds the 2 steps" in capsys.readouterr().err) == (epochs == 1)
