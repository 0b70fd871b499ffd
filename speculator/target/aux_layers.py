"""Auxiliary hidden states: the target's residual stream between its layers, for heads that read it.

Auxiliary hidden state k is the stream after k of the L layers, before any norm: the input of layer k, transformers'
`hidden_states[k]`, for 0 <= k < L. A model with several streams (Gemma 3n) gives the active one, which attention reads.
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
    """Reads auxiliary hidden states through hooks during a forward pass of `model`.

    Attributes:
        layers: the decoder's layers; empty if not found, or if `prove` found that the hooks read something else.
    """

    def __init__(self, model: PreTrainedModel):
        self._model, self._decoder = model, without_output_layer(model, model.get_decoder())
        found = {name: getattr(self._decoder, name, None) for name in ("layers", "h", "block")}
        lists = {name: each for name, each in found.items() if isinstance(each, nn.ModuleList)}
        self._name, self.layers = next(iter(lists.items()), ("", nn.ModuleList()))
        self._stream = getattr(model.config.get_text_config(), "altup_active_idx", None)
        self._selection: Callable[[Tensor], Tensor] = lambda states: states

    @contextmanager
    def recorded(
        self,
        wanted: Sequence[int],  # ascending
    ) -> Iterator[Callable[[Tensor], Tensor]]:  # [..., D] -> [..., nD], or unchanged
        """Record the auxiliary hidden states `wanted` of the forward pass inside the block.

        Yields a function from the pass's last hidden state [..., D] to the n wanted states, concatenated to [..., nD].
        In `wanted` the number of layers stands for the last hidden state. If `wanted` is empty, that is the result.
        """
        seen: dict[int, Tensor] = {}

        def hook(k: int) -> Callable[..., None]:
            def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[k] = self._selection(self._active(args[0] if args else kwargs["hidden_states"]))

            return record

        count = len(self.layers)
        with ExitStack() as hooks:
            for k in wanted:
                if k != count:
                    handle = self.layers[k].register_forward_pre_hook(hook(k), with_kwargs=True)
                    hooks.callback(handle.remove)

            def read(last: Tensor) -> Tensor:
                # A layout of documents may have flattened the rows.
                parts = [last if k == count else seen[k].to(last.device).view(last.shape) for k in wanted]
                return torch.cat(parts, -1) if parts else last

            yield read

    @contextmanager
    def selecting(self, selection: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Apply a function to each layer's states recorded inside the block, such as one that undoes a packing."""
        before, self._selection = self._selection, selection
        try:
            yield
        finally:
            self._selection = before

    def _active(self, states: Tensor) -> Tensor:  # [B, S, D] or [streams, B, S, D] -> [B, S, D]
        """Return the stream that attention reads, in a model with several (Gemma 3n); else the states as they are."""
        return states if self._stream is None or states.ndim == 3 else states[self._stream]

    def prove(self, given: dict[str, Any]) -> Any:
        """Return the model's output; empty `layers` if the hooks read other states than its `hidden_states`."""
        with _without_new_hooks(self._model), self.recorded(range(len(self.layers))) as read:
            output = self._model(**given, use_cache=False, output_hidden_states=True)
        states = output.get("decoder_hidden_states") or output.hidden_states or ()
        # Without the last entry: transformers reports it after the final norm, and no layer reads it.
        expected = [self._active(state).to(output.logits.device) for state in states][:-1]
        try:
            same = len(expected) == len(self.layers) > 0 and torch.equal(read(expected[0]), torch.cat(expected, -1))
        except KeyError:  # a layer did not run
            same = False
        if not same:
            self.layers = nn.ModuleList()
        return output

    def check(self, wanted: Sequence[int], name: str) -> None:
        """Raise a UserError if hooks can't read this target's layers, or if it lacks one of the auxiliary layers."""
        why = f"{name}: its layers' inputs are not the hidden states that transformers reports"
        use = "use a head that reads the last hidden state, such as mlp"
        refuse((bool(wanted) and not self.layers, f"{why}; {use}"))
        check_layers(wanted, len(self.layers), name)


def check_layers(wanted: Sequence[int], count: int, name: str) -> None:
    """Raise a UserError unless all wanted layers are below `count`, the number of layers of the target `name`."""
    listed = " ".join(map(str, wanted))
    too_far = f"aux_layers {listed}: {name} has {count} layers, so use 0 to {count - 1}"
    refuse((any(not 0 <= k < count for k in wanted), too_far))


def without_output_layer(model: PreTrainedModel, part: nn.Module) -> nn.Module:
    """Return the part; if transformers gave the whole model as that part (Llama 4), its body without the lm_head."""
    bodies = (child for child in model.children() if isinstance(child, PreTrainedModel))
    return next(bodies, part) if part is model else part


@contextmanager
def _without_new_hooks(model: nn.Module) -> Iterator[None]:
    """Remove, after the block, the hooks that transformers adds to layers when hidden states are first requested."""
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
