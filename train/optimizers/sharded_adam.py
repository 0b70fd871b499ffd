"""AdamW whose moments are split among the processes (ZeRO-1, arXiv 1910.02054); weights and gradients stay whole.

Each process updates the weights whose moments it has, whole tensors of about as many numbers for each, and hands
them to the others. A checkpoint has the state of all of them, laid out as that of plain AdamW: any number of processes
resumes from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import StateDict

from speculator.device import synchronize


def largest_share(sizes: Iterable[int], processes: int) -> int:
    """Return how many elements the fullest process holds, if each tensor goes to the emptiest process so far.

    The largest goes first: sizes 5 4 3 1 on two processes are 5 + 1 and 4 + 3, so 7.
    """
    shares = [0] * processes
    for size in sorted(sizes, reverse=True):
        # The same rule as torch's `ZeroRedundancyOptimizer`, so that the plan counts what the run will hold.
        shares[shares.index(min(shares))] += size
    return max(shares)


class ShardedAdam(ZeroRedundancyOptimizer):
    """AdamW with its moments split among the processes, made from an AdamW that has taken no step yet."""

    def __init__(self, whole: Optimizer):
        settings = {name: value for name, value in whole.defaults.items() if name in ("lr", "betas", "eps", "fused")}
        groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in whole.param_groups]
        super().__init__(groups, optimizer_class=AdamW, **settings)

    def consolidate_state_dict(self, to: int = 0) -> None:
        super().consolidate_state_dict(to)
        synchronize()  # it does not wait for its copies to the CPU

    def state_dict(self) -> StateDict:
        """Return the state of all processes, gathered here by `consolidate_state_dict`, and drop it."""
        found = super().state_dict()
        self._all_state_dicts: list[StateDict] = []
        return found

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        self.state.clear()  # those of this process again: its optimiser has them in `self.optim.state`
        # torch has put every `step` on the CPU, where the fused kernel of a GPU refuses it (pytorch#124133).
        for group in self.optim.param_groups:
            for weight in group["params"]:
                if group["fused"] and (state := self.optim.state.get(weight)):
                    state["step"] = state["step"].to(weight.device)
