"""State of recurrent layers: linear attention, state-space models, short convolutions. Storage, and exact rollback.

A recurrent layer folds a row's tokens into one state S, which can't be cut back to fewer tokens as keys and values can.
So a pass over T tokens leaves the committed state S0 alone, and keeps the inputs of the layer's recurrence. When n of
the T tokens turn out to be accepted, `commit` replays the recurrence from S0 with an identity step in place of every
token that was not:

    pass     S0 --x0--> S1 --x1--> S2 --x2--> S3     accepted: x0 and x1
    replay   S0 --x0--> S1 --x1--> S2 ------> S2     becomes the new S0

Rows of a batch may accept different numbers of tokens, and no projection of the model runs twice. Where the numbers are
known before the pass (`counts`: the lengths of a batch's prompts), the pass itself does identity steps. A convolution's
state is its last K inputs, so rolling it back is a gather. Of a token tree, the path to each token is run as a row of
its own, and the accepted path is replayed.

transformers' models are used unmodified: they read and write states through their cache, and compute recurrences with
functions of their modules, which `speculator.target.recurrent.recurrences` wraps. The calls of a pass, in order:

    cache.writing            begin             the row's width, tree and counts
    model: update_conv_state   convolve        this layer becomes the running one
    model: its convolution   run_convolution   along the paths of a tree
    model: its recurrence    run               from S0, and keeps `_replay`
    model: update_recurrent_state   finish     keeps the last state
    cache.gather             follow            chooses the accepted path of a tree
    cache.commit             commit            replays the accepted tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from speculator.target.attention.tree import TokenTree
from speculator.target.recurrent.recurrences import RecurrencePass, convolution, like, running

StateForm = tuple[torch.Size, torch.dtype, torch.device]
"""Shape without the rows, dtype and device of a state."""


class RecurrentLayer:
    """One layer's committed states of all rows, and the pass that is not committed yet.

    Attributes:
        states: list of one or two tensors [B, ...]: the last K inputs of the convolution, and the state of the
            recurrence, if the layer has one.
    """

    _inputs: Tensor  # [R, C, K + T] inputs of the convolution in the last pass
    _final: Tensor  # [R, ...] state after the last pass
    _path: Tensor | None  # [R, n] accepted path of its tree
    _replay: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]

    def __init__(self, forms: tuple[StateForm, ...], rows: int):
        self.states = [torch.zeros(rows, *shape, dtype=dtype, device=device) for shape, dtype, device in forms]

    def select(self, start: int, stop: int) -> None:
        self._committed = [state[start:stop] for state in self.states]

    def begin(self, width: int, counts: Sequence[int] | None, tree: TokenTree | None, again: bool) -> None:
        """Start a pass over `width` tokens of each selected row.

        Args:
            counts: tokens of each row that are not padding; None if only `commit` will tell how many count.
            tree: structure of the tokens; None for a chain.
            again: start from the end of the last pass, which was not committed, instead of from the committed states.
        """
        self._width, self._path = width, None
        self._counts = None if counts is None else torch.tensor(counts, device=self.states[0].device)
        self._paths = None if tree is None or width == 1 else (tree.paths, tree.depths)
        self._start = self._committed
        # A second pass of the same step, such as the next level of a draft: its first K inputs are the last pass's
        # last.
        if again:
            self._start = [self._inputs[..., -self.states[0].shape[-1] :], *([self._final] if self.states[1:] else [])]

    # ---- called during a pass

    def convolve(self, inputs: Tensor) -> Tensor:  # [R, C, T] -> [R, C, K + T]
        """Return what the convolution of this pass reads: the last inputs of earlier passes, then these."""
        running.set(self)
        # A causal convolution reads the K inputs before the pass too. They are its whole state.
        self._inputs = torch.cat([self._start[0], inputs], -1)
        return self._inputs

    def run_convolution(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the model's convolution `function`, of a tree's tokens along the path to each."""
        if self._paths is None:
            return function(*args, **kwargs)
        return convolution(function, *self._paths, *args, **kwargs)

    def single_token_state(self) -> Tensor | None:
        """Return a copy of the state for a pass of one token; None for others, which `run` computes."""
        if len(self.states) == 1 or self._width > 1 or self._counts is not None:
            return None
        self._final = self._start[1].clone()  # some families update it in place
        return self._final

    def run(self, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the recurrence from the pass's start; return its outputs and last state.

        `rule` is one of `RULES` with the model's function bound; it is called with a `RecurrencePass` and `args`.
        Also keeps a function with which `commit` replays the accepted tokens.
        """
        start, of_prompt = self._start[1], self._counts is not None

        def replay(keep: Tensor, path: Tensor | None) -> tuple[Tensor, Tensor]:
            return rule(RecurrencePass(start, keep, paths=None if path is None else path[:, None]), *args, **kwargs)

        self._replay = replay
        if self._paths is None:
            return rule(RecurrencePass(start, self._kept(self._counts), of_prompt), *args, **kwargs)
        # Every token of a tree is the end of a path from the root, and each path is run as a row of its own from the
        # same state.
        starts = start.repeat_interleave(self._width, 0)
        paths, ends = self._paths
        return rule(RecurrencePass(starts, of_prompt=of_prompt, paths=paths, ends=ends), *args, **kwargs)

    def finish(self, state: Tensor) -> None:
        """Keep the state after the pass's last token until `commit`."""
        self._final = state

    # ---- called between passes

    def follow(self, path: Tensor) -> None:  # [R, n]
        """Reduce the last pass's tree to an accepted path, of which `commit` keeps the first tokens."""
        # The convolution's inputs are [K before, tree]: verify position p is at K + p. The path's move to the front.
        before, width = self.states[0].shape[-1], self._inputs.shape[1]
        path = path.to(self._inputs.device)
        inputs = self._inputs[..., before:].gather(2, path[:, None].expand(-1, width, -1))
        self._inputs = torch.cat([self._inputs[..., :before], inputs], -1)
        self._path, self._width = path, path.shape[1]

    def commit(self, counts: Tensor) -> None:  # [R]
        """Advance the selected rows by the first `counts` tokens of the last pass."""
        counts, size = counts.to(self._inputs.device), self.states[0].shape[-1]
        # `_inputs` is [K before, T new]. After n accepted tokens the last K inputs are those at n .. n + K - 1: for K =
        # 3 and n = 0 the old ones, 0 1 2, and for n = 2 the inputs 2 3 4, one old and two new.
        columns = counts[:, None] + torch.arange(size, device=counts.device)
        self._committed[0].copy_(self._inputs.gather(2, columns[:, None].expand_as(self._committed[0])))
        if len(self.states) == 1:
            return
        # Now the accepted length is known: replay the pass from the state before it, with identity steps for what was
        # rejected. The state can't be cut back, but the start of the pass is still there.
        if self._width > 1 and self._counts is None:
            self._final = self._replay(self._kept(counts), self._path)[1]
        state = self._committed[1]
        # An idle row commits 0 tokens and keeps its state.
        state.copy_(torch.where(like(counts > 0, state), self._final, state))

    def clear(self, rows: Tensor) -> None:  # [R] bool
        """Set some of the selected rows to zero, the state before a sequence."""
        for state in self._committed:
            state.masked_fill_(like(rows.to(state.device), state), 0)

    def move(self, source: Tensor, destination: Tensor) -> None:
        for state in self.states:
            state[destination.to(state.device)] = state[source.to(state.device)]

    def _kept(self, counts: Tensor | None) -> Any:  # [R] -> [R, T] bool
        """Return a mask of the first `counts` tokens of each row; None if all count."""
        if counts is None:
            return None
        counts = counts.to(self._inputs.device)
        return torch.arange(self._width, device=counts.device) < counts[:, None]


def state_forms(layer: Any) -> tuple[StateForm, ...]:
    """Return (row shape, dtype, device) of each state; () if not recurrent. Unsupported kinds raise a ValueError."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return ()
    if not hasattr(Cache, "get_conv_state"):
        raise ValueError("its recurrent layers need transformers 5.23 or later")
    if layer.number_of_states > 1:
        raise ValueError("its layers have several recurrent states each")
    states = [layer.conv_states[0], layer.recurrent_states[0]]
    return tuple((state.shape[1:], state.dtype, state.device) for state in states if state is not None)


def pass_ended() -> None:
    """Mark that no layer runs, after a pass: the wrapped recurrences are transformers' own again."""
    running.set(None)
