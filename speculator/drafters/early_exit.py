"""Drafting with the target's own first layers (LayerSkip, 2404.16710): no training, no second model."""

from __future__ import annotations

from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Drafter, Shape
from speculator.decoding.memory import Sequences
from speculator.drafters.draft_model import CausalSource
from speculator.drafters.shapes import as_shape
from speculator.errors import UserError, refuse
from speculator.target.cache.kv_cache import KVCache
from speculator.target.model import Target


class EarlyExitDrafter(Drafter):
    """Drafts with the target's first layers, its final norm and its output matrix.

    The target's KV cache already holds the keys and values of these layers for the sequence. Drafting writes its own
    after the sequence, and verification overwrites them.

    Args:
        target: the model whose layers draft.
        layers: number of layers that run.
        shape: form of the draft; a number n stands for a chain of n tokens.

    Raises:
        UserError: the target's layers can't be run one by one, `layers` is not at least 1 and below their number, or a
            target with recurrent layers is to draft a tree.
    """

    name = "early_exit"

    def __init__(self, target: Target, layers: int, shape: Shape | int = 4):
        check_layers(target, layers)
        self.memory = EarlyExitSource(target, layers)
        self.reshape(as_shape(shape))


class EarlyExitSource(CausalSource):
    """Gives the draft logits of `EarlyExitDrafter`: runs the target's first layers over its own KV cache."""

    def __init__(self, target: Target, layers: int):
        self.target, self.layers, self.capturable = target, layers, target.capturable

    def reserve(self, shape: Shape) -> None:
        super().reserve(shape)
        # The pending token and everything that the draft processes, after the target's committed positions.
        self.scratch_positions = 1 + shape.offered
        if self.target.recurrent and not self._is_chain:
            raise UserError(f"{self.target.name} has recurrent layers, whose early exit drafts chains only")

    def open(self, cache: KVCache) -> EarlyExitSource:
        opened = super().open(cache)
        opened.cache = cache
        return opened

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        self.begin(pending)
        return self.run(pending[:, None], None, 0)

    def run(self, tokens: Tensor, tree: Draft | None, base: int) -> Tensor:
        with self.target.aux_layers.first_layers(self.layers):
            hidden = self.target.extend(self.cache, tokens, tree, base)
        return self.target.logits(hidden)


def check_layers(target: Target, layers: int) -> None:
    """Raise a UserError unless the target has more than `layers` layers, at least 1, that can be run one by one."""
    count, where = len(target.aux_layers.layers), f"early exit after {layers} layers: {target.name}"
    refuse(
        (not count, f"{where}'s layers are not found one by one"),
        (not 1 <= layers < count, f"{where} has {count}, so 1 to {count - 1} can draft"),
    )
