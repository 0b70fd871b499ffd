"""Hybrid drafts: one tree holds a model's draft and the path of an n-gram lookup where the two differ."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Drafter, LogitsSource, Shape
from speculator.decoding.memory import LookupPaths, Sequences
from speculator.decoding.request import Request
from speculator.decoding.sampling import Noise
from speculator.decoding.verify import deepest
from speculator.drafters.ngram import NgramDrafter
from speculator.drafters.shapes import check_length, check_nodes
from speculator.errors import refuse


class Hybrid:
    """Draft of another shape, with a path from n-gram lookup in the same tree.

    The path is followed in the draft as far as both agree. From there its next `length` tokens are added as siblings of
    the draft's tokens or after its end.

    Args:
        inner: shape of the draft.
        length: the most tokens that the path adds; the part that it shares with the draft does not count.
    """

    rules: tuple[str, ...] = ("match",)

    def __init__(self, inner: Shape, length: int):
        check_length(length)
        self.inner, self.length = inner, length
        self.depth, self.levels, self.nodes = inner.depth + length, inner.levels, inner.nodes + length
        self.width, self.offered = inner.width, inner.offered
        check_nodes(self.nodes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hybrid) and (self.inner, self.length) == (other.inner, other.length)

    def __hash__(self) -> int:
        return hash((self.inner, self.length))

    def draft(self, source: LogitsSource, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        draft = self.inner.draft(source, pending, noise, sequences)
        path, counts = source.paths.first(len(pending), self.depth)
        return joined(draft, pad(path, (0, self.depth - path.shape[1])), counts, self.length)


def joined(
    draft: Draft,
    path: Tensor,  # [B, draft.depth + length] lookup path: tokens after the pending one
    counts: Tensor,  # [B] number of the path's tokens; the rest is padding
    length: int,
) -> Draft:
    """Return the draft with up to `length` more tokens: those of the path after the part that both share.

    In `tokens` they come after each row's own draft tokens. The result is a tree without `probs`, with `draft` as base.
    """
    # Follow the path in the draft to the verify position `at`, `same` tokens deep.
    depths = draft.depths[:, 1:]
    # A draft token at depth d agrees if it is token d - 1 of the path, and the path has that many.
    at = deepest((draft.tokens == path.gather(1, depths - 1)) & (depths <= counts[:, None]), draft)
    same = draft.depths.gather(1, at[:, None])[:, 0]
    offsets = torch.arange(length, device=path.device)
    columns = draft.lengths[:, None] + offsets  # after what each row really drafted
    # The first added token hangs below the node where path and draft part, each other one below the one before it.
    parents = torch.cat([at[:, None] - 1, columns[:, :-1]], 1)
    return Draft(
        # Of a path a b c d whose first two tokens the draft has, c and d are added: c below the node for b, d below c.
        tokens=pad(draft.tokens, (0, length)).scatter(1, columns, path.gather(1, same[:, None] + offsets)),
        lengths=draft.lengths + (counts - same).clamp(0, length),
        probs=None,
        parents=pad(draft.before - 1, (0, length), value=-1).scatter(1, columns, parents),
        depth=draft.depth + length,
        width=draft.width + 1,
        base=draft,
        ragged=True,
    )


class HybridDrafter(Drafter):
    """Combines n-gram lookup with a head or a draft model: one tree holds both drafts.

    Args:
        drafter: proposes the draft to which the lookup path is added; copied.
        lookup: finds the path, and is copied. Its `num_speculative_tokens` is the most tokens that the path adds.

    Raises:
        UserError: the draft would be too large, or `drafter` has none of its own, as adaptive drafting and lookup.
    """

    name = "hybrid"

    def __init__(self, drafter: Drafter, lookup: NgramDrafter):
        refuse(
            (
                not (drafter.shape and drafter.shape.nodes),
                f"a hybrid draft needs the fixed draft of a head or a model, such as HeadDrafter's, not {drafter.name}",
            )
        )
        inner, self.lookup = copy(drafter), copy(lookup)
        inner.memory = copy(drafter.memory)
        inner.reshape(Hybrid(drafter.shape, lookup.num_speculative_tokens))
        self.memory, self.aux_layers, self.trained_length = inner.memory, drafter.aux_layers, drafter.trained_length
        super().reshape(inner.shape)
        self.lookup.num_speculative_tokens = self.shape.depth
        self.memory.paths = LookupPaths(self.shape.depth)

    def choose(self, requests: Sequence[Request]) -> Hybrid:
        self.memory.paths.put(self.lookup.paths(requests))
        return self.shape

    def prepare(self) -> None:
        self.lookup.prepare()

    def forget(self) -> None:
        self.lookup = copy(self.lookup)
        self.lookup.forget()
