"""DSpark: the training form, the drafting form, and what a block may see."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from torch import nn

from speculator.decoding.sampling import Noise, Sampling
from speculator.heads import DSparkSpeculator, DSparkSpeculatorConfig
from speculator.heads.training import IGNORE

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
    features = made.blocks(states, tokens, documents, rows, anchors)
    logits = made.output(features)
    if made.markov_head is not None:
        places = anchors[:, None] + torch.arange(made.n_predict)
        logits = logits + made.markov_head.markov_w2(made.markov_head.markov_w1(tokens[0, places]))
    return logits


SHAPES = {
    "dspark": {},
    "dflash": {"markov_rank": 0, "sample_from_anchor": False, "confidence_head": False},
    "causal": {"is_causal": True},
    "one layer": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", [[20], [5, 7, 8], [1] * 20])
def test_a_draft_has_the_logits_of_training(shape, chunks):
    made, (tokens, states) = head(**SHAPES[shape]), text()
    source = made.drafting_source()
    source.reserve(3, 3)
    source = source.open(1, L)
    begin = 0
    for count in chunks:
        source.prefill(0, [tokens[0].tolist()], [begin], states[:, begin : begin + count], [count])
        begin += count
    anchor = 20
    found = [source.first(tokens[:, anchor], [tokens[0, : anchor + 1].tolist()])]
    for level in (1, 2):
        found.append(source.next(level, tokens[:, anchor + level][:, None], torch.zeros(1, 1, dtype=torch.long)))
    expected = trained(made, states, tokens, torch.zeros_like(tokens), torch.tensor([4, anchor]))[1]
    torch.testing.assert_close(torch.cat(found, 1)[0], expected, atol=1e-10, rtol=0)
