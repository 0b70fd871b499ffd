"""The seam between the decoding loop and whoever drafts, and the one between a draft's shape and its laws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from speculator.decoding.cache import RowCache
from speculator.decoding.draft import Draft
from speculator.decoding.sampling import RowSampling

Texts = Sequence[Sequence[int]]
"""The text of each row so far on the host, prompt and new tokens: a drafter that reads text asks the device nothing."""


class Drafter(Protocol):
    """Three verbs. The loop calls `start` once, then `propose` and `commit` in turn."""

    name: str
    """"head", "model" or "ngram": how a report names it."""

    draft_length: int
    """G: the most tokens of one draft that can be kept, the depth of a tree."""

    nodes: int
    """The most tokens that one `propose` drafts: G for a chain, more for a tree."""

    rules: tuple[str, ...]
    """The accept rules that fit its drafts; the first is the default."""

    capturable: bool
    """Whether drafting needs nothing of the host: neither the texts nor an answer from the device. `propose` and
    `commit` may then be replayed from a CUDA graph without being called."""

    @property
    def buffers(self) -> Sequence[Tensor | None]:
        """If `capturable`: the tensors that last from one step to the next, updated in place."""
        ...

    def start(
        self,
        texts: Texts,  # the prompts
        hidden: Tensor,  # [B, S, D] the target's hidden states at the prompts' ends
        counts: Tensor,  # [B] how many of them, from the left, are the row's own
        cache: RowCache,  # the target's: its `capacity` and `longest` do for a drafter's own cache
    ) -> None:
        """Begin a generation."""
        ...

    def propose(
        self,
        pending: Tensor,  # [B] the newest token of each row: sampled, not yet processed by the target
        sampling: RowSampling,
        u: Tensor,  # [B, nodes] for the draft's own sampling
        texts: Texts,  # they end with the pending token
    ) -> Draft:
        """Draft what may follow `pending`: greedily at temperature 0, as its shape says above it."""
        ...

    def commit(
        self,
        tokens: Tensor,  # [B, G+1] what the target processed on the kept path, the pending token first
        hidden: Tensor,  # [B, G+1, D]
        counts: Tensor,  # [B] how many of them, from the left, were kept
    ) -> None:
        """Learn which tokens became part of the text."""
        ...


class LawSource(Protocol):
    """A model that gives next-token logits along a draft that is being built, level by level."""

    def first(self, pending: Tensor, texts: Texts) -> Tensor:  # [B] -> [B, 1, V]
        """Logits of what may follow the pending token."""
        ...

    def next(
        self,
        level: int,  # 1 for the children of the first drafted tokens
        tokens: Tensor,  # [B, f] the newest level
        parents: Tensor,  # [B, f] the place of each one's parent in the level before
    ) -> Tensor:  # [B, f, V]
        """Logits of what may follow each token of the newest level."""
        ...
