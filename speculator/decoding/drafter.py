"""The interface of whatever proposes tokens: its memory of every row, and the shapes and logits that drafts come from.

A drafter reads its memory; the engine does everything else with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.sampling import Noise
from speculator.kernels import cuda_graphs
from speculator.target.cache.kv_cache import KVCache

if TYPE_CHECKING:
    from typing_extensions import Self

    from speculator.decoding.request import Request

Sequences = Sequence[Sequence[int]]
"""Prompt and new tokens of each row, on the host. A request's list stays the same object and grows."""


class LookupPaths:
    """Paths that n-gram lookup found for the rows of a step, in a device tensor that captured steps can reread.

    Args:
        most: the most tokens of a path.
    """

    _table: Tensor  # [slots, 1 + most] length of each row's path, and its tokens

    def __init__(self, most: int):
        self.most, self._longest = most, 0

    def open(self, slots: int, device: torch.device) -> LookupPaths:
        """Return a copy with a table for `slots` rows; every row's path has no tokens yet."""
        opened = copy(self)
        opened._table = torch.zeros(slots, 1 + self.most, dtype=torch.long, device=device)
        return opened

    def put(self, found: Sequence[Sequence[int]]) -> None:
        """Set the lookup paths of rows 0, 1, ... for the next step, each cut to `most` tokens; other rows get none."""
        paths = [*(list(path[: self.most]) for path in found), *([] for _ in range(len(self._table) - len(found)))]
        self._table.copy_(torch.tensor([[len(path), *path, *[0] * (self.most - len(path))] for path in paths]))
        # The form of a captured step can't depend on what was found.
        captured = self._table.device.type in cuda_graphs.DEVICES
        self._longest = self.most if captured else max(map(len, paths))

    def first(self, rows: int, most: int) -> tuple[Tensor, Tensor]:  # [rows, W], [rows]
        """Return the paths of the first `rows` rows, at most `most` tokens each and padded with 0, and path lengths."""
        width = min(most, self._longest)
        return self._table[:rows, 1 : 1 + width], self._table[:rows, 0].clamp(max=width)


class Memory:
    """State that a drafter keeps of every row, such as a head's KV cache; this base class keeps none.

    The engine calls `open` once, `prefill` for every chunk of a prompt, `commit` after every step, `move` when rows
    change places, and `grow` when they need more room.

    Attributes:
        capturable: nothing here reads a value back from the device, so CUDA graphs can replay it.
        overlap: positions at the end of a reused prefix that `prefill` must see again.
        version: changes when the tensors in `buffers` are replaced; older graphs are then invalid.
        paths: what n-gram lookup found for the next draft.
    """

    capturable: bool = True
    overlap: int = 0
    version: int = 0
    paths: LookupPaths = LookupPaths(0)

    def reserve(self, shape: Shape) -> None:
        """Make room for drafts of this shape; raise a UserError if this memory can't draft it."""

    def open(self, cache: KVCache) -> Self:
        """Return an empty copy with as many rows and positions as `cache`, the target's."""
        opened = copy(self)
        opened.paths = self.paths.open(len(cache.lengths), cache.lengths.device)
        return opened

    def grow(self, capacity: int) -> None:
        """Make room for rows of `capacity` tokens."""

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        """Copy row source[i], at most `longest` tokens, to row destination[i], all at once; extended as `erase` is."""
        for buffer in self.buffers:
            buffer[list(destination)] = buffer[list(source)]

    def erase(self, row: int) -> None:
        """Set all that a row holds to 0, see `Rows.erase`; a memory with more than `buffers` extends this."""
        for buffer in self.buffers:
            buffer[row] = 0

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        """Read a chunk of R prompts into the memory. State after a row's first `begins` tokens is an older sequence's.

        Args:
            start: the first of R neighbouring rows.
            sequences: tokens of each row's prompt; of a preempted request, its completion too.
            begins: tokens of each prompt before the chunk.
            hidden: [R, W, D] target hidden states of the chunk, left-aligned, or [R, W, nD] auxiliary hidden states.
            counts: tokens of each prompt in the chunk.
        """

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        """Keep the tokens that a step accepted.

        Args:
            tokens: [R, G+1] tokens on the accepted path, the pending token first.
            hidden: [R, G+1, D] their hidden states, or [R, G+1, nD] auxiliary hidden states.
            counts: [R] number of accepted tokens, the pending token included; 0 for idle rows.
        """

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Tensors [slots, ...] that steps update in place, except keys and values: a trial step restores them."""
        return ()


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
