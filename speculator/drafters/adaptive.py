"""Adaptive drafting: before each step, draft with the head, n-gram lookup, both or neither, whichever is fastest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from speculator.decoding.draft import Draft
from speculator.decoding.drafter import LogitsSource, LookupPaths, Sequences, Shape
from speculator.decoding.request import Request
from speculator.decoding.sampling import Noise
from speculator.drafters.head import HeadDrafter
from speculator.drafters.ngram import NgramDrafter
from speculator.drafters.price import LONGEST_PATH, Choice, Chooser, Greedy, StepCost
from speculator.heads import Speculator


class PathOrDraft:
    """Shape in which each row drafts the path that n-gram lookup found for it, or without one the draft of `inner`.

    Args:
        length: the most tokens of a path; 0: no draft.
        inner: shape of the head's draft; None: nothing, and the head takes no part.
    """

    rules: tuple[str, ...] = ("match",)

    def __init__(self, length: int, inner: Shape | None = None):
        self.length, self.inner = length, inner
        self.depth, self.nodes = max(length, inner.depth if inner else 0), max(length, inner.nodes if inner else 0)
        self.levels, self.offered, self.width = (inner.levels, inner.offered, inner.width) if inner else (0, 0, 1)

    def draft(self, source: LogitsSource, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        if self.inner is None:
            source.skip(pending, sequences)
            if not self.length:
                return Draft.none(pending)
            return Draft(*source.paths.first(len(pending), self.length), ragged=True)
        draft = self.inner.draft(source, pending, noise, sequences)
        path, counts = source.paths.first(len(pending), self.length)
        width, is_path = max(draft.tokens.shape[1], path.shape[1]), counts[:, None] > 0

        # Each row takes one or the other; both are padded on the right to the wider one.
        def chosen(paths: Tensor, drafts: Tensor) -> Tensor:  # [R, width]
            fill = width - paths.shape[1], width - drafts.shape[1]
            return torch.where(is_path, pad(paths, (0, fill[0])), pad(drafts, (0, fill[1])))

        lengths = torch.where(is_path[:, 0], counts, draft.lengths)
        if draft.parents is None:
            return Draft(chosen(path, draft.tokens), lengths, ragged=True)
        # In a path each token follows the one before it: -1, 0, 1, ... Padding hangs on the root, so that it is not
        # deeper than the tree and the path.
        index = torch.arange(width, device=path.device)
        parents = torch.where(index < path.shape[1], index - 1, -1).expand(len(path), -1)
        parents = chosen(parents, draft.parents)
        depth = max(draft.depth, path.shape[1])
        return Draft(
            tokens=chosen(path, draft.tokens),
            lengths=lengths,
            probs=None,
            parents=parents,
            depth=depth,
            width=draft.width,
            ragged=True,
        )


class AdaptiveDrafter(HeadDrafter):
    """Drafts what `Chooser` chooses before each step.

    Args:
        choices: shapes of which the head drafts one in a step, or none, for all rows that draft no lookup path; each
            with its measured acceptance rates.
        lookup, cost: see `Chooser`. A `CostTable` is corrected by the time of the steps.
        memory: number of tokens of other sequences that n-gram lookup searches, see `NgramDrafter`.
        packed: see `Chooser` and `speculator.drafters.measure.packs_rows`.
    """

    name = "adaptive"

    def __init__(
        self,
        head: Speculator,
        choices: Sequence[Choice],
        lookup: dict[Greedy, Sequence[float]],
        cost: StepCost,
        memory: int = 0,
        packed: bool = True,
    ):
        self.choices, self.lookup, self.cost, self.packed, self._history = choices, lookup, cost, packed, memory
        self._plain = PathOrDraft(0)
        self._with_paths = {
            choice: PathOrDraft(LONGEST_PATH, choice.shape if choice else None) for choice in (None, *choices)
        }
        super().__init__(head, self._plain)
        shapes = list(self._with_paths.values())
        for shape in shapes:
            self.memory.reserve(shape)
        self.memory.paths = LookupPaths(LONGEST_PATH)
        self._depth, self._nodes = (max(sizes) for sizes in zip(*((s.depth, s.nodes) for s in shapes), strict=True))
        self.num_speculative_tokens, self.nodes = self._depth, self._nodes
        self.rules = ("match",)
        self.forget()

    @property
    def max_nodes(self) -> int:
        return self._nodes

    def forget(self) -> None:
        self._chooser = Chooser(self.choices, self.lookup, self.cost, self.packed)
        self._ngrams = NgramDrafter(LONGEST_PATH, memory=self._history)

    def choose(self, requests: Sequence[Request]) -> Shape:
        found = self._ngrams.look([request.sequence for request in requests])
        plan = self._chooser.choose(requests, found)
        self._chosen = plan, all(request.sampling.greedy for request in requests)
        # Not `PathOrDraft`, which on a GPU has room for the longest path in every row of a captured step.
        if not any(plan.lengths):
            return plan.choice.shape if plan.choice else self._plain
        self.memory.paths.put([path[:length] for (_, path), length in zip(found, plan.lengths, strict=True)])
        return self._with_paths[plan.choice]

    def prepare(self) -> None:
        self._ngrams.prepare()

    def observe(self, seconds: float) -> None:
        learn = getattr(self.cost, "observe", None)
        if learn:
            plan, greedy = self._chosen
            shape = plan.choice.shape if plan.choice else None
            learn(shape, plan.tokens, any(plan.lengths), greedy, len(plan.lengths), seconds)
