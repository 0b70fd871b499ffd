"""The interface of whatever proposes tokens, and of the shapes and logits that drafts are built from."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.sampling import Noise
from speculator.target.kv_cache import KVCache

if TYPE_CHECKING:
    from speculator.decoding.request import Request

Sequences = Sequence[Sequence[int]]
"""Prompt and new tokens of each row, on the host. A request's list stays the same object and grows."""
Self = TypeVar("Self", bound="Drafter")


class Drafter:
    """Proposes tokens for the target to verify.

    The engine calls `open` once, `prefill` for every prompt chunk, then `propose` and `commit` in every step.
    A drafter that keeps no per-row state sets the attributes and implements `propose` only.

    Attributes:
        name: name in reports: "head", "model", "ngram", or your own.
        num_speculative_tokens: G, the longest path that one draft can contain.
        nodes: the most tokens that one `propose` drafts: G for a chain, more for a tree.
        rules: accept rules that keep the output exact for every draft; the first is the default.
            "match" fits every draft, made of the scores of `noise` or of anything else that is fixed before the
            target samples;
            a chain also allows "block" and "rejection", if its tokens are drawn from `Draft.probs`, or each is given
            probability 1 (None);
            a tree allows "multi_candidate" if siblings are drawn without replacement.
        capturable: `propose` and `commit` never read a value back from the device and ignore `sequences`, so CUDA
            graphs can replay them.
        version: changes when the tensors in `buffers` are replaced; older graphs are then invalid.
        aux_layers: target layers whose hidden states the drafter reads, ascending; empty: the final hidden state.
        overlap: positions at the end of a reused prefix that `prefill` must see again.
        scratch_positions: positions after a row's tokens that the drafter may write in the target's cache.
        shape: shape of the next draft, if the drafter drafts in several shapes.
        trained_length: longest context that it was trained on; None: not known, or it was not trained.
    """

    name: str
    num_speculative_tokens: int
    nodes: int
    rules: tuple[str, ...]
    capturable: bool = False
    version: int = 0
    aux_layers: Sequence[int] = ()
    overlap: int = 0
    scratch_positions: int = 0
    shape: Any = None
    trained_length: int | None = None

    def choose(self, requests: Sequence[Request]) -> Any:
        """Return the shape of the next step's draft for the rows of these requests."""
        return self.shape

    def observe(self, seconds: float) -> None:
        """Learn how long the last step took, from the choice on."""

    def forget(self) -> None:
        """Drop everything that was derived from earlier requests."""

    def reshape(self, shape: Shape) -> None:
        """Draft in another shape from the next step on."""
        self.shape, self.num_speculative_tokens, self.nodes, self.rules = shape, shape.depth, shape.nodes, shape.rules
        self.capturable = shape.capturable

    def open(self: Self, slots: int, capacity: int) -> Self:
        """Return a copy with memory for `slots` rows of `capacity` tokens."""
        return copy(self)

    def attach_cache(self, cache: KVCache) -> None:
        """Receive the target's cache; rows to draft for are selected in it. Verification overwrites what is written."""

    def grow(self, capacity: int) -> None:
        """Make room for rows of `capacity` tokens."""

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        """Copy the state of row source[i], at most `longest` tokens, to row destination[i], all at once."""

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        """Process a chunk of R prompts. A row's state after its first `begins` tokens belongs to an older sequence.

        Args:
            start: the first of R neighbouring rows.
            sequences: the prompts.
            begins: tokens of each prompt before the chunk.
            hidden: [R, W, D] target hidden states of the chunk, left-aligned, or [R, W, nD] auxiliary hidden states.
            counts: tokens of each prompt in the chunk.
        """

    def propose(self, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        """Draft continuations of the pending token of each row; at temperature 0 without sampling.

        Args:
            pending: [R] newest token of each row, sampled but not yet processed by the target.
            noise: random numbers of the step, and with `sampling` each row's temperature and filters.
            sequences: tokens of each row, the pending token last; empty for idle rows.
        """
        raise NotImplementedError

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        """Update per-row state with the accepted tokens.

        Args:
            tokens: [R, G+1] tokens on the accepted path, the pending token first.
            hidden: [R, G+1, D] their hidden states, or [R, G+1, nD] auxiliary hidden states.
            counts: [R] number of accepted tokens, the pending token included; 0 for idle rows.
        """

    @property
    def max_nodes(self) -> int:
        """The most tokens that a draft can have in any shape."""
        return self.nodes

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Tensors, without keys and values, that persist between steps and are updated in place."""
        return ()


class LogitsSource(Protocol):
    """A model that gives next-token logits along a draft, level by level.

    Attributes:
        independent: logits do not depend on the tokens drafted before, so that sampled tokens seldom fit together.
    """

    independent: bool = False

    def confidence(
        self,
        level: int,
        tokens: Tensor,  # [B] the newest level of a chain
    ) -> Tensor | None:  # [B]
        """Predicted chance that the token after each is accepted; None if the source predicts none."""
        return None

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:  # [B] -> [B, 1, V]
        """Logits of the token after the pending one."""
        ...

    def next(
        self,
        level: int,  # 1 for the children of the first drafted tokens
        tokens: Tensor,  # [B, f] the newest level
        parents: Tensor,  # [B, f] index of each token's parent in the level before
    ) -> Tensor:  # [B, f, V]
        """Logits of the children of the newest level."""
        ...


class Shape(Protocol):
    """How a draft is built from next-token distributions.

    Attributes:
        depth: the longest path of a draft.
        levels: depth that the logits source drafts; a lookup path may go deeper.
        nodes: tokens of a draft.
        width: the most children of a token.
        offered: the most tokens among which the `nodes` are chosen: what a draft model processes.
        rules, capturable: see `Drafter`.
    """

    depth: int
    levels: int
    nodes: int
    width: int
    offered: int
    rules: tuple[str, ...]
    capturable: bool

    def draft(self, source: LogitsSource, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        """Build a draft; see `Drafter.propose`."""
        ...
