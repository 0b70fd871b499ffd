"""The frozen causal LM whose output distribution speculative decoding keeps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speculator.errors import UserError
from speculator.target.attention.attention import WINDOWS
from speculator.target.attention.tree import TokenTree
from speculator.target.cache.cross_memory import CrossMemory
from speculator.target.cache.kv_cache import KVCache, forms
from speculator.target.encoder import positions
from speculator.target.encoder.encoder import Text
from speculator.target.in_process import InProcessTarget
from speculator.target.probe import probe
from speculator.target.recurrent.layer import state_forms
from speculator.target.recurrent.recurrences import intercept
from speculator.target.sharding import DECODE_INSTEAD, is_sharded

if TYPE_CHECKING:
    from typing_extensions import Self

_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"}


class Target(InProcessTarget):
    """A target that can be decoded: an `InProcessTarget` with forward passes that write a KV cache it can roll back.

    The model's attention becomes `speculator.target.attention.attention`, which ignores padding. Run batches through
    this class.

    Args:
        model: a transformers causal LM whose layers are attention or recurrent, whole in this process.
        tokenizer: its tokenizer.

    Attributes:
        recurrent: some of its layers are recurrent, see `speculator.target.recurrent.layer`.
        capturable: its forward pass never waits for the device, so that CUDA graphs can replay it.
        cache_name: name of the cache among the arguments of its forward pass and in its output.

    Raises:
        UserError: the model can't be rolled back, or its logits through this class are not its own.
    """

    sharding: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        super().__init__(model, tokenizer)
        self._prepare()

    @classmethod
    def of(cls, half: InProcessTarget) -> Self:
        """Return a target that decodes the model of a training half, which stays usable if this raises."""
        target = super().of(half)
        target._prepare()
        return target

    def _prepare(self) -> None:
        """Change the model so that its passes write a `KVCache`, if that can be exact."""
        model = self.model
        if is_sharded(model):
            raise UserError(f"{self.name} is sharded over processes, for training only: {DECODE_INSTEAD}")
        # Known from the config, so the message can name the kind of layer; the probe would only see logits that differ.
        if foreign := set(getattr(self.config, "layer_types", None) or []) - _LAYER_TYPES:
            raise UserError(
                f"{self.name}: layers of kind {', '.join(sorted(foreign))} can't be rolled back after a rejected "
                "draft; full and sliding-window attention and recurrent layers can"
            )
        self.capturable = self.recurrent = False
        self._forms: dict[tuple[torch.dtype, torch.device], tuple[list, list, list]] = {}
        # transformers 5.24 calls it `cache`; before, models without attention had a name of their own.
        known = signature(self._body.forward).parameters
        self.cache_name = next((name for name in ("cache", "cache_params") if name in known), "past_key_values")
        intercept(model)
        self.count_by_row()
        probe(self)

    def count_by_row(self) -> None:
        """Let an encoder-decoder model's decoder count positions by row; `positions.remove` undoes it."""
        if self.encoder:
            positions.install(self._body, self.context_length, self.config.pad_token_id)

    def text(self, prompt: Sequence[int]) -> Text:
        """Return the tokens that a completion continues: the prompt, or the decoder's start if the encoder reads it."""
        if isinstance(prompt, Text):
            return prompt
        return Text(self.encoder.prefix, tuple(prompt)) if self.encoder else Text(prompt)

    def cache(self, rows: int, capacity: int) -> KVCache:
        """Create an empty KV cache of `rows` rows with `capacity` positions each."""
        form = (self.dtype, self.device)  # a model may be cast or moved after its load
        if form not in self._forms:
            tokens = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with torch.no_grad():
                given = {"encoder_hidden_states": self.encoder.dummy} if self.encoder else {}
                made = getattr(self._body(input_ids=tokens, use_cache=True, **given), self.cache_name)
                cross = forms(made.cross_attention_cache) if self.encoder else []
                made = made.self_attention_cache if self.encoder else made
                self._forms[form] = forms(made), [state_forms(layer) for layer in made.layers], cross
                self.recurrent = any(self._forms[form][1])
        attention, recurrent, cross = self._forms[form]
        memory = CrossMemory(self.encoder, cross, rows, self.device) if self.encoder else None
        return KVCache(attention, rows, capacity, self.device, recurrent, memory)

    def scratch_per_token(self, cache: KVCache, read: int) -> int:
        """Return bytes per token of a prefill pass for what grows with its tokens: masks and recurrences.

        `read` is the number of positions that attention reads per row. Scores that exist one block at a time, and what
        all layers need (some multiples of the hidden size), don't count.
        """
        size, heads = self.dtype.itemsize, getattr(self.config, "num_attention_heads", None) or 1
        # One mask per window, and one of a draft head, for the query heads of a key head each; see `mask`.
        masks = 1 + self._num_masks
        groups = -(-(heads if isinstance(heads, int) else max(heads)) // cache.key_heads)
        scan = 0
        for layer in cache.recurrent.values():
            if len(layer.states) > 1 and layer.states[1].ndim == 4:  # [B, heads, a, b]: scanned in chunks
                # Counted on the functions of transformers 5.23: 3.7 to 4 times this sum in float32 for Mamba 2 in
                # chunks of 256, and 3.3 times for the delta rule, whose chunks have 64 tokens.
                scan = max(scan, 4 * 4 * layer.states[1].shape[1] * (256 + sum(layer.states[1].shape[2:])))
        return max(1, scan + (read * (1 + size + masks * groups * size) if cache.stacks else 0))

    @cached_property
    def _num_masks(self) -> int:
        return len({WINDOWS[layer] for layer in self.model.modules() if layer in WINDOWS}) or 1

    @torch.no_grad()
    def extend(
        self,
        cache: KVCache,
        tokens: Tensor,  # [R, T]
        tree: TokenTree | None = None,
        base: int = 0,
        counts: Sequence[int] | None = None,
    ) -> Tensor:  # [R, T, D]
        """Write tokens after the selected rows of a cache and return their hidden states; `cache.commit` keeps them.

        Prefill and verification both use this. A draft may reach past the context's end: such tokens are never
        accepted, so their positions don't matter.

        Args:
            tree: a draft's structure; None for a chain. `tokens` are T consecutive tokens of the draft, from number
                `base` on (number 0 is the pending token, i + 1 is draft token i).
            base: tokens per row that earlier calls wrote and did not commit.
            counts: tokens of each row that will be committed: the others are padding. None if that is not known yet.
        """
        width = tokens.shape[1]
        if counts is not None:
            # Padding is on the right and never committed: the next pass overwrites its keys and values.
            tokens = nn.functional.pad(tokens, (0, max(0, min(cache.padded_width(width), cache.room) - width)))

        def own(states: Tensor) -> Tensor:  # -> [R, T, D], from rows as the model read them: packed or padded
            return write.padded(states)[:, :width]

        with cache.writing(tokens.shape[1], tree, base, counts) as write, self.aux_layers.selecting(own):
            # Clamped, because a table of positions (GPT-2) has no row after the context's end.
            positions = write.packed(write.positions.clamp(max=self.context_length - 1))
            given: Any = {"position_ids": positions, **cache.arguments(self.cache_name)}
            output = self._body(input_ids=write.packed(tokens), use_cache=True, **given)
            hidden = own(output.last_hidden_state)
        return hidden.to(self.device)  # the last layers may be on another device
