"""Muon and AdamW as one optimiser: each weight gets the step of its own, and a loaded state keeps the schedule."""

import copy

import pytest
import torch
from conftest import settled, tiny_block_head, tiny_head, tiny_model
from torch.optim.lr_scheduler import LambdaLR

from speculator import Target
from speculator.errors import UserError
from train.command_line import parse
from train.optimizers import MuonAndAdamW, muon_weights


def step(optimiser: torch.optim.Optimizer, head: torch.nn.Module, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.grad = torch.randn(weight.shape, generator=noise)
    optimiser.step()


def made(head: torch.nn.Module) -> MuonAndAdamW:
    return MuonAndAdamW(torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.1), head)


def test_each_weight_gets_the_step_of_its_optimiser():
    """Matrices between hidden states from torch's Muon; the embedding, the output matrix and vectors from AdamW."""
    head = tiny_head()
    other = copy.deepcopy(head)
    step(made(head), head, seed=0)
    inside = muon_weights(other)
    rest = [weight for weight in other.parameters() if all(weight is not each for each in inside)]
    assert inside
    assert {weight.ndim for weight in rest} == {1, 2}
    noise = torch.Generator().manual_seed(0)
    for weight in other.parameters():
        weight.grad = torch.randn(weight.shape, generator=noise)
    torch.optim.Muon(inside, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1).step()
    for ours, theirs in zip(head.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_matrix_is_inside_a_head_whatever_its_size():
    """The MLP of a layer may be as wide as the draft vocabulary."""
    head = tiny_head(architecture="eagle3", draft_tokens=list(range(16)))  # the inner size is 16 too
    names = {name for name, weight in head.named_parameters() if any(weight is each for each in muon_weights(head))}
    assert {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")} <= names
    assert "fc.weight" in names
    assert "lm_head.weight" not in names
    block = tiny_block_head(Target(tiny_model(), tokenizer=None), markov_rank=4)
    inside = {name for name, weight in block.named_parameters() if any(weight is each for each in muon_weights(block))}
    assert inside == {name for name, w in block.named_parameters() if w.ndim == 2 and "markov" not in name}


def test_a_loaded_state_goes_on_with_the_schedule():
    """accelerate loads the state once when it wraps the optimiser; the schedule has to reach the parts after that."""
    head = tiny_head()
    optimiser = made(head)
    schedule = LambdaLR(optimiser, lambda count: 0.5**count)
    step(optimiser, head, seed=1)
    schedule.step()
    other = copy.deepcopy(head)
    again = made(other)
    resumed = LambdaLR(again, lambda count: 0.5**count)
    again.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    resumed.load_state_dict(schedule.state_dict())
    for seed in (2, 3):
        for each, model, plan in ((optimiser, head, schedule), (again, other, resumed)):
            step(each, model, seed)
            plan.step()
    assert {group["lr"] for part in again.parts for group in part.param_groups} == {1e-2 * 0.5**3}
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(head.parameters(), other.parameters(), strict=True))


def test_it_is_not_sharded():
    muon = ["--stage1.optimizer", "adamw", "--shard_optimizer", "true", "--stage2.optimizer", "muon"]
    with pytest.raises(UserError, match=r"shard_optimizer .* --stage2\.optimizer adamw"):
        settled(parse(muon), checked=True)
    settled(parse([*muon, "--stage2.max_steps", "0"]), checked=True)
