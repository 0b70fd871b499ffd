"""The optimisers that torch does not have: Muon beside AdamW, and AdamW with its moments split among the processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as TorchMuon
from torch.optim.optimizer import StateDict

from speculator.device import synchronize
from speculator.heads import Speculator


def muon_weights(head: Speculator) -> list[nn.Parameter]:
    """Return the matrices inside a head: all but its embeddings and its output matrices."""
    with_tokens = set(map(id, head.token_matrices()))
    return [weight for weight in head.parameters() if weight.ndim == 2 and id(weight) not in with_tokens]


def largest_share(sizes: Iterable[int], processes: int) -> int:
    """Return how many elements the fullest process holds, if each tensor goes to the emptiest process so far.

    The largest goes first: sizes 5 4 3 1 on two processes are 5 + 1 and 4 + 3, so 7.
    """
    shares = [0] * processes
    for size in sorted(sizes, reverse=True):
        # The same rule as torch's `ZeroRedundancyOptimizer`, so that the plan counts what the run will hold.
        shares[shares.index(min(shares))] += size
    return max(shares)


def bytes_of_moments(head: Speculator, optimizer: str, processes: int) -> int:
    """Return the bytes of a head's moments in float32: two of each weight, or one of the matrices that "muon" has.

    `processes` share Adam's moments as whole tensors; the result is that of the fullest process.
    """
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    saved = sum(weight.numel() for weight in muon_weights(head) if weight.requires_grad) if optimizer == "muon" else 0
    return 8 * largest_share([weight.numel() for weight in trained], processes) - 4 * saved


class MuonAndAdamW(Optimizer):
    """Muon for `muon_weights`, and a given AdamW for the other weights, as one optimiser.

    Muon replaces a matrix's step by the nearest matrix whose singular values are all 1. An embedding or an output
    matrix has a row for each token, most of which have no gradient in a step, so these stay with AdamW.
    Muon's step is scaled to the size of AdamW's (`match_rms_adamw`), so both have the same learning rate. `whole` is an
    AdamW over all weights of the head, before its first step; Muon's weights are removed from it.
    """

    def __init__(self, whole: Optimizer, head: Speculator):
        inside: list[dict[str, list[nn.Parameter] | float]] = []
        chosen = set(map(id, muon_weights(head)))
        weights = [weight for group in whole.param_groups for weight in group["params"]]
        for group in whole.param_groups:
            taken = [weight for weight in group["params"] if id(weight) in chosen]
            group["params"] = [weight for weight in group["params"] if id(weight) not in chosen]
            inside += [{"params": taken, "weight_decay": group["weight_decay"]}] if taken else []
        muon = TorchMuon(inside, lr=whole.defaults["lr"], adjust_lr_fn="match_rms_adamw")
        self.parts: list[Optimizer] = [muon, whole]
        super().__init__(weights, whole.defaults)
        self._share_groups()

    def _share_groups(self) -> None:
        # The learning rate's schedule and `zero_grad` work on `param_groups`, the parts' steps on their own groups, so
        # they have to be the same objects. Loading a state makes new ones.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights; the loop gives no closure."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> StateDict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: StateDict) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


class ShardedAdam(ZeroRedundancyOptimizer):
    """AdamW with its moments split among the processes (ZeRO-1, arXiv 1910.02054), made from one before its first step.

    Each process updates the weights whose moments it has, whole tensors, and hands them to the others. A checkpoint
    has the state of all, laid out as plain AdamW's: any number of processes resumes from it.
    """

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
