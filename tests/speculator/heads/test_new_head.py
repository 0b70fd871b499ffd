"""A new architecture is one class and one registered name: it is trained, decoded with, saved and loaded."""

from collections import Counter

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
from speculator.heads.unrolled import draft_ids
from train.config import HeadOptions, LossConfig, RunConfig
from train.initialise import new_head
from train.trainer import Collator, SpeculatorTrainer, arguments

PROMPT = [3, 1, 4, 1, 5]


class LinearConfig(SpeculatorConfig):
    model_type = "toy_speculator"
    anchors: int = 8

    @property
    def min_training_length(self) -> int:
        return 3

    def training_targets(self, input_ids, document_ids, loss_mask, seeds):
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        size, most = (self.anchors,), input_ids.shape[1] - 2
        anchors = torch.stack([torch.randint(most, size, generator=draw) for draw in draws])  # [B, A]
        learned = (loss_mask.gather(1, anchors + 1) * loss_mask.gather(1, anchors + 2)).bool()
        same_document = document_ids.gather(1, anchors) == document_ids.gather(1, anchors + 2)
        labels = input_ids.gather(1, anchors + 2).masked_fill(~(learned & same_document), IGNORE)
        return {"labels": labels, "anchors": anchors}


class LinearHead(Speculator):
    """Drafts x[t+2] from h_t by one matrix; trained at sampled anchors t."""

    config_class = LinearConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(config.emb_dim, config.output_size, bias=False)
        self.post_init()

    def forward(self, batch, loss):
        anchors = batch.targets["anchors"]
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        features = batch.states[rows, anchors].flatten(0, 1)  # [K, D] with K = B * A
        hidden = batch.hidden[rows, anchors + 1].flatten(0, 1)  # [K, D] predict the labels
        labels = draft_ids(batch.labels.flatten()[None], self.draft_tokens)  # [1, K]
        weights = loss.step_weights(1)[:, None]  # [1, 1]
        if batch.token_weights is not None:
            weights = weights.to(labels.device) * batch.token_weights[rows, anchors + 2].flatten()
        losses = loss([[(features, self.linear.weight)]], labels, hidden, weights, self.draft_tokens)
        count = (labels != IGNORE).sum(1)
        hits = losses.hits.sum(1), count
        return {
            "objective": (losses.objective, count.sum()),
            "loss": (losses.loss.sum(1), count),
            "accuracy": hits,
            "prefix_accuracy": hits,
        }

    def logits(self, hidden, tokens):
        return self.to_full_vocabulary(self.linear(hidden))

    def drafting_source(self):
        return LinearSource(self)


class LinearSource(LastHiddenSource):
    def first(self, pending, sequences):
        return self.head.logits(self.hidden[: len(pending)], pending)[:, None]


@pytest.fixture
def registered():
    register("toy", LinearHead)
    yield
    del ARCHITECTURES["toy"]


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


@pytest.mark.parametrize("draft_vocab_size", [0, 20])
def test_a_registered_head_is_trained_decoded_with_saved_and_loaded(registered, target, tmp_path, draft_vocab_size):
    sizes = {"n_predict": 1, "draft_vocab_size": draft_vocab_size}
    options = HeadOptions(architecture="toy", options={"anchors": 4}, **sizes)
    head = new_head(RunConfig(speculator=options), target, Dataset.from_list([{"input_ids": list(range(32))}]))
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
        (HeadOptions(architecture="toi"), "toy"),
        (HeadOptions(architecture="toy", options={"anchor": 2}), "anchors"),
        (HeadOptions(architecture="toy", initialise="target"), "initialise"),
    ):
        with pytest.raises(UserError, match=near):
            new_head(RunConfig(speculator=options), target, Dataset.from_list([]))


def test_every_epoch_has_new_seeds_and_every_evaluation_the_same(registered, target, tmp_path, monkeypatch):
    """Four steps read all rows once; there are evaluations after two, four, six and eight."""
    seen = []
    chosen = LinearConfig.training_targets

    def noted(self, *given):
        seen.extend(given[-1])
        return chosen(self, *given)

    monkeypatch.setattr(LinearConfig, "training_targets", noted)
    head = new_head(RunConfig(speculator=HeadOptions(architecture="toy", n_predict=1)), target, None)
    trainer = trainer_of(head, target, tmp_path)
    trainer.args.max_steps = 8
    trainer.train()
    times = Counter(seen)
    # The evaluated four rows are among the eight: four times by evaluations, once in the first epoch.
    assert sorted(times.values()) == [1] * 12 + [5] * 4
