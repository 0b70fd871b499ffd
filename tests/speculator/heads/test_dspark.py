"""DSpark: the training form, the drafting form, and what a block may see."""

from __future__ import annotations

import pytest
import torch
from conftest import DFLASH, DFLASH2
from gradients import check_same_gradients
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from speculator import Chain
from speculator.heads import DSparkSpeculator, DSparkSpeculatorConfig
from speculator.heads.dspark.config import AnchorTargets
from speculator.heads.training import IGNORE, TrainingBatch
from speculator.target.cache.kv_cache import KVCache
from speculator.target.packed import document_starts
from train.losses import ChunkedLoss
from train.options.config import LossConfig

V, D, L = 32, 16, 24


def head(**changes) -> DSparkSpeculator:
    """A head in float64 with random weights everywhere, as after training."""
    shape = {
        "vocab_size": V, "emb_dim": D, "inner_dim": 24, "n_predict": 3, "num_hidden_layers": 2, "markov_rank": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "aux_layers": [1, 2],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }  # fmt: skip
    torch.manual_seed(0)
    made = DSparkSpeculator(DSparkSpeculatorConfig(**{**shape, **changes})).double().eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(0, 0.5)
    output = nn.Linear(D, V, bias=False, dtype=torch.float64)
    made.share(torch.randn(V, D, dtype=torch.float64), output)
    return made


def text(rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(V - 1, (rows, L)), torch.randn(rows, L, 2 * D, dtype=torch.float64)


def trained(made, states, tokens, documents, anchors) -> torch.Tensor:  # [A, G, V]
    rows = torch.zeros(len(anchors), dtype=torch.long)
    features = made.blocks(states, tokens, rows, anchors, document_starts(documents)[rows, anchors])
    logits = made.target_output(features)
    before = tokens[0, anchors[:, None] + torch.arange(made.n_predict)]
    if made.markov_head is not None:
        logits = logits + made.markov_head.markov_w2(made.markov_head.markov_w1(before))
    return logits if made.candidate_selector is None else made.candidate_selector(features, logits, before)


def test_the_output_matrix_of_the_target_is_not_copied():
    """A copy would be packed again: as much memory as the target's vocabulary takes."""
    output = nn.Linear(D, V, bias=False, dtype=torch.float64)
    for made, same in ((head(), True), (head(draft_vocab_size=V // 2), False)):
        made.share(torch.randn(V, D, dtype=torch.float64), output)
        assert (made.target_output is output) == same


SHAPES = {
    "dspark": {},
    "dflash": DFLASH,
    "causal": {"is_causal": True},
    "one layer": {"num_hidden_layers": 1},
    "window": {"sliding_window": 6},
    "DFlash with a window": {**DFLASH, "sliding_window": 4},
    "causal window": {"is_causal": True, "sliding_window": 5},
    "DFlash 2": DFLASH2,
    "DFlash 2 with a window": {**DFLASH2, "sliding_window": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", [[20], [5, 7, 8], [1] * 20])
def test_a_draft_has_the_logits_of_training(shape, chunks):
    made, (tokens, states) = head(**SHAPES[shape]), text()
    source = made.drafting_source()
    source.reserve(Chain(3))
    source = source.open(KVCache([], 1, L, torch.device("cpu")))
    begin = 0
    for count in chunks:
        source.prefill(0, [tokens[0].tolist()], [begin], states[:, begin : begin + count], [count])
        begin += count
    anchor = 20
    found = [source.first(tokens[:, anchor], [tokens[0, : anchor + 1].tolist()])]
    for level in (1, 2):
        found.append(source.next(level, tokens[:, anchor + level][:, None], torch.zeros(1, 1, dtype=torch.long)))
    anchors, documents = torch.tensor([4, anchor]), torch.zeros_like(tokens)
    expected = trained(made, states, tokens, documents, anchors)[1]
    torch.testing.assert_close(torch.cat(found, 1)[0], expected, atol=1e-10, rtol=0)
    assert source.independent == (shape.startswith("DFlash with") or shape == "dflash")
    if made.confidence_head is not None:
        rows = torch.zeros(2, dtype=torch.long)
        features = made.blocks(states, tokens, rows, anchors, document_starts(documents)[rows, anchors])[1]
        for level in (1, 2):
            token = tokens[:, anchor + level]
            chance = made.confidence_logits(source._slots[:, level], token).sigmoid()
            inputs = torch.cat([features[level], made.markov_head.markov_w1(token)[0]])
            torch.testing.assert_close(chance[0], made.confidence_head.proj(inputs)[0].sigmoid(), atol=1e-10, rtol=0)


def drafted(made, states, tokens, anchor: int) -> torch.Tensor:  # [V]
    source = made.drafting_source()
    source.reserve(Chain(3))
    source = source.open(KVCache([], 1, L, torch.device("cpu")))
    source.prefill(0, [tokens[0, :anchor].tolist()], [0], states[:, :anchor], [anchor])
    return source.first(tokens[:, anchor], [tokens[0, : anchor + 1].tolist()])[0, 0]


def test_the_inputs_that_compare_an_exported_head_suffice_for_a_draft_of_one_token():
    made = head(n_predict=1)
    assert made.logits(*made.probe()).shape == (1, 4, 1, V)


def test_a_head_that_is_run_in_the_other_layout_drafts_something_else():
    tokens, states = text()
    one, other = head(), head(sample_from_anchor=False)
    other.load_state_dict(one.state_dict())
    assert (drafted(one, states, tokens, 9) - drafted(other, states, tokens, 9)).abs().max() > 0.1


@pytest.mark.parametrize("window", [3, 6, 7, 8])
def test_a_slot_sees_as_many_positions_as_its_window_has(window):
    """Slot j at position a + j sees positions above a + j - W, as in servers; one layer, so that it sees no further."""
    made, (tokens, states) = head(num_hidden_layers=1, sliding_window=window), text()
    documents, anchors, rows = torch.zeros_like(tokens), torch.tensor([7, 15]), torch.zeros(2, dtype=torch.long)
    before = made.blocks(states, tokens, rows, anchors, document_starts(documents)[rows, anchors])  # [2, G, D]
    for position in range(16):
        other = states.clone()
        other[0, position] += 1
        differ = (made.blocks(other, tokens, rows, anchors, torch.zeros_like(rows)) - before).abs().amax(-1) > 1e-9
        seen = [[a + j - window < position < a for j in range(3)] for a in (7, 15)]
        assert differ.tolist() == seen, position


def test_a_window_that_covers_the_text_changes_nothing():
    full, wide, narrow = head(), head(sliding_window=L + 3), head(sliding_window=8)
    tokens, states = text()
    anchors = torch.tensor([4, 12, 20])
    expected = trained(full, states, tokens, torch.zeros_like(tokens), anchors)
    for made, equal in ((wide, [True] * 3), (narrow, [True, False, False])):
        found = trained(made, states, tokens, torch.zeros_like(tokens), anchors)
        assert [torch.allclose(x, y, atol=1e-12) for x, y in zip(found, expected, strict=True)] == equal


def test_a_window_shorter_than_a_block_is_refused():
    head(sliding_window=3)
    with pytest.raises(ValueError, match="sliding_window 2 is shorter than a block of 3"):
        head(sliding_window=2)


def test_a_block_sees_its_document_before_the_anchor_and_itself():
    made, (tokens, states) = head(), text()
    documents = (torch.arange(L) >= 6).long()[None]
    anchors = torch.tensor([3, 9, 10, 20])
    before = trained(made, states, tokens, documents, anchors)

    def changed(position: int) -> list[bool]:
        other = states.clone()
        other[0, position] += 1
        differ = (trained(made, other, tokens, documents, anchors) - before).abs().amax((1, 2))
        return (differ > 1e-9).tolist()

    assert changed(2) == [True, False, False, False]
    assert changed(6) == [False, True, True, True]
    assert changed(9) == [False, False, True, True]  # the anchor's own state is not there yet when it drafts
    assert changed(20) == [False, False, False, False]


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_slot_sees_no_later_slot(causal):
    """The last slot's place in the rope is part of its key: with more slots the first ones change, or not."""
    tokens, states = text()
    short, long = (head(is_causal=causal, n_predict=count, markov_rank=0) for count in (2, 3))
    long.load_state_dict(short.state_dict())
    long._shared = short._shared
    differ = (drafted(short, states, tokens, 9) - drafted(long, states, tokens, 9)).abs().max()
    assert (differ < 1e-9) == causal


def targets_of(config, mask, documents=None, seed=0):
    row = torch.arange(100, 100 + len(mask))[None]
    documents = torch.zeros_like(row) if documents is None else torch.tensor([documents])
    made = config.training_targets(row, documents, torch.tensor([mask]), [seed])
    live = made["labels"][0, :, 0] != IGNORE
    labels = [[token - 100 for token in block if token != IGNORE] for block in made["labels"][0][live].tolist()]
    return dict(zip(made["on_host"].anchors[0][live].tolist(), labels, strict=True))


def test_a_block_is_trained_up_to_the_end_of_the_answer_and_of_the_document():
    config = head(anchors=50).config
    assert targets_of(config, [0, 0, 1, 1, 1, 1, 0, 1, 1]) == {2: [3, 4, 5], 3: [4, 5], 4: [5], 7: [8]}
    assert targets_of(config, [1] * 6, [0, 0, 0, 0, 1, 1]) == {0: [1, 2, 3], 1: [2, 3], 2: [3], 4: [5]}


def test_anchors_depend_on_the_seed_alone():
    config = head(anchors=5).config
    drawn = [list(targets_of(config, [1] * 40, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(set(anchors)) == 5 and anchors == sorted(anchors) for anchors in drawn)


@pytest.mark.parametrize("shape", ["dspark", "DFlash 2"])
def test_a_batch_without_labels_has_gradients_of_zero(shape):
    made, (tokens, states) = head(**SHAPES[shape]).train(), text(2)
    labels, none = torch.full((2, 4, 3), IGNORE), torch.zeros(2, 4, dtype=torch.long)
    batch = TrainingBatch(
        input_ids=tokens,
        document_ids=torch.zeros_like(tokens),
        hidden=torch.randn(2, L, D, dtype=torch.float64),
        states=states,
        targets={"labels": labels, "on_host": AnchorTargets(none, none, labels)},
    )
    loss = ChunkedLoss(made.target_output, LossConfig(total_variation=1.0), V)
    total, count = made(batch, loss)["objective"]
    total.backward()
    assert count == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in made.parameters())


@pytest.mark.parametrize("alpha", [1, 0.5])
def test_the_objective_is_the_sum_over_slots_of_losses_computed_one_by_one(alpha):
    """Cross-entropy, total variation and the confidence's error, weighted by place; against a plain implementation."""
    made, (tokens, states) = head().train(), text(2)
    documents = torch.zeros_like(tokens)
    mask = torch.ones_like(tokens)
    mask[0, :5] = mask[1, 15] = 0
    targets = made.config.training_targets(tokens, documents, mask, [1, 2])
    hidden = torch.randn(2, L, D, dtype=torch.float64)
    weights = LossConfig(cross_entropy=0.1, kl=0.0, total_variation=1.8, head_decay=0.7, d_pace=alpha)
    metrics = made(
        TrainingBatch(input_ids=tokens, document_ids=documents, hidden=hidden, states=states, targets=targets),
        ChunkedLoss(made.target_output, weights, V, 7),
    )

    total = torch.zeros((), dtype=torch.float64)
    prefix = torch.zeros(3, dtype=torch.float64)
    for row in range(2):
        for anchor, labels in zip(targets["on_host"].anchors[row], targets["labels"][row], strict=True):
            if labels[0] == IGNORE:
                continue
            feature = made.blocks(
                states[row : row + 1],
                tokens[row : row + 1],
                torch.tensor([0]),
                anchor[None],
                document_starts(documents)[:1, anchor],
            )[0]
            kept, reached, losses = 1.0, [1.0], []
            for k, label in enumerate(labels.tolist()):
                if label == IGNORE:
                    break
                bias = made.markov_head.markov_w1(tokens[row, anchor + k])
                log_q = (made.target_output(feature[k]) + made.markov_head.markov_w2(bias)).log_softmax(-1)
                p = made.target_output(hidden[row, anchor + k]).softmax(-1)
                distance = (p - log_q.exp()).abs().sum() / 2
                c = made.confidence_head.proj(torch.cat([feature[k], bias]))[0].sigmoid()
                aim = 1 - distance.detach()
                error = -(aim * c.log() + (1 - aim) * (1 - c).log())
                reached.append(reached[-1] * ((1 - alpha) * log_q[label].exp().item() + alpha))
                losses.append(-0.1 * log_q[label] + 1.8 * distance)
                total = total + 0.7**k * error
                kept = kept * aim
                prefix[k] += kept
            for k, each in enumerate(losses):
                total = total + 0.7**k * (1 if alpha == 1 else sum(reached[k + 1 :])) * each
    objective, count = metrics["objective"]
    check_same_gradients(made, objective, total)
    assert count == (targets["labels"] != IGNORE).sum()
    torch.testing.assert_close(metrics["prefix_overlap"][0], prefix)


@pytest.mark.parametrize("shape", ["dspark", "DFlash 2"])
def test_the_operations_of_a_training_row_are_counted(shape):
    """Against torch's own count of the products in a forward pass, without the attention's."""
    made, (tokens, states) = head(**SHAPES[shape], anchors=8), text()
    anchors = torch.arange(8, 16)
    with FlopCounterMode(display=False) as counter:
        rows = torch.zeros(8, dtype=torch.long)
        features = made.blocks(states, tokens, rows, anchors, rows)
        logits = made.output_logits(features)
        made.conditioned(features, logits, torch.zeros(8, 3, dtype=torch.long))
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counts.items() if "mm" in str(operation))
    # The output matrix has no gradient: two products of three; a third one finds a selector's candidates.
    frozen = 0 if made.candidate_selector else 2 * features.numel() // D * V * D // 3
    assert 2 * L * made.weights_per_token(L) == pytest.approx(products - frozen, rel=0.02)
