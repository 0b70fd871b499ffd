"""Steps of an optimiser and their peak memory. Imports torch alone: environments of other libraries run it too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile


class Stepper:
    """Training steps: forward and backward pass of an objective, clipped gradients, AdamW.

    Args:
        weights: every weight that is held, frozen ones included.
        objective: computes the loss of the batch.
        fused: use torch's fused AdamW.
    """

    def __init__(self, weights: Iterable[Tensor], objective: Callable[[], Tensor], fused: bool):
        self.weights, self.objective = list(weights), objective
        self.trained = [weight for weight in self.weights if weight.requires_grad]
        self.optimiser = torch.optim.AdamW(self.trained, lr=1e-4, fused=fused)
        self.loss = torch.zeros(())

    def step(self) -> None:
        loss = self.objective()
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.loss = loss.detach()

    def peak(self) -> int:
        """Most bytes in use during a step: weights, moments, and what the step allocates."""
        moments = [v for state in self.optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]
        held = {tensor.data_ptr(): tensor.nbytes for tensor in [*self.weights, *moments]}
        return sum(held.values()) + peak_bytes(self.step, self.weights[0].device)


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes that `work` had allocated at once; what it leaves behind counts."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(profile_memory=True) as profiler:
        work()
    assert profiler.kineto_results is not None
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))
