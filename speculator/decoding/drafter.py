"""The interface of whatever proposes tokens, and of the shapes and logits that drafts are built from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.memory import Memory, Sequences
from speculator.decoding.sampling import Noise

if TYPE_CHECKING:
    from speculator.decoding.request import Request


class Drafter:
    """Proposes tokens for the target to verify.

    In every step the engine calls `choose`, `propose` and `prepare`; it also updates the drafter's memory. A drafter
    whose memory is a `LogitsSource` sets its attributes through `reshape` and inherits `propose`. Others implement
    `propose`.

    Attributes:
        name: name in reports: "head", "model", "ngram", or your own.
        num_speculative_tokens: G, the longest path that one draft can contain.
        nodes: the most tokens that one `propose` drafts: G for a chain, more for a tree.
        rules: accept rules that keep the output exact for every draft; the first is the default.
            "match" fits every draft that is fixed before the target samples, whether made of `noise.scores` or not;
            a chain also allows "block" and "rejection", if its tokens are drawn from `Draft.probs`, or each is given
            probability 1 (None);
            a tree allows "multi_candidate" if siblings are drawn without replacement.
        memory: state that the drafter keeps of every row: none, the KV cache of a head or draft model, lookup paths.
        capturable: `propose` never reads a value back from the device, and of `sequences` only the longest length, so
            CUDA graphs can replay it.
        aux_layers: target layers whose hidden states the memory reads, ascending; empty: the final hidden state.
        shape: the `Shape` of the next draft; None for a drafter with a `propose` of its own.
        trained_length: longest context that the drafter was trained on; None: not known, or not trained.
    """

    name: str
    num_speculative_tokens: int
    nodes: int
    rules: tuple[str, ...]
    memory: Memory = Memory()
    capturable: bool = False
    aux_layers: Sequence[int] = ()
    shape: Any = None
    trained_length: int | None = None

    def choose(self, requests: Sequence[Request]) -> Any:
        """Return the `Shape` that all rows draft in the next step, given the decoding requests; None without shapes."""
        return self.shape

    def prepare(self) -> None:
        """Do host work for later steps while the device runs the current step, whose tokens are not known yet."""

    def observe(self, seconds: float) -> None:
        """Record the wall-clock seconds of the last step, from before `choose` until its tokens were appended."""

    def forget(self) -> None:
        """Drop what was learned from earlier requests, such as their n-grams."""

    def reshape(self, shape: Shape) -> None:
        """Draft in another shape from the next step on."""
        self.memory.reserve(shape)
        self.shape, self.num_speculative_tokens, self.nodes, self.rules = shape, shape.depth, shape.nodes, shape.rules
        self.capturable = self.memory.capturable

    def propose(self, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        """Return a draft that continues each row's pending token; rows at temperature 0 are drafted without sampling.

        Args:
            pending: [R] newest token of each row, sampled but not yet processed by the target.
            noise: random numbers of the step, and with `sampling` each row's temperature and filters.
            sequences: tokens of each row, the pending token last; empty for idle rows.
        """
        return self.shape.draft(cast(LogitsSource, self.memory), pending, noise, sequences)

    @property
    def max_nodes(self) -> int:
        """The most tokens that a draft can have in any shape."""
        return self.nodes


class LogitsSource(Memory):
    """A model that gives next-token logits along a draft, level by level, and its memory of every row.

    Attributes:
        independent: logits do not depend on the tokens drafted before them. Sampled tokens of such a draft seldom fit
            together.
    """

    independent: bool = False

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:  # [B] -> [B, 1, V]
        """Return the logits of the token after each row's pending token, given also all tokens of each row."""
        raise NotImplementedError

    def next(
        self,
        level: int,  # drafting level of the result: `first` gives level 0
        tokens: Tensor,  # [B, f] the newest level
        parents: Tensor,  # [B, f] index of each token's parent in the level before
    ) -> Tensor:  # [B, f, V]
        """Return the logits of the children of each token of the newest level."""
        raise NotImplementedError

    def skip(self, pending: Tensor, sequences: Sequences) -> None:
        """Update the memory in a step in which this source drafts nothing; it takes the arguments of `first`."""


class Shape(Protocol):
    """How a draft is built from next-token distributions.

    Attributes:
        depth: the longest path of a draft.
        levels: depth that the logits source drafts; a lookup path may go deeper.
        nodes: the most tokens of a draft.
        width: the most children of a token that the logits source drafts.
        offered: the most tokens that the source may have to process, among which the `nodes` are chosen.
        rules: see `Drafter`.
    """

    depth: int
    levels: int
    nodes: int
    width: int
    offered: int
    rules: tuple[str, ...]

    def draft(self, source: LogitsSource, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        """Return a draft of this shape with logits from `source`; for the other arguments, see `Drafter.propose`."""
        ...
