"""A head that starts from what its target knows, instead of from noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculator.heads import Speculator
from speculator.target import Target

_NOISE = 0.3


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
