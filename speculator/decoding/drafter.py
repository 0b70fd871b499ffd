"""The seam between the engine and whoever drafts, and the one between a draft's shape and its probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.sampling import RowSampling
from speculator.target.kv_cache import KVCache

if TYPE_CHECKING:
    from speculator.decoding.request import Request
    from speculator.drafters.shapes import Shape

Sequences = Sequence[Sequence[int]]
"""Sequences on the host, prompt and new tokens, row by row: a drafter that reads text asks the device nothing. A row's list
stays the same object, and grows, as long as its request lasts."""
Self = TypeVar("Self", bound="Drafter")


class Drafter:
    """Who proposes. A new one needs the attributes and `propose`; what it remembers of the rows it keeps by the others.

    The engine works with what `open` gives, whose memory has a row for each of its slots. `prefill` and `commit` tell
    of every token that a row holds, with the target's hidden states; a step runs over the first rows.

    Attributes:
        name: how a report names it: "head", "model", "ngram", or another of your own.
        num_speculative_tokens: G, the most tokens of one draft that can be accepted: the depth of a tree.
        nodes: the most tokens that one `propose` drafts: G for a chain, more for a tree.
        rules: the accept rules that fit its drafts (`speculator.decoding.verify.RULES`); the first is the default; none where it differs from draft to draft. Exact are, of
            a chain, "block" and "rejection", with `probs` or without; "match" of a chain or tree without `probs`;
            "multi_candidate" of a tree whose siblings are drawn without replacement, "multi_candidate_replacement" of
            one whose siblings are drawn independently.
        capturable: whether drafting needs nothing of the host, neither the sequences nor an answer from the device:
            `propose` and `commit` may then be replayed from a CUDA graph without being called.
        version: how often the tensors that it keeps were replaced by others: graphs from before read the old ones.
        taps: the target's taps that it reads (`speculator.target.aux_layers`), ascending; none: it reads the last hidden state.
        overlap: positions at the end of a reused prefix which it must be given again.
        room: positions behind a text that it may write to in the target's cache.
    """

    name: str
    num_speculative_tokens: int
    nodes: int
    rules: tuple[str, ...]
    capturable: bool = False
    version: int = 0
    aux_layers: Sequence[int] = ()
    overlap: int = 0
    room: int = 0
    shape: Any = None
    """What a head or a model drafts; None where a drafter has a form of its own."""

    def choose(self, requests: Sequence[Request]) -> Any:
        """The shape of the next step's draft, for the rows of these requests: by what was decoded of them."""
        return self.shape

    def forget(self) -> None:
        """What it drafts from now on does not depend on what was decoded before."""

    def reshape(self, shape: Shape) -> None:
        """Draft another shape from the next step on."""
        self.shape, self.num_speculative_tokens, self.nodes, self.rules = shape, shape.depth, shape.nodes, shape.rules
        self.capturable = shape.capturable

    def open(self: Self, slots: int, capacity: int) -> Self:
        """A copy with memory of its own, for so many rows of so many tokens."""
        return copy(self)

    def lend(self, cache: KVCache) -> None:
        """The target's cache, with the rows to draft for selected. The verify pass overwrites what is written there."""

    def grow(self, capacity: int) -> None:
        """Have room for rows of so many tokens: what the target's cache has now, which grows by half at a time."""

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        """Row destination[i] becomes what row source[i] was, as far as the first `longest` tokens go.

        Rows change places so, or one is copied to others.
        """

    def prefill(
        self,
        start: int,  # the first of R neighbouring rows
        sequences: Sequences,  # their prompts
        begins: Sequence[int],  # how much of each is in its row already
        hidden: Tensor,  # [R, W, D] the target's hidden states of what follows, from the left, or [R, W, nD] its taps
        counts: Sequence[int],  # of how many tokens
    ) -> None:
        """Take in a chunk of prompts. A row's memory beyond its first `begins` tokens is another text's."""

    def propose(
        self,
        pending: Tensor,  # [R] the newest token of each row: sampled, not yet processed by the target
        sampling: RowSampling,
        u: Tensor,  # [R, nodes] for the draft's own sampling
        sequences: Sequences,  # they end with the pending token; that of a row which is not decoding is empty
    ) -> Draft:
        """Draft what may follow `pending` in the first R rows: greedily at temperature 0, as its shape says above."""
        raise NotImplementedError

    def commit(
        self,
        tokens: Tensor,  # [R, G+1] what the target processed on the accepted path, the pending token first
        hidden: Tensor,  # [R, G+1, D] or [R, G+1, nD]
        counts: Tensor,  # [R] how many of them, from the left, became part of the text; 0 where a row is not decoding
    ) -> None:
        """Learn what became part of the text."""

    @property
    def widest(self) -> int:
        """The most tokens that a draft may come to have, whatever is chosen."""
        return self.nodes

    @property
    def buffers(self) -> Sequence[Tensor]:
        """If `capturable`: the tensors, but keys and values, that last from one step to the next, updated in place."""
        return ()


class LogitsSource(Protocol):
    """A model that gives next-token logits along a draft that is being built, level by level."""

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:  # [B] -> [B, 1, V]
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
