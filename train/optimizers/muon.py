"""Muon for the matrices inside a head and AdamW for all else, as one optimiser.

Muon replaces a matrix's step by the nearest matrix whose singular values are all 1. An embedding or an output matrix
has a row for each token, most of which have no gradient in a step, so these stay with AdamW, as do norms and biases.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Muon as TorchMuon
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from speculator.heads.base import Speculator
from train.optimizers.sharded_adam import largest_share


def muon_weights(head: Speculator) -> list[nn.Parameter]:
    """Return the matrices inside a head: all but its embeddings and its output matrices."""
    with_tokens = set(map(id, head.token_matrices()))
    return [weight for weight in head.parameters() if weight.ndim == 2 and id(weight) not in with_tokens]


def bytes_of_moments(head: Speculator, optimizer: str, processes: int) -> int:
    """Return the bytes of a head's moments in float32: two of each weight, or one of the matrices that "muon" has.

    `processes` share Adam's moments as whole tensors; the result is that of the fullest process.
    """
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    saved = sum(weight.numel() for weight in muon_weights(head) if weight.requires_grad) if optimizer == "muon" else 0
    return 8 * largest_share([weight.numel() for weight in trained], processes) - 4 * saved


class MuonAndAdamW(Optimizer):
    """Muon for `muon_weights`, and a given AdamW for the other weights, as one optimiser.

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
