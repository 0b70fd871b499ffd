"""A new architecture is one class and one registered name: it is trained, decoded with, saved and loaded."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import settled, tiny_head, tiny_model
from datasets import Dataset
from torch import nn

from speculator import Chain, HeadDrafter, Sampling, Target, Tree, UserError, generate
from speculator.checkpoints import FORMATS, layout_of, load_any, save
from speculator.heads import ARCHITECTURES, Speculator, SpeculatorConfig, register
from speculator.heads.drafting import LastHiddenSource, WholeTextSource
from speculator.heads.training import IGNORE, step_metrics
from speculator.heads.unrolled import UnrolledConfig, UnrolledHead, draft_ids
from train.door.initialise import new_head
from train.loop import Loop
from train.options.config import HeadOptions, LossConfig, RunConfig, StageConfig
from train.states.batch import Collator, StageRows, StateSource

PROMPT = [3, 1, 4, 1, 5]


class LinearConfig(SpeculatorConfig):
    model_type = "toy_speculator"
    anchors: int = 8

    @property
    def min_training_length(self) -> int:
        return self.n_predict + 2

    def training_targets(self, input_ids, document_ids, loss_mask, seeds):
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        size, most = (self.anchors,), input_ids.shape[1] - self.n_predict - 1
        anchors = torch.stack([torch.randint(most, size, generator=draw) for draw in draws])  # [B, A]
        document = document_ids.gather(1, anchors)
        live, labels = loss_mask.gather(1, anchors + 1).bool(), []
        for i in range(self.n_predict):  # position i predicts x[t+2+i], if all tokens from x[t+1] on count
            place = anchors + 2 + i
            live = live & loss_mask.gather(1, place).bool() & (document_ids.gather(1, place) == document)
            labels.append(input_ids.gather(1, place).masked_fill(~live, IGNORE))
        return {"labels": torch.stack(labels, 1), "anchors": anchors}  # [B, N, A], [B, A]


class LinearHead(Speculator):
    """Drafts x[t+2+i] from h_t by matrix i of N; trained at sampled anchors t."""

    config_class = LinearConfig

    def __init__(self, config):
        super().__init__(config)
        made = (nn.Linear(config.emb_dim, config.output_size, bias=False) for _ in range(config.n_predict))
        self.linears = nn.ModuleList(made)
        self.post_init()

    def forward(self, batch, loss):
        anchors = batch.targets["anchors"]
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        features = batch.states[rows, anchors].flatten(0, 1)  # [K, D] with K = B * A
        labels = draft_ids(batch.labels.transpose(0, 1).flatten(1), self.draft_tokens)  # [N, K]
        measured = []
        # One call for each position: h_{t+1+i} predicts x[t+2+i], so the N labels of an anchor have N predictors.
        for i, weight in enumerate(loss.step_weights(self.n_predict).to(labels.device)):
            hidden = batch.hidden[rows, anchors + 1 + i].flatten(0, 1)  # [K, D]
            weights = weight.expand(1, 1)
            terms = [(features, self.linears[i].weight)]
            measured.append(loss([terms], labels[i : i + 1], hidden, weights, self.draft_tokens))
        losses, hits = (torch.cat(parts) for parts in zip(*((each.loss, each.hits) for each in measured), strict=True))
        count = (labels != IGNORE).sum(1)
        return {
            "objective": (sum(each.objective for each in measured), count.sum()),
            **step_metrics(losses, hits, None, count, labels[0] != IGNORE, lambda x: x.view(anchors.shape).sum(1)),
        }

    def logits(self, hidden, tokens):
        return torch.stack([self.to_full_vocabulary(linear(hidden)) for linear in self.linears])

    def drafting_source(self):
        return LinearSource(self)


class LinearSource(LastHiddenSource):
    def first(self, pending, sequences):
        return self.next(0, pending[:, None], None)

    def next(self, level, tokens, parents):
        logits = self.head.linears[level](self.hidden[: len(tokens)])[:, None]
        return self.head.to_full_vocabulary(logits).expand(-1, tokens.shape[1], -1)


@pytest.fixture
def registered():
    register("toy", LinearHead)
    yield
    del ARCHITECTURES["toy"]


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model(), tokenizer=None)


def loop_of(head, target, folder, max_steps=2) -> Loop:
    rows = [{"input_ids": [(7 * i + j) % 32 for j in range(12)]} for i in range(8)]
    stage = StageConfig(max_steps=max_steps, per_device_train_batch_size=2, logging_steps=1, eval_steps=2)
    rows = StageRows(rows, Collator(head.config), validation=rows[:4], evaluation_batch=2)
    return Loop(head, StateSource(target, head.aux_layers), stage, LossConfig(), rows, folder)


@pytest.mark.parametrize("draft_vocab_size", [0, 20])
@pytest.mark.parametrize("n_predict", [1, 3])
def test_a_registered_head_is_trained_decoded_with_saved_and_loaded(
    registered, target, tmp_path, n_predict, draft_vocab_size
):
    sizes = {"n_predict": n_predict, "draft_vocab_size": draft_vocab_size}
    options = HeadOptions(architecture="toy", options={"anchors": 4}, **sizes)
    head = new_head(
        settled(RunConfig(speculator=options), target), target, Dataset.from_list([{"input_ids": list(range(32))}]), 32
    )
    assert (head.config.anchors, head.config.emb_dim) == (4, target.hidden_size)
    before = head.linears[-1].weight.clone()
    log = loop_of(head, target, tmp_path / "run").run().log_history
    assert not torch.equal(head.linears[-1].weight, before)
    # Every anchor has N labels here, so the loss trained on is the sum of the positions' mean losses.
    logged = next(entry for entry in log if "loss" in entry)
    assert logged["loss"] == pytest.approx(sum(logged[f"position{i}/loss"] for i in range(n_predict)), rel=1e-3)

    plain = generate(target, None, [PROMPT], max_new_tokens=20).tokens
    assert generate(target, HeadDrafter(head), [PROMPT], max_new_tokens=20).tokens == plain
    with pytest.raises(UserError):
        HeadDrafter(head, n_predict + 1)

    save(head, tmp_path / "head", layout_of("native", head))
    again = load_any(tmp_path / "head")
    assert isinstance(again, LinearHead)
    assert again.config.anchors == 4
    assert torch.equal(again.linears[-1].weight, head.linears[-1].weight)
    for name in set(FORMATS) - {"native"}:
        with pytest.raises(UserError):
            layout_of(name, head)


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("mlp", Tree((3, 2, 2), nodes=8)), ("mlp", Chain(3)), ("eagle3", Tree((3, 2, 2), nodes=8))],
    ids=["mlp", "mlp-chain", "eagle3"],
)
def test_the_training_form_drafts_what_the_drafting_form_does(target, monkeypatch, architecture, shape):
    """Five prompts in three slots: rows join, leave and move, and their caches grow."""
    head = tiny_head(architecture=architecture, draft_tokens=list(range(0, 32, 2)))
    prompts = [PROMPT[: 2 + i] * (1 + 4 * (i == 3)) for i in range(5)]

    def made():
        settings = {"max_new_tokens": [12, 4, 16, 6, 8], "max_batch_size": 3}
        return generate(target, HeadDrafter(head, shape), prompts, Sampling(0.7, seed=2), **settings)

    own = made()
    monkeypatch.setattr(head, "drafting_source", lambda: WholeTextSource(head))
    whole = made()
    assert whole.tokens == own.tokens
    assert whole.steps == own.steps
    assert own.acceptance_length > 1.2


def test_the_head_of_the_contributors_page_is_trained_and_decodes(target, tmp_path):
    page = Path(__file__).parents[3] / "docs/contributing/add-a-head.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    names = {"nn": nn, "register": register, "UnrolledConfig": UnrolledConfig, "UnrolledHead": UnrolledHead}
    try:
        exec(code, {**names, "WholeTextSource": WholeTextSource, "__name__": __name__})
        options = HeadOptions(architecture="sum", n_predict=2, draft_vocab_size=20)
        rows = Dataset.from_list([{"input_ids": list(range(32))}])
        head = new_head(settled(RunConfig(speculator=options), target), target, rows, 32)
        before = head.embedding.weight.clone()
        loop_of(head, target, tmp_path / "run").run()
        assert not torch.equal(head.embedding.weight, before)
        plain = generate(target, None, [PROMPT], max_new_tokens=20).tokens
        assert generate(target, HeadDrafter(head, Tree((3, 2), nodes=5)), [PROMPT], max_new_tokens=20).tokens == plain
    finally:
        ARCHITECTURES.pop("sum", None)


def test_an_unknown_architecture_or_option_fails_in_one_line_with_the_nearest_valid_one(registered, target):
    for options, near in (
        (HeadOptions(architecture="toi"), "toy"),
        (HeadOptions(architecture="toy", options={"anchor": 2}), "anchors"),
        (HeadOptions(architecture="toy", initialise="target"), "initialise"),
    ):
        with pytest.raises(UserError, match=near):
            new_head(settled(RunConfig(speculator=options), target), target, Dataset.from_list([]), 32)


def test_every_epoch_has_new_seeds_and_every_evaluation_the_same(registered, target, tmp_path, monkeypatch):
    """Four steps read all rows once; there are evaluations after two, four, six and eight."""
    seen = []
    chosen = LinearConfig.training_targets

    def noted(self, *given):
        seen.extend(given[-1])
        return chosen(self, *given)

    monkeypatch.setattr(LinearConfig, "training_targets", noted)
    options = HeadOptions(architecture="toy", n_predict=1)
    head = new_head(settled(RunConfig(speculator=options), target), target, None, 32)
    loop_of(head, target, tmp_path, max_steps=8).run()
    times = Counter(seen)
    # The evaluated four rows are among the eight: four times by evaluations, once in the first epoch.
    assert sorted(times.values()) == [1] * 12 + [5] * 4
