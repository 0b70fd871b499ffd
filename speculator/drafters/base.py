"""The seam between the decoding loop and whoever drafts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from speculator.decoding.rules import Draft
from speculator.decoding.sampling import Sampling


class Drafter(Protocol):
    """Three verbs. The loop calls `start` once, then `propose` and `commit` in turn."""

    name: str
    """"head", "model" or "ngram": how a report names it."""

    draft_length: int
    """G: the most tokens that one `propose` drafts."""

    def start(
        self,
        tokens: Tensor,  # [B, S] the prompts, padded on the right
        hidden: Tensor,  # [B, S, D] the target's hidden states there
        lengths: Tensor,  # [B] of the prompts
    ) -> None:
        """Begin a generation."""
        ...

    def propose(
        self,
        pending: Tensor,  # [B] the newest token of each row: sampled, not yet processed by the target
        sampling: Sampling,
        u: Tensor,  # [B, G] for the draft's own sampling
    ) -> Draft:
        """Draft what may follow `pending`: greedily at temperature 0, drawn from q above it."""
        ...

    def commit(
        self,
        tokens: Tensor,  # [B, T] what the target processed: the pending token and the draft
        hidden: Tensor,  # [B, T, D]
        counts: Tensor,  # [B] how many of them, from the left, were kept
    ) -> None:
        """Learn which tokens became part of the text."""
        ...
