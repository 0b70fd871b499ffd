"""State of recurrent layers: linear attention, state-space models, short convolutions. Storage, and exact rollback.

A recurrent layer folds a row's tokens into one state S, which can't be cut back to fewer tokens as keys and values can.
So a pass over T tokens leaves the committed state S0 alone, and keeps the inputs of the layer's recurrence. When n of
the T tokens turn out to be accepted, `commit` replays the recurrence from S0 with an identity step in place of every
token that was not:

    pass     S0 --x0--> S1 --x1--> S2 --x2--> S3     accepted: x0 and x1
    replay   S0 --x0--> S1 --x1--> S2 ------> S2     becomes the new S0

Rows of a batch may accept different numbers of tokens, and no projection of the model runs twice. Where the numbers are
known before the pass (`counts`: the lengths of a batch's prompts), the pass itself does identity steps. A convolution's
state is its last K inputs, so rolling it back is a gather.

transformers' models are used unmodified. They read and write states through their cache, and compute recurrences with
module-level functions; `intercept` wraps these. `RULES` lists the functions that are known, and their identity steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

StateForm = tuple[torch.Size, torch.dtype, torch.device]
"""Shape without the rows, dtype and device of a state."""
_running: ContextVar[RecurrentLayer | None] = ContextVar("_running", default=None)
"""The layer whose recurrence runs next; None outside passes that write a `KVCache`."""


@dataclass
class Step:
    """What a recurrence is run with beyond its own arguments.

    Attributes:
        state: [B, ...] state at which it starts.
        keep: [B, T] tokens that count; the others are identity steps. None: all count.
        of_prompt: it reads a prompt; otherwise it verifies a draft, or replays that.
    """

    state: Tensor
    keep: Tensor | None
    of_prompt: bool


def delta_rule(function: Callable[..., Any], step: Step, *args: Any, **kwargs: Any) -> Any:
    """Gated delta rule in chunks: S <- exp(g) S, then S <- S + beta k (v - S^T k)^T. Identity: g = beta = 0."""
    if step.keep is not None:
        for name in ("g", "beta"):
            kwargs[name] = torch.where(_like(step.keep, kwargs[name]), kwargs[name], 0.0)
    return function(*args, **kwargs | {"initial_state": step.state, "chunk_size": _chunk(args[0], 64)})


def state_space(function: Callable[..., Any], step: Step, x: Tensor, dt: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Mamba 2 in chunks: S <- exp(dt A) S + dt x B^T. Identity: dt = 0, which is the softplus of -inf.

    transformers limits dt when it reads a prompt, but not for single tokens, so verification doesn't either.
    """
    low, high = kwargs["dt_limit"]
    kwargs["dt_limit"] = (0.0, torch.inf)
    if step.of_prompt and (low, high) != kwargs["dt_limit"]:
        dt = nn.functional.softplus(dt + kwargs["dt_bias"].to(dt.dtype)).clamp(low, high)
        kwargs |= {"dt_bias": None, "dt_softplus": False}
    if step.keep is not None:
        dt = torch.where(_like(step.keep, dt), dt, -torch.inf)  # also where it is limited, from below by 0
    return function(
        x, dt, *args, **kwargs | {"initial_states": step.state, "chunk_size": _chunk(x, kwargs["chunk_size"])}
    )


def selective_scan(
    function: Callable[..., Any],
    step: Step,
    x: Tensor,  # [B, I, T]
    dt: Tensor,  # [B, I, T]
    A: Tensor,
    B: Tensor,  # [B, N, T]
    C: Tensor,  # [B, N, T]
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba 1, token by token, because its own scan can't start from a state. Identity: dt = 0, as in `state_space`."""
    update = vars(sys.modules[function.__module__])["mamba_selective_state_update"]
    if step.keep is not None:
        dt = torch.where(step.keep[:, None], dt, -torch.inf)
    given = {"D": kwargs["D"], "dt_bias": kwargs["delta_bias"], "dt_softplus": True}
    state, outputs, z = step.state.clone(), [], kwargs["z"]
    for t in range(x.shape[-1]):
        gate = None if z is None else z[..., t]
        outputs.append(update(state, x[..., t], dt[..., t], A, B[..., t], C[..., t], z=gate, **given))
    return torch.stack(outputs, -1), state


RULES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": state_space,
    "mamba_selective_scan": selective_scan,
}
"""How to run each of transformers' recurrences from a state: `(function, step, *its arguments)` -> (output, state)."""


def intercept(model: nn.Module) -> None:
    """Wrap the recurrences in the modules that define a model's layers, once per process."""
    for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
        for name, rule in RULES.items():
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "intercepted"):
                setattr(module, name, _intercepted(function, rule))


def _intercepted(function: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        layer = _running.get()
        return function(*args, **kwargs) if layer is None else layer.run(partial(rule, function), *args, **kwargs)

    run.intercepted = True  # type: ignore[attr-defined]
    return run


class RecurrentLayer:
    """One layer's committed states of all rows, and the pass that is not committed yet.

    Attributes:
        states: [B, ...] the last K inputs of the convolution, and the state of the recurrence, if it has one.
    """

    _inputs: Tensor  # [R, C, K + T] of the convolution in the last pass
    _final: Tensor  # [R, ...] state after the last pass
    _replay: Callable[[Tensor | None], tuple[Tensor, Tensor]]

    def __init__(self, forms: tuple[StateForm, ...], rows: int):
        self.states = [torch.zeros(rows, *shape, dtype=dtype, device=device) for shape, dtype, device in forms]

    def select(self, start: int, stop: int) -> None:
        self._committed = [state[start:stop] for state in self.states]

    def begin(self, width: int, counts: Tensor | None, again: bool) -> None:
        """Start a pass over `width` tokens of each selected row.

        Args:
            counts: [R] tokens of each row that are no padding; None: `commit` will tell.
            again: start where the last pass ended, which was not committed, instead of at the committed states.
        """
        self._width, self._counts = width, counts
        self._start = [self._inputs[..., -self.states[0].shape[-1] :], self._final] if again else self._committed

    # ---- called by the model

    def convolve(self, inputs: Tensor) -> Tensor:  # [R, C, T] -> [R, C, K + T]
        """Return the inputs of the convolution, those of earlier tokens first."""
        self._inputs = torch.cat([self._start[0], inputs], -1)
        return self._inputs

    def start(self) -> Tensor | None:
        """Return the state at which a single token's recurrence starts; longer ones are `run`."""
        if len(self.states) == 1:
            return None
        if self._width == 1 and self._counts is None:  # some families update the state in place
            self._final = self._start[1].clone()
            return self._final
        _running.set(self)
        return None

    def run(self, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the recurrence, and remember how to replay it with other tokens kept."""
        _running.set(None)
        start, of_prompt = self._start[1], self._counts is not None
        self._replay = lambda keep: rule(Step(start, keep, of_prompt), *args, **kwargs)
        return self._replay(self._kept(self._counts))

    def finish(self, state: Tensor) -> None:
        """Keep the state after the last token."""
        self._final = state

    # ---- called by the cache

    def commit(self, counts: Tensor) -> None:  # [R]
        """Advance the selected rows by the first `counts` tokens of the last pass."""
        counts, size = counts.to(self._inputs.device), self.states[0].shape[-1]
        place = counts[:, None] + torch.arange(size, device=counts.device)
        self._committed[0].copy_(self._inputs.gather(2, place[:, None].expand_as(self._committed[0])))
        if len(self.states) == 1:
            return
        if self._width > 1 and self._counts is None:
            self._final = self._replay(self._kept(counts))[1]
        state = self._committed[1]
        state.copy_(torch.where(_like(counts > 0, state), self._final, state))

    def clear(self, rows: Tensor) -> None:  # [R] bool
        """Go back to the beginning of a sequence in some of the selected rows."""
        for state in self._committed:
            state.masked_fill_(_like(rows.to(state.device), state), 0)

    def move(self, source: Tensor, destination: Tensor) -> None:
        for state in self.states:
            state[destination.to(state.device)] = state[source.to(state.device)]

    def _kept(self, counts: Tensor | None) -> Tensor | None:  # [R, T] bool
        if counts is None:
            return None
        counts = counts.to(self._inputs.device)
        return torch.arange(self._width, device=counts.device) < counts[:, None]


def state_forms(layer: Any) -> tuple[StateForm, ...]:
    """Return the forms of the states of a layer of transformers' cache, after a pass; () if it is not recurrent."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return ()
    if layer.number_of_states > 1:
        raise ValueError("its layers have several recurrent states each")
    states = [layer.conv_states[0], layer.recurrent_states[0]]
    return tuple((state.shape[1:], state.dtype, state.device) for state in states if state is not None)


def pass_ended() -> None:
    """Forget the running layer after a pass, which may have failed."""
    _running.set(None)


def _like(mask: Tensor, other: Tensor) -> Tensor:
    """Append dimensions of size 1 to a mask, so that it broadcasts to another tensor."""
    return mask.view(*mask.shape, *[1] * (other.ndim - mask.ndim))


def _chunk(x: Tensor, size: int) -> int:
    """Tokens per chunk [B, T, ...]: torch's own code pads the last one, so short passes need short chunks."""
    return min(size, x.shape[1]) if x.device.type == "cpu" else size
