"""Adaptive drafting: before each step, draft with the head, n-gram lookup, both or neither, whichever is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from speculator.decoding import cuda_graphs
from speculator.decoding.draft import Draft
from speculator.decoding.drafter import LogitsSource, Sequences, Shape
from speculator.decoding.request import Request
from speculator.decoding.sampling import Noise
from speculator.drafters.controller import Choice, Controller, StepCost, fastest_shape
from speculator.drafters.head import HeadDrafter
from speculator.drafters.hybrid import Hybrid
from speculator.drafters.ngram import Found, NgramDrafter
from speculator.heads import Speculator
from speculator.heads.drafting import DraftingSource

PATH_LENGTHS, CAPTURED_PATH_LENGTHS = (0, 1, 2, 3, 4, 6, 8), (0, 8)
"""Lengths of a lookup path on its own; few where steps are captured, since every shape is captured separately."""
_HYBRID_LENGTHS, _CAPTURED_HYBRID_LENGTHS = (1, 2, 4, 8), (4,)


class LookupPath:
    """The path that n-gram lookup found, at most `length` tokens; 0: no draft. The head takes no part in it."""

    width, offered, levels = 1, 0, 0
    rules: tuple[str, ...] = ("match",)
    capturable = True
    found: Found

    def __init__(self, length: int):
        self.depth = self.nodes = length

    def draft(self, source: LogitsSource, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        cast(DraftingSource, source).skip(pending, sequences)
        if not self.depth:
            return Draft.none(pending)
        return Draft(*self.found.first(len(pending), self.depth), ragged=True)


class AdaptiveDrafter(HeadDrafter):
    """Drafts what `Controller` chooses before each step.

    Args:
        head: the trained head.
        choices: what the head can draft.
        lookup, cost: see `Controller`.
        memory: number of tokens of other sequences that n-gram lookup searches, see `NgramDrafter`.
    """

    name = "adaptive"
    _found: Found

    def __init__(
        self, head: Speculator, choices: Sequence[Choice], lookup: Sequence[float], cost: StepCost, memory: int = 0
    ):
        captured = head.device.type in cuda_graphs.DEVICES
        paths, lengths = (
            (CAPTURED_PATH_LENGTHS, _CAPTURED_HYBRID_LENGTHS) if captured else (PATH_LENGTHS, _HYBRID_LENGTHS)
        )
        self.choices, self.lookup, self.cost, self.memory = choices, lookup, cost, memory
        self._hybrids = {choice: [Hybrid(choice.shape, length) for length in lengths] for choice in choices}
        self._paths = [LookupPath(length) for length in paths]
        super().__init__(head, self._paths[0])
        for shape in self._shapes:
            self.source.reserve(shape.depth, shape.offered)
        self.num_speculative_tokens, self.nodes = max(shape.depth for shape in self._shapes), self.max_nodes
        self.rules = ("match",)
        self.forget()

    @property
    def _shapes(self) -> list[Shape]:
        hybrids = [hybrid for own in self._hybrids.values() for hybrid in own]
        return [*(choice.shape for choice in self.choices), *hybrids, *self._paths]

    @property
    def max_nodes(self) -> int:
        return max(shape.nodes for shape in self._shapes)

    def open(self, slots: int, capacity: int) -> AdaptiveDrafter:
        opened = super().open(slots, capacity)
        opened._found = Found(slots, max(shape.depth for shape in self._shapes), self.head.device)
        opened.forget()
        return opened

    def forget(self) -> None:
        ragged = self.head.device.type == "cpu"
        self._controller = Controller(self.choices, self.lookup, self.cost, self._paths, self._hybrids, ragged)
        # A path that agrees with the head's draft continues after it.
        self._ngrams = NgramDrafter(max(shape.depth for shape in self._shapes), memory=self.memory)

    def fastest(self, greedy: bool, rows: int) -> Shape:
        """The head's fastest shape by the measured figures, whatever the text."""
        return fastest_shape(self.choices, self.cost, greedy, rows)

    def choose(self, requests: Sequence[Request]) -> Shape:
        found = self._ngrams.look([request.sequence for request in requests])
        shape = self._controller.choose(requests, found)
        if isinstance(shape, LookupPath | Hybrid):
            self._found.put([path for _, path in found])
            shape.found = self._found
        return shape
