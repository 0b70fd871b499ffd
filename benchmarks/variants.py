"""Ways to run the layers of a Llama with fewer launches, to compare on a GPU. They are built in if they gain there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def compiled(model: nn.Module) -> Iterator[None]:
    """Compile the rotation of queries and keys, and the MLPs."""
    mlps = [layer.mlp for layer in _layers(model)]
    forward = torch.compile(type(mlps[0]).forward, dynamic=True)  # once for all layers, which are its argument
    modeling = sys.modules[type(mlps[0]).__module__]
    rotation = torch.compile(modeling.apply_rotary_pos_emb, dynamic=True)
    with patch.object(modeling, "apply_rotary_pos_emb", rotation), _forwards([(m, partial(forward, m)) for m in mlps]):
        yield


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Compute q, k and v by one product."""
    replaced = [pair for layer in _layers(model) for pair in _one_product(layer.self_attn)]
    with _forwards(replaced):
        yield


def _one_product(attention: nn.Module) -> list[tuple[nn.Module, object]]:
    """Return the projections of an attention layer, which calls q first, each with a forward function."""
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    whole, sizes = torch.cat([part.weight for part in parts]), [len(part.weight) for part in parts]
    rest: list[Tensor] = []

    def first(x: Tensor) -> Tensor:
        own, *rest[:] = F.linear(x, whole).split(sizes, -1)
        return own

    return [(parts[0], first), *((part, lambda x: rest.pop(0)) for part in parts[1:])]


@contextmanager
def _forwards(replaced: list[tuple[nn.Module, object]]) -> Iterator[None]:
    for module, forward in replaced:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, _ in replaced:
            del vars(module)["forward"]


def _layers(model: nn.Module) -> nn.ModuleList:
    return model.model.layers  # type: ignore[union-attr,return-value]
