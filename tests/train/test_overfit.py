"""Training and decoding agree: a head trained on one text drafts all of it."""

import re
from pathlib import Path

import pytest
import torch
from conftest import RECURRENT_RUNS, VOCAB, tiny_model
from multimodal_targets import save_multimodal

from speculator import HeadDrafter, Target, generate
from speculator.acceptance import Acceptance
from speculator.checkpoints.loading import bind
from speculator.decoding.drafter import Shape
from speculator.drafters.shapes import Tree
from speculator.heads import ARCHITECTURES, register, unrolled
from speculator.heads.attention.base import AttentionConfig, AttentionHead
from speculator.heads.drafting import WholeTextSource
from speculator.heads.training import TrainingBatch
from train.losses import ChunkedLoss, summarise
from train.options.config import LossConfig

PROMPT = [3, 1, 4, 1, 5]


def overfit(
    architecture: str,
    shift: int,
    shape: Shape | None = None,
    pruned: bool = False,
    shift_map: int = 0,
    target: Target | None = None,
) -> float:
    """Train on one sequence; return the acceptance length on its prompt.

    `shift` misaligns the labels. `pruned` restricts the draft vocabulary to the sequence's tokens, and `shift_map` then
    replaces them after training.
    """
    target = target or Target(tiny_model(), tokenizer=None)
    text = PROMPT + generate(target, None, [PROMPT], max_new_tokens=40).tokens[0]
    row = torch.tensor([text])
    torch.manual_seed(0)
    head_class = ARCHITECTURES[architecture]
    used = row.unique()  # ascending
    drafted = len(used) if pruned else None
    own = {"aux_layers": [0, 1]} if hasattr(head_class.config_class, "aux_layers") else {}
    if architecture == "dspark":
        own |= {"num_hidden_layers": 1, "markov_rank": 8, "mask_token_id": 0}
    config = head_class.config_class.for_target(
        target.config, inner_dim=64, n_predict=3, draft_vocab_size=drafted, **own
    )
    head = bind(head_class(config), target)
    if pruned:
        assert drafted < VOCAB
        head.draft_tokens.copy_(used)
    documents = torch.zeros_like(row)
    targets = config.training_targets(row, documents, torch.ones_like(row), [0])
    targets["labels"] = targets["labels"].roll(shift, dims=1 if architecture == "dspark" else -1)
    if architecture == "dspark":
        targets["on_host"].labels = targets["labels"]
    with target.aux_layers.recorded(head.aux_layers) as states:
        hidden = target.hidden(row)
    loss = ChunkedLoss(target.logits, LossConfig(cross_entropy=1.0, kl=0.0), target.vocab_size)
    batch = TrainingBatch(input_ids=row, document_ids=documents, hidden=hidden, states=states(hidden), targets=targets)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(80):
        optimiser.zero_grad()
        total, count = head(batch, loss)["objective"]
        (total * head.n_predict / count).backward()
        optimiser.step()
    if pruned:
        head.draft_tokens.add_(shift_map).remainder_(VOCAB)
    made = generate(target, HeadDrafter(head, shape), [PROMPT], max_new_tokens=40)
    assert made.tokens[0] == text[len(PROMPT) :]
    return made.acceptance_length


@pytest.mark.parametrize("architecture", ["mlp", "eagle3"])
def test_the_forecast_walks_a_row_as_decoding_does(architecture):
    """On the target's own text each step of decoding is a step of the walk; a mean over positions differs."""
    target = Target(tiny_model(), tokenizer=None)
    text = PROMPT + generate(target, None, [PROMPT], max_new_tokens=60, eos_token_ids=()).tokens[0]
    row, mask = torch.tensor([text]), (torch.arange(len(text)) >= len(PROMPT)).int()[None]
    torch.manual_seed(0)
    kind = ARCHITECTURES[architecture].config_class
    own = {"aux_layers": [0, 1]} if hasattr(kind, "aux_layers") else {}
    config = kind.for_target(target.config, inner_dim=64, n_predict=3, **own)
    head = bind(ARCHITECTURES[architecture](config), target)
    documents = torch.zeros_like(row)
    with target.aux_layers.recorded(head.aux_layers) as states:
        hidden = target.hidden(row)
    loss = ChunkedLoss(target.logits, LossConfig(cross_entropy=1.0, kl=0.0), target.vocab_size)
    targets = config.training_targets(row, documents, mask, [0])
    batch = TrainingBatch(input_ids=row, document_ids=documents, hidden=hidden, states=states(hidden), targets=targets)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(6):
        optimiser.zero_grad()
        metrics = head(batch, loss)
        assert "walked" not in metrics, "training does not wait for the CPU"
        metrics["objective"][0].backward()
        optimiser.step()
    with torch.no_grad():
        metrics = head.eval()(batch, loss)
    made = generate(target, HeadDrafter(head), [PROMPT], max_new_tokens=60, eos_token_ids=())
    decoded = Acceptance.of(made.steps[0])
    assert [x.tolist() for x in metrics["walked"]] == [decoded.per_position(3), [decoded.steps] * 3]
    assert 0 < decoded.accepted < 3 * decoded.steps
    found = summarise(metrics)
    assert found["walked_acceptance_length"] == pytest.approx(decoded.length)
    assert found["teacher_forced_acceptance_length"] != pytest.approx(decoded.length, abs=0.01)


def quick(*names: str) -> list:
    """Every architecture; those without a name here run in `make soak`."""
    return [pytest.param(name, marks=[pytest.mark.soak] * (name not in names)) for name in ARCHITECTURES]


def test_both_heads_of_the_contributors_page_pass_as_every_registered_head_does():
    page = Path(__file__).parents[2] / "docs/contributing/add-a-head.md"
    names = {**vars(unrolled), "AttentionConfig": AttentionConfig, "AttentionHead": AttentionHead, "__name__": __name__}
    names |= {"register": register, "WholeTextSource": WholeTextSource}
    try:
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            exec(code, names)
        assert [overfit(name, shift=0) for name in ("sum", "aux")] == [4.0, 4.0]
        assert overfit("aux", shift=1) < 2.0
    finally:
        for name in ("sum", "aux"):
            ARCHITECTURES.pop(name, None)


SHAPES = [
    pytest.param(None, id="chain"),
    pytest.param(Tree((2, 2, 1), nodes=6), id="tree", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_overfit_head_drafts_the_whole_text(architecture, shape):
    assert overfit(architecture, shift=0, shape=shape) == 4.0


@pytest.mark.parametrize("architecture", quick("mlp", "dspark"))
def test_labels_off_by_one_are_detected(architecture):
    assert overfit(architecture, shift=1) < 2.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("architecture", quick("eagle3"))
def test_a_draft_vocabulary_with_all_tokens_of_the_text_loses_nothing(architecture, shape):
    assert overfit(architecture, shift=0, shape=shape, pruned=True) == 4.0


def test_a_wrong_draft_vocabulary_keeps_the_text_exact():
    assert overfit("mlp", shift=0, pruned=True, shift_map=1) < 1.5


def test_an_overfit_head_of_a_multimodal_target_drafts_the_whole_text(tmp_path):
    model = save_multimodal("qwen2_5_vl", tmp_path)
    # With the usual weights the text repeats one token, and no head can tell which repetition is the last.
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 4
    model.save_pretrained(tmp_path)
    assert overfit("mlp", shift=0, target=Target.load(str(tmp_path))) == 4.0


@RECURRENT_RUNS
@pytest.mark.parametrize("architecture", ["mlp", "dspark", pytest.param("eagle3", marks=pytest.mark.soak)])
def test_an_overfit_head_of_a_hybrid_target_drafts_the_whole_text(architecture):
    assert overfit(architecture, shift=0, target=Target(tiny_model("qwen3_5"), tokenizer=None)) == 4.0
