"""DFlash 2: convolutions inside a block, and a selector among the candidates of each slot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import DFLASH
from enumeration import distance_of_runs, four_token_pair, joint_distribution
from gradients import check_same_gradients
from torch import Tensor, nn

from speculator import (
    Candidates,
    Chain,
    Engine,
    FixedTree,
    HeadDrafter,
    Sampling,
    Target,
)
from speculator.checkpoints.loading import bind
from speculator.errors import UserError
from speculator.heads import DSparkSpeculator, DSparkSpeculatorConfig
from speculator.heads.dspark.dflash2 import Convolution
from speculator.heads.training import IGNORE, TrainingBatch
from train.losses import ChunkedLoss
from train.optimizers import muon_weights
from train.options.config import LossConfig

V, D, L, G = 32, 16, 24, 3
PARTS = {
    "both": {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5},
    "convolutions": {"conv_group_size": 4},
    "selector": {"selector_rank": 6, "selector_top_k": 5},
}


def config(**changes) -> DSparkSpeculatorConfig:
    shape = {
        "vocab_size": V, "emb_dim": D, "inner_dim": 24, "n_predict": G, "num_hidden_layers": 2, **DFLASH,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "aux_layers": [1, 2],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }  # fmt: skip
    return DSparkSpeculatorConfig(**{**shape, **changes})


def head(random: bool = True, **changes) -> DSparkSpeculator:
    """A head in float64 that has its initial weights, or random ones everywhere as after training."""
    torch.manual_seed(0)
    made = DSparkSpeculator(config(**changes)).double().eval()
    with torch.no_grad():
        for weight in made.parameters() if random else ():
            weight.normal_(0, 0.5)
    torch.manual_seed(5)
    output = nn.Linear(D, V, bias=False, dtype=torch.float64)
    made.share(torch.randn(V, D, dtype=torch.float64), output)
    return made


def text(rows: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(V - 1, (rows, L)), torch.randn(rows, L, 2 * D, dtype=torch.float64)


def blocks(made: DSparkSpeculator, states: Tensor, tokens: Tensor, *anchors: int) -> Tensor:  # [A, G, D]
    rows = torch.zeros(len(anchors), dtype=torch.long)
    return made.blocks(states, tokens, rows, torch.tensor(anchors), rows)


def by_loops(module: Convolution, x: Tensor, y: Tensor, side: int) -> Tensor:  # [slots, D] twice
    """Convolve the slots of one block, channel by channel; y is what the kernels follow from."""
    kernels, group = module.kernel_projection(y).view(len(y), 2, 2, D // 4), 4
    out = torch.zeros_like(x)
    for slot in range(len(x)):
        for tap in range(min(2, slot + 1)):
            for c in range(D):
                factor = module.base_kernel[side, tap, c] + kernels[slot, side, tap, c // group]
                out[slot, c] += factor * x[slot - tap, c]
    return out


def test_a_convolution_mixes_a_slot_with_the_one_before_it():
    module = head(**PARTS["both"]).layers[0].attention_conv
    y = torch.randn(2, 4, D, dtype=torch.float64)
    found = module(y, lambda x: x.sin())
    for block, expected in zip(y, found, strict=True):
        torch.testing.assert_close(by_loops(module, by_loops(module, block, block, 0).sin(), block, 1), expected)


def test_a_convolution_sees_nothing_before_its_block_and_leaves_the_text_alone():
    made, plain, (tokens, states) = head(**PARTS["convolutions"]), head(), text()
    alone, both = blocks(made, states, tokens, 9), blocks(made, states, tokens, 5, 9)
    torch.testing.assert_close(both[1:], alone, atol=1e-12, rtol=0)
    plain.load_state_dict({name: x for name, x in made.state_dict().items() if "_conv" not in name})
    positions = torch.arange(L)[None]
    mine, theirs = (each.key_values(each.context(states), positions) for each in (made, plain))
    for i in range(2):
        assert all(map(torch.equal, mine[i], theirs[i]))


def test_a_selector_scores_the_likeliest_tokens_by_the_token_before():
    made = head(**PARTS["selector"]).candidate_selector
    features, logits = torch.randn(3, D, dtype=torch.float64), torch.randn(3, V, dtype=torch.float64)
    before = torch.tensor([7, 7, 2])
    found = made(features, logits, before)
    for row in range(3):
        best = logits[row].argsort(descending=True)[:5]
        for token in range(V):
            bias = made.predecessor_codebook[before[row]] * made.hidden_projection(features[row])
            score = logits[row, token] + bias @ made.successor_codebook[token]
            torch.testing.assert_close(found[row, token], score if token in best else torch.tensor(-torch.inf).double())


@pytest.mark.parametrize("parts", PARTS)
def test_a_new_head_drafts_as_the_dflash_head_without_the_parts(parts):
    made, plain, (tokens, states) = head(random=False, **PARTS[parts]), head(random=False), text()
    made.load_state_dict(made.state_dict() | plain.state_dict())
    tokens = nn.functional.pad(tokens, (0, G))
    mine, theirs = (each.logits(states, tokens, each._shared[0], each._shared[1].weight) for each in (made, plain))
    assert torch.equal(mine.argmax(-1), theirs.argmax(-1))
    if not made.config.selector_rank:
        torch.testing.assert_close(mine, theirs)


END = ": conv_group_size or selector_rank makes it a DFlash 2 head"
WRONG = [
    ({"markov_rank": 4}, f"markov_rank must be 0, not 4{END}"),
    (
        {"sample_from_anchor": True, "is_causal": True, "confidence_head": True, "draft_vocab_size": 8},
        "sample_from_anchor must be false, not true; is_causal must be false, not true; "
        rf"confidence_head must be false, not true; draft_vocab_size must be 0 \(all tokens\), not 8{END}",
    ),
    ({"conv_group_size": 3}, "conv_group_size 3 does not divide the hidden size 16"),
    ({"conv_group_size": 32}, "conv_group_size 32 does not divide the hidden size 16"),
    ({"conv_group_size": -1}, "conv_group_size must be at least 0, not -1"),
    ({"selector_top_k": 0}, "selector_top_k must be at least 1, not 0"),
    ({"selector_top_k": V + 1}, f"selector_top_k {V + 1} is more than the vocabulary of {V}"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_dflash_2_does_not_have_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**{**PARTS["both"], **changes})


def test_channels_are_mixed_in_groups_of_any_size_that_divides_them():
    made = DSparkSpeculator(config(emb_dim=24, conv_group_size=6))
    convolution = made.layers[0].mlp_conv
    y = torch.randn(4, 24)
    torch.testing.assert_close(convolution(y, lambda x: 2 * x), 2 * y)  # initial weights are the identity


def test_no_token_has_more_children_than_there_are_candidates():
    made = head(**PARTS["selector"])
    HeadDrafter(made, Candidates((5, 1)))
    with pytest.raises(UserError, match="6 children of a token: the head drafts from 5 tokens only"):
        HeadDrafter(made, Candidates((6, 1)))


def test_muon_takes_the_matrices_inside():
    made = head(**PARTS["both"])
    chosen = {id(weight) for weight in muon_weights(made)}
    inside = {name for name, weight in made.named_parameters() if id(weight) in chosen}
    assert {"layers.0.mlp_conv.kernel_projection.weight", "candidate_selector.hidden_projection.weight"} <= inside
    assert not [name for name in inside if "codebook" in name or "base_kernel" in name]


def test_the_objective_adds_the_selectors_cross_entropy_among_its_candidates():
    """Against a loop over labels: loss, gradients and the metrics that tell the parts apart."""
    made, (tokens, states) = head(**PARTS["both"]).train(), text(2)
    documents, mask = torch.zeros_like(tokens), torch.ones_like(tokens)
    mask[0, :5] = mask[1, 15] = 0
    targets = made.config.training_targets(tokens, documents, mask, [1, 2])
    hidden = torch.randn(2, L, D, dtype=torch.float64)
    weights = LossConfig(cross_entropy=1.0, kl=0.0, total_variation=0.0, head_decay=0.7)
    metrics = made(
        TrainingBatch(input_ids=tokens, document_ids=documents, hidden=hidden, states=states, targets=targets),
        ChunkedLoss(made.target_output, weights, V, 7),
    )
    total = torch.zeros((), dtype=torch.float64)
    sums = {name: torch.zeros(G) for name in ("slot", "recall", "walk", "prefix")}
    for row in range(2):
        for anchor, labels in zip(targets["on_host"].anchors[row], targets["labels"][row], strict=True):
            if labels[0] == IGNORE:
                continue
            features = made.blocks(states[row : row + 1], tokens[row : row + 1], *torch.tensor([[0], [anchor], [0]]))[0]
            right = True
            for k, label in enumerate(labels.tolist()):
                if label == IGNORE:
                    break
                logits = made.target_output(features[k])
                total = total - 0.7**k * logits.log_softmax(-1)[label]
                best, selector = logits.detach().argsort(descending=True)[:5], made.candidate_selector
                bias = selector.predecessor_codebook[tokens[row, anchor + k]] * selector.hidden_projection(features[k])
                scores = logits.detach()[best] + selector.successor_codebook[best] @ bias
                choice = best[scores.argmax()]
                if label in best:
                    total = total - 0.7**k * scores.log_softmax(-1)[best.tolist().index(label)]
                sums["recall"][k] += label in best
                right = right and label == choice
                sums["slot"][k] += label == best[0]
                sums["walk"][k] += label == choice
                sums["prefix"][k] += right
    objective, count = metrics["objective"]
    assert all(gradient.any() for gradient in check_same_gradients(made, objective, total))
    assert count == (targets["labels"] != IGNORE).sum()
    assert metrics["accuracy"][0].tolist() == sums["walk"].tolist()
    assert metrics["prefix_accuracy"][0].tolist() == sums["prefix"].tolist()
    assert metrics["slot_accuracy"][0].tolist() == sums["slot"].tolist()
    assert metrics["candidate_recall"][0].tolist() == sums["recall"].tolist()
    assert metrics["selector_accuracy"][0].tolist() == sums["walk"].tolist()
    assert metrics["selector_accuracy"][1].tolist() == sums["recall"].tolist()


# ---- drafting


@pytest.fixture(scope="module")
def small() -> tuple[Target, DSparkSpeculator]:
    """A target of four tokens, and a head whose selector chooses between two of them."""
    target, _ = four_token_pair()
    torch.manual_seed(4)
    shape = {"num_hidden_layers": 1, "aux_layers": [0], "mask_token_id": 0, "n_predict": 2, **DFLASH}
    parts = {"conv_group_size": 4, "selector_rank": 3, "selector_top_k": 2}
    made = DSparkSpeculator(DSparkSpeculatorConfig.for_target(target.config, **shape, **parts)).double()
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(0, 0.7)
    return target, bind(made.eval(), target)


def distance(small, monkeypatch, rule: str, drafter: Callable, sampling: Sampling, count: int) -> float:
    """Total variation between the text of an engine, over all of its runs, and the target's own."""
    (target, made), prompt = small, [0, 1, 0, 2]

    def run() -> tuple[int, ...]:
        engine = Engine(target, drafter(made), slots=1, rule=rule)
        request = engine.submit(prompt, sampling, max_new_tokens=count)
        engine.run()
        return tuple(request.tokens)

    return distance_of_runs(monkeypatch, run, joint_distribution(target.model, prompt, count, sampling))


ALL, TWO = Sampling(1.0), Sampling(1.0, top_k=2)
WALKS = [
    *(("block", Chain(2), TWO, 3), ("match", Chain(2), TWO, 3)),
    *(("rejection", Chain(2), ALL, 2), ("match", Chain(2), ALL, 2)),
    *(
        pytest.param(rule, shape, ALL, 3, marks=pytest.mark.soak)
        for rule, shape in (
            *(("rejection", Chain(2)), ("block", Chain(2))),
            ("match", Chain(2)),
            ("multi_candidate", FixedTree([(0,), (1,), (0, 0)])),
        )
    ),
]


@pytest.mark.parametrize(("rule", "shape", "sampling", "count"), WALKS)
def test_walks_of_the_selector_keep_the_targets_distribution(small, monkeypatch, rule, shape, sampling, count):
    assert distance(small, monkeypatch, rule, lambda made: HeadDrafter(made, shape), sampling, count) < 1e-12


class OverTheVocabulary(HeadDrafter):
    """A known-wrong walk: states the distribution of the slots over all tokens."""

    def propose(self, pending, noise, sequences):
        draft = super().propose(pending, noise, sequences)
        draft.probs = noise.sampling.probs(self.memory._logits)
        return draft


class OfAnotherPredecessor(HeadDrafter):
    """A known-wrong walk: states the distribution after another token than the one before."""

    def propose(self, pending, noise, sequences):
        draft = super().propose(pending, noise, sequences)
        before = (torch.cat([pending[:, None], draft.tokens[:, :-1]], 1) + 1) % 4
        draft.probs = noise.sampling.probs(self.head.conditioned(self.memory._slots, self.memory._logits, before))
        return draft


@pytest.mark.parametrize(
    ("wrong", "count"),
    [
        *((wrong, 2) for wrong in (OverTheVocabulary, OfAnotherPredecessor)),
        *(pytest.param(wrong, 3, marks=pytest.mark.soak) for wrong in (OverTheVocabulary, OfAnotherPredecessor)),
    ],
)
def test_a_walk_with_another_distribution_than_it_was_drawn_from_is_seen(small, monkeypatch, wrong, count):
    assert distance(small, monkeypatch, "rejection", lambda made: wrong(made, 2), ALL, count) > 0.05
