"""Training alignment and decoding tied together: a head that knows one text drafts all of it."""

import torch
from conftest import VOCAB, tiny_model

from speculator import HeadDrafter, MLPSpeculator, MLPSpeculatorConfig, Target, generate
from train.config import LossConfig
from train.losses import Measure, align

PROMPT = [3, 1, 4, 1, 5]


def overfit(shift: int) -> float:
    """tokens_per_step on the prompt of the one sequence trained on; `shift` misaligns the labels."""
    target = Target(tiny_model(), tokenizer=None)
    text = PROMPT + generate(target, None, [PROMPT], max_new_tokens=60).tokens[0]
    row = torch.tensor([text])
    torch.manual_seed(0)
    config = MLPSpeculatorConfig(vocab_size=VOCAB, emb_dim=32, inner_dim=64, n_predict=3)
    head = MLPSpeculator(config)
    labels = align(row, torch.zeros_like(row), config.n_predict).roll(shift, dims=-1)
    hidden = target.hidden(row)[:, : labels.shape[-1]]
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(300):
        optimiser.zero_grad()
        sums = head(hidden, row[:, 1:-1], Measure(labels, None, LossConfig(cross_entropy=1.0, kl=0.0)))
        (sums["loss"] / sums["count"]).sum().backward()
        optimiser.step()
    return generate(target, HeadDrafter(head), [PROMPT], max_new_tokens=60).tokens_per_step


def test_a_head_overfit_on_the_targets_own_text_drafts_all_of_it():
    assert overfit(shift=0) == 4.0


def test_labels_one_place_off_would_be_seen():
    assert overfit(shift=1) < 2.0
