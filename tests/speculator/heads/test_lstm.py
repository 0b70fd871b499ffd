"""The LSTM head equals its equations, evaluated in scalars for one position at a time."""

import math

import pytest
import torch
from transformers import AutoModel

from speculator.heads import LSTMSpeculator, LSTMSpeculatorConfig

EMBEDDING = torch.randn(11, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
"""The target's, which only heads without their own read."""


def head_of(n_predict: int = 4, **changes) -> LSTMSpeculator:
    """A head in float64 with random norms, so that a swap of two would show."""
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "emb_dim": 6, "inner_dim": 5, "n_predict": n_predict, **changes}
    head = LSTMSpeculator(LSTMSpeculatorConfig(**shape)).double()
    for norm in (head.cell_ln[0], head.state_ln[0]):
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
        torch.nn.init.normal_(norm.bias, std=0.3)
    head.share_embedding(EMBEDDING)
    return head


def gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def rms(x: list[float]) -> list[float]:
    scale = math.sqrt(sum(value * value for value in x) / len(x) + 1e-6)
    return [value / scale for value in x]


def written_out(head: LSTMSpeculator, hidden: list[float], tokens: list[int]) -> list[list[float]]:
    """Logits of every step, in scalars."""
    w = {name: tensor.tolist() for name, tensor in head.state_dict().items()}
    n, inner = head.config.n_predict, head.config.inner_dim
    state_weight = 0.5 ** (0.5 / n)
    alpha = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def apply(name: str, x: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, x, strict=True)) for row in w[name]]

    def norm(name: str, x: list[float]) -> list[float]:
        parts = zip(rms(x), w[f"{name}.0.weight"], w[f"{name}.0.bias"], strict=True)
        return [value * weight + bias for value, weight, bias in parts]

    state = [x / math.sqrt(2) for x in rms(hidden)] if head.config.scale_input else hidden
    cell = [0.0] * inner
    logits = []
    for i in range(n):
        if head.config.own_embedding:
            token = w["forget_emb.0.weight"][tokens[i]]
        else:
            scaled = [x / math.sqrt(head.config.emb_dim) for x in rms(EMBEDDING[tokens[i]].tolist())]
            token = apply("forget_emb.0.proj.weight", scaled)
        which = 0 if i == 0 else 1
        z = {
            gate: [p + alpha * e for p, e in zip(apply(f"{gate}_proj.{which}.weight", state), token, strict=True)]
            for gate in ("forget", "input", "output", "cell")
        }
        new = [gelu(x) for x in norm("cell_ln", z["cell"])]
        cell = [sigmoid(z["forget"][k]) * cell[k] + sigmoid(z["input"][k]) * new[k] for k in range(inner)]
        state = [sigmoid(z["output"][k]) * gelu(x) for k, x in enumerate(norm("state_ln", cell))]
        logits.append(apply("head.0.weight", state))
    return logits


def inputs(head: LSTMSpeculator) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 3, head.config.emb_dim, generator=generator, dtype=torch.float64)
    return hidden, torch.randint(0, head.config.vocab_size, (2, 2 + head.n_predict), generator=generator)


def distance(head: LSTMSpeculator, reference: LSTMSpeculator | None = None) -> float:
    """The largest difference between the head's logits and the equations'."""
    hidden, tokens = inputs(head)
    logits = head.logits(hidden, tokens)
    expected = [
        [written_out(reference or head, hidden[b, t].tolist(), tokens[b, t:].tolist()) for t in range(3)]
        for b in range(2)
    ]
    return (logits - torch.tensor(expected, dtype=torch.float64).permute(2, 0, 1, 3)).abs().max().item()


@pytest.mark.parametrize(
    "options",
    [{"scale_input": True}, {"emb_dim": 5}, {"n_predict": 2}, {"emb_dim": 3}, {"own_embedding": False}],
    ids=str,
)
def test_logits_equal_the_equations(options):
    assert distance(head_of(**options)) < 1e-9


def exchange(a: str, b: str):
    def change(head: LSTMSpeculator) -> None:
        first, second = getattr(head, a), getattr(head, b)
        setattr(head, a, second)
        setattr(head, b, first)

    return change


@pytest.mark.parametrize(
    "change",
    [
        exchange("forget_proj", "input_proj"),
        exchange("input_proj", "output_proj"),
        exchange("output_proj", "cell_proj"),
        exchange("cell_ln", "state_ln"),
        lambda head: setattr(head, "alpha", head.alpha * 1.01),
        lambda head: setattr(head, "start", lambda hidden: torch.cat([hidden, hidden[..., :5] * 0], -1)),
        lambda head: setattr(head, "start", lambda hidden: type(head).start(head, hidden) + 0.01),
    ],
)
def test_wrong_gates_norms_or_start_states_change_the_logits(change):
    head, reference = head_of(), head_of()
    change(head)
    assert distance(head, reference) > 1e-4


def test_save_and_auto_load_keep_every_logit(tmp_path):
    head = head_of()
    head.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert isinstance(again, LSTMSpeculator)
    assert torch.equal(again.logits(*inputs(head)), head.logits(*inputs(head)))
