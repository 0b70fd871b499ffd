"""Gradients of a module under two ways to compute one objective."""

import torch
from torch import Tensor, nn


def check_same_gradients(module: nn.Module, objective: Tensor, expected: Tensor) -> list[Tensor]:
    """Assert that two values of an objective and their gradients agree, and return the first one's gradients."""
    torch.testing.assert_close(objective, expected)
    objective.backward()
    found = [weight.grad.clone() for weight in module.parameters()]
    module.zero_grad()
    expected.backward()
    for mine, weight in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(mine, weight.grad)
    return found
