"""What a head starts from: noise, its target's own matrices, or another head."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from speculator.errors import UserError
from speculator.export import load_any
from speculator.heads import ARCHITECTURES, Speculator
from speculator.target import Target
from train.config import RunConfig

_NOISE = 0.3
_NOT_SHAPE = ("architecture", "initialise", "warm_start")


def new_head(config: RunConfig, target: Target) -> Speculator:
    """A head of the configured shape: float32 master weights, whatever the target's dtype.

    Raises:
        UserError: the head to start from can't be read, or has another shape.
    """
    torch.manual_seed(config.seed)
    shape = {name: value for name, value in dataclasses.asdict(config.speculator).items() if name not in _NOT_SHAPE}
    config_class, head_class = ARCHITECTURES[config.speculator.architecture]
    head = head_class(
        config_class(
            vocab_size=target.vocab_size,
            emb_dim=target.hidden_size,
            base_model_name_or_path=config.target.name_or_path,
            trained_length=config.data.seq_length,
            training_data=config.data.sources,
            **shape,
        )
    )
    if config.speculator.warm_start:
        from_head(head, config.speculator.warm_start)
    elif config.speculator.initialise == "target":
        from_target(head, target)
    return head


def from_head(head: Speculator, folder: str) -> None:
    """Copy the weights of a trained head, of any checkpoint layout, into a fresh one.

    Raises:
        UserError: nothing readable there, or a head of another shape: the first field that differs is named.
    """
    other = load_any(folder)
    if other.config.model_type != head.config.model_type:
        raise UserError(f"{folder} holds a {other.config.model_type}, not the {head.config.model_type} configured")
    for name in ("vocab_size", "emb_dim", "inner_dim", "n_predict", "tie_weights", "scale_input"):
        theirs, ours = getattr(other.config, name), getattr(head.config, name)
        if theirs != ours:
            raise UserError(f"{folder} has {name} {theirs}, but this run's head has {ours}")
    head.load_state_dict(other.state_dict())


@torch.no_grad()
def from_target(head: Speculator, target: Target) -> None:
    """Copy the target's token geometry into a fresh head, at the scale that the head's own initialisation has.

    Embedding and output rows are those of the target; the first projection is near the identity, so that head 0 sees
    the hidden state in the basis that its output matrix reads.

    Args:
        head: of the target's width: inner_dim equal to emb_dim.
        target: the model that the head is to draft for.
    """
    config = head.config

    def rescaled(weight: Tensor) -> Tensor:
        return weight / weight.std() * config.inner_dim**-0.5

    for module in head.modules():
        if isinstance(module, nn.Embedding):
            module.weight.copy_(rescaled(target.model.get_input_embeddings().weight))
    for i in range(head.n_predict):
        head.output(i).weight.copy_(rescaled(target.model.get_output_embeddings().weight))
    first = head.entry.weight
    first.mul_(_NOISE).add_(torch.eye(config.inner_dim))
