"""transformers' recurrences, started from any state, with identity steps, and along the paths of a token tree.

An identity step is a token that leaves the state as it is, such as padding or a rejected draft token.

Models call these as functions of their modules. `intercept` wraps the functions named in `RULES`; a wrapped function
does what it did before, except in passes that write a `KVCache`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Runner(Protocol):
    """A recurrent layer during a forward pass. It knows the states and the tree, which the model's own calls lack."""

    def run(self, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...

    def run_convolution(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor: ...


running: ContextVar[Runner | None] = ContextVar("running", default=None)
"""The layer whose functions are called; None outside passes that write a `KVCache`."""


@dataclass
class RecurrencePass:
    """How a recurrence over B rows of T tokens runs in one pass, beyond its own arguments.

    Attributes:
        state: [B, ...] state at which it starts.
        keep: [B, T] tokens that count; the others are identity steps. None: all count.
        of_prompt: it reads a prompt; otherwise it verifies a draft, or replays that.
        paths: [R, P, T] positions in the row of the tokens of P paths, which are run as rows of their own (B = R P).
            None: the tokens of each row are its only path.
        ends: [R, P] the last token of each path.
    """

    state: Tensor
    keep: Tensor | None = None
    of_prompt: bool = False
    paths: Tensor | None = None
    ends: Tensor | None = None

    def unrolled(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return x, whose dimension `dim` is the tokens, with each path as a row of its own; see `unroll`."""
        return x if self.paths is None else unroll(x.movedim(dim, 1), self.paths).movedim(1, dim)

    def rolled(self, y: Tensor, dim: int = 1) -> Tensor:  # [R P, n, ...] -> [R, P, ...] for dim 1
        """Return the output at the last token of each of a row's P paths, of at most n tokens; see `roll`.

        Without paths y is returned as it is. `dim` is the dimension of the tokens, before and after.
        """
        return y if self.ends is None else roll(y.movedim(dim, 1), self.ends).movedim(1, dim)


def delta_rule(
    function: Callable[..., Any], how: RecurrencePass, *args: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule in chunks by transformers' `function`; return outputs and last state.

    `args` are query, key and value [B, T, H, d]. `kwargs` hold g and beta [B, T, H] (Kimi's g: [B, T, H, d]).
    S <- exp(g) S, then S <- S + beta k (v - S^T k)^T. Identity step: g = beta = 0.
    """
    # torch pads the last chunk: whole chunks of 64 would make a verification of 5 tokens cost as much as one of 64.
    query, key, value = map(how.unrolled, args)
    for name in ("g", "beta"):
        kwargs[name] = how.unrolled(kwargs[name])
        if how.keep is not None:
            kwargs[name] = torch.where(like(how.keep, kwargs[name]), kwargs[name], 0.0)
    kwargs |= {"initial_state": how.state, "chunk_size": min(64, query.shape[1])}
    output, state = function(query, key, value, **kwargs)
    return how.rolled(output), state


def state_space(
    function: Callable[..., Any],
    how: RecurrencePass,
    x: Tensor,  # [B, T, H, d]
    dt: Tensor,  # [B, T, H]
    A: Tensor,  # [H]
    B: Tensor,  # [B, T, groups, N]
    C: Tensor,  # [B, T, groups, N]
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run Mamba 2 in chunks by transformers' `function`; return outputs and last state.

    S <- exp(dt A) S + dt x B^T. Identity step: dt = 0, which is the softplus of -inf. Chunks are as in `delta_rule`.

    transformers limits dt when it reads a prompt, but not for single tokens, so verification doesn't either.
    """
    x, dt, B, C = map(how.unrolled, (x, dt, B, C))
    limits, kwargs["dt_limit"] = kwargs["dt_limit"], (0.0, torch.inf)
    if how.of_prompt and limits != kwargs["dt_limit"]:
        dt = nn.functional.softplus(dt + kwargs["dt_bias"].to(dt.dtype)).clamp(*limits)
        kwargs |= {"dt_bias": None, "dt_softplus": False}  # the limit 0 remains, so -inf is an identity step here too
    if how.keep is not None:
        dt = torch.where(like(how.keep, dt), dt, -torch.inf)
    kwargs |= {"initial_states": how.state, "chunk_size": min(kwargs["chunk_size"], x.shape[1])}
    output, state = function(x, dt, A, B, C, **kwargs)
    return how.rolled(output), state


def selective_scan(
    function: Callable[..., Any],
    how: RecurrencePass,
    x: Tensor,  # [B, I, T]
    dt: Tensor,  # [B, I, T]
    A: Tensor,  # [I, N]
    B: Tensor,  # [B, N, T]
    C: Tensor,  # [B, N, T]
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run Mamba 1 token by token, as its scan can't start from a state; identity step: dt = 0, see `state_space`."""
    update = vars(sys.modules[function.__module__])["mamba_selective_state_update"]
    z = x if kwargs["z"] is None else kwargs["z"]
    x, dt, B, C, z = (how.unrolled(each, -1) for each in (x, dt, B, C, z))
    if how.keep is not None:
        # softplus(-inf) = 0, and a step of no time changes no state.
        dt = torch.where(how.keep[:, None], dt, -torch.inf)
    given = {"D": kwargs["D"], "dt_bias": kwargs["delta_bias"], "dt_softplus": True}
    # `update` changes the state in place, and the committed one must stay.
    state, outputs = how.state.clone(), []
    for t in range(x.shape[-1]):
        gate = None if kwargs["z"] is None else z[..., t]
        outputs.append(update(state, x[..., t], dt[..., t], A, B[..., t], C[..., t], z=gate, **given))
    return how.rolled(torch.stack(outputs, -1), -1), state


RULES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": state_space,
    "mamba_selective_scan": selective_scan,
}
"""How to run each of transformers' recurrences: `(function, how, *its arguments)` -> (output, state)."""
_CONVOLUTION = "causal_conv1d_fn"


def convolution(
    function: Callable[..., Tensor],
    paths: Tensor,  # [R, P, T]
    ends: Tensor,  # [R, P]
    x: Tensor,  # [R, C, K + P] the K inputs before the tree come first
    *args: Any,
    **kwargs: Any,
) -> Tensor:  # [R, C, P]
    """Return a causal convolution's output for each token of a tree, run along the path to that token."""
    # The inputs are K of earlier tokens and P of the tree, so token p of the tree is at K + p. With K = 3, the path 0 2
    # becomes 0 1 2 3 5: its own window, as if the tree were this chain.
    before = x.shape[-1] - paths.shape[1]
    earlier = torch.arange(before, device=x.device).expand(*paths.shape[:2], -1)
    windows = unroll(x.movedim(-1, 1), torch.cat([earlier, before + paths.to(x.device)], -1)).movedim(1, -1)
    return roll(function(windows, *args, **kwargs).movedim(-1, 1), before + ends).movedim(1, -1)


def intercept(model: nn.Module) -> None:
    """Wrap transformers' recurrences, once per process: passes that write a `KVCache` call the layer in `running`."""
    for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
        for name in (*RULES, _CONVOLUTION):
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "intercepted"):
                setattr(module, name, _intercepted(function, RULES.get(name)))


def _intercepted(function: Callable[..., Any], rule: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return `function`, or inside a pass the running layer's call of `rule` with it; `rule` None: a convolution."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        layer = running.get()
        if layer is None:  # training, or the model's own forward pass: nothing is rolled back
            return function(*args, **kwargs)
        if rule is None:
            return layer.run_convolution(function, *args, **kwargs)
        return layer.run(partial(rule, function), *args, **kwargs)

    run.intercepted = True  # type: ignore[attr-defined]
    return run


def unroll(x: Tensor, paths: Tensor) -> Tensor:  # [R, T, ...], [R, P, n] -> [R P, n, ...]
    """Return x with each path of a tree as a row of its own: path p of row r becomes row r P + p."""
    rows = torch.arange(len(x), device=x.device)[:, None, None]
    return x[rows, paths.to(x.device)].flatten(0, 1)


def roll(y: Tensor, ends: Tensor) -> Tensor:  # [R P, n, ...], [R, P] -> [R, P, ...]
    """Return what `unroll` spread over rows in its old rows, with the last token of each path only."""
    # One element of each of the R P rows, at its path's end; then P of them per old row.
    ends = ends.to(y.device)
    return y[torch.arange(len(y), device=y.device), ends.flatten()].view(*ends.shape, *y.shape[2:])


def like(mask: Tensor, other: Tensor) -> Tensor:
    """Return the mask with dimensions of size 1 appended, so that it broadcasts to another tensor."""
    # [B, T] and [B, T, H, d] give [B, T, 1, 1]; broadcasting by itself would align the last dimensions.
    return mask.view(*mask.shape, *[1] * (other.ndim - mask.ndim))
