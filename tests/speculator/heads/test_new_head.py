"""A new architecture is one class and one registered name: it is trained, decoded with, saved and loaded."""

import pytest
import torch
from conftest import tiny_model
from datasets import Dataset
from torch import nn

from speculator import HeadDrafter, Target, UserError, generate
from speculator.checkpoints import layout_of, load_any, save
from speculator.cli.export import FORMATS
from speculator.heads import ARCHITECTURES, Speculator, SpeculatorConfig, register
from speculator.heads.drafting import LastHiddenSource
from speculator.heads.training import IGNORE
from train.config import HeadOptions, LossConfig, RunConfig
from train.initialise import new_head
from train.trainer import Collator, SpeculatorTrainer, arguments

PROMPT = [3, 1, 4, 1, 5]


class LinearConfig(SpeculatorConfig):
    model_type = "linear_speculator"
    anchors: int = 8

    @property
    def min_training_length(self) -> int:
        return 3

    def training_targets(self, input_ids, document_ids, loss_mask):
        anchors = torch.randint(input_ids.shape[1] - 2, (len(input_ids), self.anchors))
        labels, wanted = (x.gather(1, anchors + 2) for x in (input_ids, loss_mask))
        return {"labels": labels.masked_fill(wanted == 0, IGNORE), "anchors": anchors}


class LinearHead(Speculator):
    """Drafts x[t+2] from h_t by one matrix; trained at sampled anchors t."""

    config_class = LinearConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(config.emb_dim, config.output_size, bias=False)
        self.post_init()

    def forward(self, batch, loss):
        rows, anchors = torch.arange(len(batch.labels))[:, None], batch.targets["anchors"]
        states, hidden = batch.states[rows, anchors], batch.hidden[rows, anchors + 1]
        labels = batch.labels.flatten()[None]
        losses = loss([[(states.flatten(0, 1), self.linear.weight)]], labels, hidden.flatten(0, 1), torch.ones(1, 1))
        count = (labels != IGNORE).sum(1)
        hits = losses.hits.sum(1), count
        return {
            "objective": (losses.objective, count.sum()),
            "loss": (losses.loss.sum(1), count),
            "accuracy": hits,
            "prefix_accuracy": hits,
        }

    def logits(self, hidden, tokens):
        return self.linear(hidden)

    def drafting_source(self):
        return LinearSource(self)


class LinearSource(LastHiddenSource):
    def first(self, pending, sequences):
        return self.head.linear(self.hidden[: len(pending)])[:, None]


@pytest.fixture
def registered():
    register("linear", LinearHead)
    yield
    del ARCHITECTURES["linear"]


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model(), tokenizer=None)


def trainer_of(head, target, folder) -> SpeculatorTrainer:
    rows = [{"input_ids": [(7 * i + j) % 32 for j in range(12)]} for i in range(8)]
    settings = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "eval_steps": 2, "save_steps": 2}
    return SpeculatorTrainer(
        model=head,
        target=target,
        loss=LossConfig(),
        decode=lambda head: {"acceptance_length": 1.0, "acceptance_length_sampled": 1.0},
        args=arguments(output_dir=str(folder), max_steps=2, logging_steps=1, report_to="none", **settings),
        data_collator=Collator(head.config),
        train_dataset=rows,
        eval_dataset=rows[:4],
    )


def test_a_registered_head_is_trained_decoded_with_saved_and_loaded(registered, target, tmp_path):
    options = HeadOptions(architecture="linear", n_predict=1, options={"anchors": 4})
    head = new_head(RunConfig(speculator=options), target, Dataset.from_list([]))
    assert (head.config.anchors, head.config.emb_dim) == (4, target.hidden_size)
    before = head.linear.weight.clone()
    trainer = trainer_of(head, target, tmp_path / "run")
    trainer.train()
    assert not torch.equal(head.linear.weight, before)
    evaluation = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert evaluation["eval_loss"] == pytest.approx(evaluation["eval_head0/loss"])

    plain = generate(target, None, [PROMPT], max_new_tokens=20).tokens
    assert generate(target, HeadDrafter(head), [PROMPT], max_new_tokens=20).tokens == plain
    with pytest.raises(UserError):
        HeadDrafter(head, 2)

    save(head, tmp_path / "head", layout_of("native", head))
    again = load_any(tmp_path / "head")
    assert isinstance(again, LinearHead)
    assert again.config.anchors == 4
    assert torch.equal(again.linear.weight, head.linear.weight)
    for name in set(FORMATS) - {"native"}:
        with pytest.raises(UserError):
            layout_of(name, head)


def test_an_unknown_architecture_or_option_is_one_line_with_the_nearest_valid_one(registered, target):
    for options, near in (
        (HeadOptions(architecture="linaer"), "linear"),
        (HeadOptions(architecture="linear", options={"anchor": 2}), "anchors"),
    ):
        with pytest.raises(UserError, match=near):
            new_head(RunConfig(speculator=options), target, Dataset.from_list([]))
