"""A head, a lookup, both or nobody drafts: whichever is the fastest next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from speculator.decoding import cuda_graphs
from speculator.decoding.draft import Draft
from speculator.decoding.drafter import LogitsSource, Sequences, Shape
from speculator.decoding.request import Request
from speculator.decoding.sampling import RowSampling
from speculator.decoding.verify import RULES
from speculator.drafters.controller import COPIED, Choice, Controller, StepCost, fastest_shape
from speculator.drafters.head import HeadDrafter
from speculator.drafters.hybrid import Hybrid
from speculator.drafters.ngram import Found, NgramDrafter
from speculator.heads import Speculator
from speculator.heads.drafting import DraftingSource


class Copied:
    """What a lookup found, or nothing: a draft that the head has no part in.

    Args:
        length: the most tokens; 0: no draft.
    """

    width, offered, levels = 1, 0, 0
    rules: tuple[str, ...] = ("match", "block", "rejection")
    capturable = True
    found: Found

    def __init__(self, length: int):
        self.depth = self.nodes = length

    def draft(
        self, source: LogitsSource, pending: Tensor, sampling: RowSampling, u: Tensor, sequences: Sequences
    ) -> Draft:
        cast(DraftingSource, source).skip(pending, sequences)
        if not self.depth:
            return Draft.none(pending)
        return Draft(*self.found.first(len(pending), self.depth))


class AdaptiveDrafter(HeadDrafter):
    """Drafts what `Controller` chooses before each step. Greedy sequences are what they are with any drafter. A sampled
    text follows the target's distribution, but which of its sequences it is depends on what else is decoded.

    Args:
        head: the trained head.
        choices: what it can draft.
        lookup, cost: see `Controller`.
        alone: what is drafted for one sampled row; default: what is the fastest for it, as measured.
        memory: of the lookup, see `NgramDrafter`.

    Attributes:
        fixed: where this is set, it is drafted and nothing else.
    """

    name = "auto"
    _found: Found

    def __init__(
        self,
        head: Speculator,
        choices: Sequence[Choice],
        lookup: Sequence[float],
        cost: StepCost,
        alone: Shape | None = None,
        memory: int = 0,
    ):
        self.choices, self.lookup, self.cost, self.memory = choices, lookup, cost, memory
        self.fixed: Shape | None = None
        self.alone = alone or fastest_shape(choices, cost, False, 1)
        self._copies = {length: Copied(length) for length in range(COPIED + 1)}
        mixed = [choice.beside(COPIED).shape for choice in choices]
        own = [*(choice.shape for choice in choices), *([alone] if alone else [])]
        self._shapes: list[Shape] = [*own, *mixed, *self._copies.values()]
        super().__init__(head, self._copies[0])
        for shape in self._shapes:
            self.source.reserve(shape.depth, shape.offered)
        self.num_speculative_tokens, self.nodes = max(shape.depth for shape in self._shapes), self.max_nodes
        self.rules = tuple(rule for rule in RULES if all(rule in shape.rules for shape in self._shapes))
        self.forget()

    @property
    def max_nodes(self) -> int:
        return max(shape.nodes for shape in self._shapes)

    def open(self, slots: int, capacity: int) -> AdaptiveDrafter:
        opened = super().open(slots, capacity)
        opened._copies = {length: Copied(length) for length in range(COPIED + 1)}
        opened._found = Found(slots, max(shape.depth for shape in self._shapes), self.head.device)
        opened.forget()
        return opened

    def forget(self) -> None:
        self._controller = Controller(self.choices, self.lookup, self.cost)
        # A path that is followed in a head's draft goes on behind it.
        longest = COPIED + max((choice.shape.depth for choice in self.choices), default=0)
        self._ngrams = NgramDrafter(longest, memory=self.memory)

    def choose(self, requests: Sequence[Request]) -> Shape:
        if self.fixed is not None:
            self._controller.lose_sight()
            return self.fixed
        found = self._ngrams.look([request.sequence for request in requests])
        chosen = self._controller.choose(requests, found)
        if chosen and not isinstance(chosen, Choice) and self.head.device.type in cuda_graphs.DEVICES:
            chosen = 1 << (chosen - 1).bit_length()  # graphs are few
        shape = chosen.shape if isinstance(chosen, Choice) else self._copies[chosen]
        if isinstance(shape, Copied | Hybrid):
            self._found.put([tokens for _, tokens in found])
            shape.found = self._found
        return shape
