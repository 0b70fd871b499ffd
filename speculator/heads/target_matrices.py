"""Heads that use the target's embedding and output matrix instead of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speculator.errors import UserError
from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.kernels.linear import pack_linears
from speculator.target.sharding import whole


class HeadOnTargetMatrices(Speculator):
    """Base of heads whose embedding and output matrix are the target's: neither trained nor saved."""

    def __init__(self, config: SpeculatorConfig):
        super().__init__(config)
        self._shared: list[Any] = []  # a list, so that they are not this module's weights

    def share(
        self,
        embedding: Tensor,  # [V, D]
        output: nn.Linear,  # D -> V
    ) -> None:
        """Use the target's matrices, without bias; the output matrix is copied if cut, sharded or quantised."""
        # Another address means that rows were selected, or that a sharded or quantised matrix was made whole.
        rows = self.draft_rows(whole(output.weight))
        if rows.data_ptr() != output.weight.data_ptr() or output.bias is not None:
            output = _linear(rows.detach())
            pack_linears(output)
        self._shared = [embedding.detach(), output]

    def token_matrices(self) -> list[Tensor]:
        return Speculator.token_matrices(self)  # the output matrix is the target's

    @contextmanager
    def sharing(self, embedding: Tensor, output: Tensor) -> Iterator[None]:  # [V, D] both
        """Use these matrices in place of the target's inside a `with` block, then those from before again."""
        shared = self._shared
        self.share(embedding, _linear(output))
        try:
            yield
        finally:
            self._shared = shared

    def _of_target(self, index: int) -> Any:
        """Return the target's embedding [V, D] (index 0) or its output matrix D -> V_d (1), on the head's device."""
        if not self._shared:
            raise UserError(
                "the head has none of its target's embedding and output matrix: call bind(head, target) of "
                "speculator.checkpoints.loading, or compute inside `head.sharing(embedding, output)`"
            )
        matrices, place = self._shared, self.device
        if {matrices[0].device, matrices[1].weight.device} - {place, torch.device("meta")}:
            # The target is spread over several GPUs: the head needs both matrices on its own.
            embedding, output = matrices[0].to(place), matrices[1]
            if output.weight.device != place:
                output = _linear(output.weight.detach().to(place))
            self._shared = [embedding, output]
        return self._shared[index]

    def embed(self, tokens: Tensor) -> Tensor:  # [...] -> [..., D]
        return nn.functional.embedding(tokens, self._of_target(0)).to(self.dtype)

    @property
    def target_output(self) -> nn.Linear:  # D -> V_d
        """The target's output matrix, or its rows of the draft vocabulary."""
        return self._of_target(1)

    def output_logits(self, features: Tensor) -> Tensor:  # [..., D] -> [..., V_d]
        output = self.target_output
        return output(features.to(output.weight.dtype)).to(features.dtype)


def _linear(weight: Tensor) -> nn.Linear:  # [out, in]
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made
