"""The target's residual stream between its layers, for heads that read it.

Tap k is the stream after k of the L layers, before any norm: what layer k reads, transformers' `hidden_states[k]`, for
0 <= k < L. Of a model that carries several streams (Gemma 3n) it is the active one, which attention reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from speculator.errors import refuse


class AuxLayers:
    """A model's taps, read by hooks on its layers while it runs: no other state is held.

    Attributes:
        layers: the decoder's; none where they are not found, or where `prove` saw another thing than their states.
    """

    def __init__(self, model: PreTrainedModel):
        self._model, self._decoder = model, model.get_decoder()
        found = {name: getattr(self._decoder, name, None) for name in ("layers", "h")}
        lists = {name: each for name, each in found.items() if isinstance(each, nn.ModuleList)}
        self._name, self.layers = next(iter(lists.items()), ("", nn.ModuleList()))
        self._stream = getattr(model.config.get_text_config(), "altup_active_idx", None)
        self._mine: Callable[[Tensor], Tensor] = lambda states: states

    @contextmanager
    def recorded(
        self,
        wanted: Sequence[int],  # ascending
    ) -> Iterator[Callable[[Tensor], Tensor]]:  # [..., D] -> [..., nD], or as it is
        """Record these taps of the forward pass that is made inside.

        Gives a function from the pass's last hidden state to what a head of these taps reads: the taps, side by side,
        or, where none is wanted, that state. L asks for that state beside the taps.
        """
        seen: dict[int, Tensor] = {}

        def hook(k: int) -> Callable[..., None]:
            def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[k] = self._mine(self._own(args[0] if args else kwargs["hidden_states"]))

            return note

        count = len(self.layers)
        with ExitStack() as hooks:
            for k in wanted:
                if k == count:
                    continue
                handle = self.layers[k].register_forward_pre_hook(hook(k), with_kwargs=True)
                hooks.callback(handle.remove)

            def read(last: Tensor) -> Tensor:
                # A pass may have read all rows as one.
                parts = [last if k == count else seen[k].to(last.device).view(last.shape) for k in wanted]
                return torch.cat(parts, -1) if parts else last

            yield read

    @contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        """Inside, the model has only so many layers: its final norm reads tap `count`."""
        setattr(self._decoder, self._name, self.layers[:count])
        try:
            yield
        finally:
            setattr(self._decoder, self._name, self.layers)

    @contextmanager
    def of(self, mine: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside, passes hold the rows of the whole group: keep of every tap what `mine` selects."""
        before, self._mine = self._mine, mine
        try:
            yield
        finally:
            self._mine = before

    def _own(self, states: Tensor) -> Tensor:
        return states if self._stream is None or states.ndim == 3 else states[self._stream]

    def prove(self, tokens: Tensor) -> Any:
        """A pass of the model, with every tap compared with transformers' `hidden_states`: gives the model's output.

        Unless all are the same to the bit, the model has no taps.
        """
        with _unhooked(self._model), self.recorded(range(len(self.layers))) as read:
            output = self._model(tokens, use_cache=False, output_hidden_states=True)
        own = [self._own(state).to(tokens.device) for state in output.hidden_states or ()][:-1]
        try:
            same = len(own) == len(self.layers) > 0 and torch.equal(read(own[0]), torch.cat(own, -1))
        except KeyError:  # a layer that does not run
            same = False
        if not same:
            self.layers = nn.ModuleList()
        return output

    def check(self, wanted: Sequence[int], name: str) -> None:
        """Refuse taps that the target of this name has not.

        Raises:
            UserError: one of them is of no layer of the target, or the target's taps can't be read at all.
        """
        count, listed = len(self.layers), " ".join(map(str, wanted))
        refuse(
            (
                bool(wanted) and not count,
                f"{name}: what its layers read is not what transformers reports as their hidden states: only heads "
                "that read the last state, such as mlp and lstm, fit it",
            ),
            (
                any(not 0 <= k < count for k in wanted),
                f"taps {listed}: {name} has {count} layers, so taps 0 to {count - 1}",
            ),
        )


@contextmanager
def _unhooked(model: nn.Module) -> Iterator[None]:
    """Take off the hooks that transformers puts on all layers when it is first asked for hidden states, for good."""
    flag = "_output_capturing_hooks_installed"
    before = {module: (set(module._forward_hooks), flag in vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, (hooks, flagged) in before.items():
            for key in set(module._forward_hooks) - hooks:
                del module._forward_hooks[key]
            if not flagged and flag in vars(module):
                delattr(module, flag)
