"""The frozen causal LM whose output distribution speculative decoding keeps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from inspect import signature
from math import isnan
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding, DynamicCache, EncoderDecoderCache, PreTrainedModel, PreTrainedTokenizerBase

from speculator.errors import UserError, refuse
from speculator.kernels.host_sync import has_host_sync
from speculator.target.attention.attention import ATTENTION, WINDOWS, set_attention, using_attention
from speculator.target.attention.tree import TokenTree
from speculator.target.cache.cross_memory import CrossMemory
from speculator.target.cache.kv_cache import KVCache, forms
from speculator.target.encoder import positions
from speculator.target.in_process import PROBED, InProcessTarget
from speculator.target.probe import FAR, gap, has_window, not_finite, read_windows, tolerance, what_now
from speculator.target.recurrent.layer import state_forms
from speculator.target.recurrent.recurrences import intercept
from speculator.target.sharding import DECODE_INSTEAD, is_sharded
from speculator.target.text import Text

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
        self._probe_decoding()

    @torch.no_grad()
    def _probe_decoding(self) -> None:
        """Compare prefill, a rejected draft and verification of two unequal texts with the model's own logits.

        Sets `capturable`. So short a probe can't show sliding windows and rotary factors that follow the longest text
        of a batch, so these are examined separately.

        Raises:
            UserError: the model can't be run through a KV cache, its logits differ, or autocast is on.
        """
        model, device, name = self.model, self.device, f"{self.name}: {type(self.model).__name__}"
        cast = torch.is_autocast_enabled(device.type)
        refuse((cast, f"{name}: under torch.autocast its products are not those of its dtype: decode outside of it"))
        lengths, accepted = torch.tensor([[8, 4], [1, 2]], device=device)
        longest, allowed = PROBED // 2, tolerance(model)

        def after(begins: Tensor, width: int, rows: Tensor) -> Tensor:  # [2, PROBED, ...] -> [2, width, ...]
            return torch.stack([row[n : n + width] for row, n in zip(rows, begins.tolist(), strict=True)])

        try:
            # The reference: the model's own forward pass, with its own attention and without our cache, once.
            texts, sources, inputs = self._probe_inputs()
            with using_attention(model, self.original_attention):
                own = model(**inputs, use_cache=False).logits.float()
            windows = read_windows(
                model,
                self.context_length,
                lambda tokens: self._body(input_ids=tokens, use_cache=False, **self.no_source(tokens)),
            )
            WINDOWS.update(windows)
            set_attention(model, ATTENTION)
            # Two rows of unequal length, 8 and 4 tokens, so that a row's padding or its neighbour's cache would show.
            cache = self.cache(2, 2 * PROBED)
            cache.read_sources([Text((), source) for source in sources])
            hidden = self.extend(cache, texts[:, :longest], counts=lengths.tolist())
            cache.commit(lengths)
            prefill = self.logits(hidden).float()
            cache.select(0, 2, longest)
            # A draft of 4 tokens, of which row 0 gets 1 right and row 1 gets 2. Its wrong tokens are the true ones
            # plus 1.
            wrong = torch.arange(4, device=device) >= accepted[:, None]
            self.extend(cache, (after(lengths, 4, texts) + wrong) % self.vocab_size)
            cache.commit(accepted)  # the rest of the draft is rejected
            cache.select(0, 2, longest + 1)
            # The rows have 9 and 6 tokens now. If the rejected tokens' keys were still visible, these logits would show
            # it.
            begins = lengths + accepted
            single = self.logits(self.extend(cache, after(begins, 1, texts))).float()
            rest = after(begins, PROBED - longest - 1, texts)
            verified = self.logits(self.extend(cache, rest)).float()
            cache.bucket = (
                2  # as where steps are captured: with 1 the host reads the lengths, to group the rows by them
            )
            syncs = has_host_sync(lambda: self.logits(self.extend(cache, rest)), device)
            one_device = len({weight.device for weight in model.parameters()}) == 1
            # What an encoder makes of a source goes into buffers that grow with the longest one.
            self.capturable = not syncs and one_device and not sources
            in_tree = self._in_tree(cache, after(begins, 3, texts)) if sources else None
            # What 16 tokens can't show is examined apart: rotary factors that depend on the longest text of the batch.
            moved = self._neighbours_matter()
        except (AttributeError, TypeError, RuntimeError, ValueError, IndexError) as error:
            raise UserError(f"{name} can't be run through a KV cache: {error}{what_now(model)}") from error
        rows = zip(("longer", "shorter"), prefill, own, lengths.tolist(), strict=True)
        passes = {f"the prefill of the {which} row": gap(row[:n], given[:n]) for which, row, given, n in rows}
        passes["the token after a rejected draft"] = gap(single, after(begins, 1, own))
        passes["the verification"] = gap(verified, after(begins, rest.shape[1], own))
        if in_tree is not None:
            passes["the tree"] = gap(in_tree, after(begins, 3, own))
        first = next((each for each, size in passes.items() if not size < allowed), "")
        inexact = f"{name} can't be verified exactly"
        window = getattr(self.config, "sliding_window", None)
        refuse(
            (isnan(moved), not_finite(self)),
            (
                first,
                f"{inexact}: its logits with a preallocated cache differ by {max(passes.values()):.2g} standard "
                f"deviations, first in {first}{what_now(model)}",
            ),
            (
                not moved < allowed,
                f"{inexact}: its logits for a text depend on how long the batch's other texts are",
            ),
            (
                has_window(self.config, self.context_length) and not any(windows.values()),
                f"{inexact}: none of its attention masks has its sliding window of {window} tokens",
            ),
        )

    def _in_tree(self, cache: KVCache, tokens: Tensor) -> Tensor:  # [2, 3] -> [2, 3, V]
        """Return the logits of three tokens per row, with a wrong sibling of the second, which none of them may see."""
        # Verify positions: 0 pending, 1 wrong, 2 right, 3 last. Tokens 0 and 1 hang on the pending one, and token 2 on
        # token 1, the right one; a token that sees the wrong one, or counts positions along the cache, gets other
        # logits.
        tree = TokenTree()
        pending, right, last = tokens.split(1, 1)
        tree.tokens, tree.depth = torch.cat([(right + 1) % self.vocab_size, right, last], 1), 2
        tree.parents = torch.tensor([[-1, -1, 1]] * 2, device=tokens.device)
        logits = self.logits(self.extend(cache, torch.cat([pending, tree.tokens], 1), tree))
        return logits[:, [0, 2, 3]].float()

    def _neighbours_matter(self) -> float:
        """Return how far a row's hidden states move, in standard deviations, when another is at the context's end.

        Rotary factors that follow the longest text of a batch move them. The text is short: only its positions are far.
        """
        near = torch.arange(4, device=self.device).expand(2, -1)
        far = torch.stack([near[0], near[0] + min(self.context_length, FAR) - 4])
        # Row 0 is the same in both batches. Row 1 moves to the context's end, which may switch longrope's factors for
        # both.
        given = {"input_ids": near, "use_cache": False, **self.no_source(near)}
        alone, batched = (self._body(**given, position_ids=at).last_hidden_state[0] for at in (near, far))
        return ((alone - batched).abs().max() / alone.std()).item()

    def count_by_row(self) -> None:
        """Let an encoder-decoder model's decoder count positions by row; `positions.remove` undoes it."""
        if self.encoder:
            positions.install(self._body, self.context_length, self.config.pad_token_id)

    def text(self, prompt: Sequence[int]) -> Text:
        """Return the tokens that a completion continues: the prompt, or the decoder's start if the encoder reads it."""
        if isinstance(prompt, Text):
            return prompt
        return Text(prompt) if self.continues else Text(self.start, tuple(prompt))

    def cache(self, rows: int, capacity: int) -> KVCache:
        """Create an empty KV cache of `rows` rows with `capacity` positions each."""
        form = (self.dtype, self.device)  # a model may be cast or moved after its load
        if form not in self._forms:
            tokens = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with torch.no_grad():
                given = {"use_cache": True, **self.no_source(tokens)}
                made, cross = getattr(self._body(input_ids=tokens, **given), self.cache_name), []
                if self.encoder:
                    made, cross = made.self_attention_cache, forms(made.cross_attention_cache)
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

    def limit(self, most: int) -> None:
        """Limit a prompt with its answer, and a source, to `most` tokens."""
        self.context_length = most
        if self.encoder:
            self.encoder.longest = min(self.encoder.longest, most)

    def generate_inputs(self, prompts: Sequence[Sequence[int]]) -> BatchEncoding:
        """Return prompts, padded with token 0, as transformers' `generate` takes them."""
        rows = [torch.tensor(prompt, device=self.device) for prompt in prompts]
        # On the left, as transformers wants it: all rows then sample at the last column. Encoders sample nothing.
        pad = partial(pad_sequence, batch_first=True, padding_side="left" if self.continues else "right")
        given = BatchEncoding({"input_ids": pad(rows), "attention_mask": pad([torch.ones_like(row) for row in rows])})
        if not self.continues:
            given["decoder_input_ids"] = torch.tensor([self.start] * len(rows), device=self.device)
            given["decoder_start_token_id"] = self.start[0]
            # Left to itself, it makes a cache with as many layers as T5's encoder has.
            given["past_key_values"] = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache())
        return given

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
            given: Any = {"position_ids": positions, **cache.cross.arguments(self.cache_name, cache)}
            output = self._body(input_ids=write.packed(tokens), use_cache=True, **given)
            hidden = own(output.last_hidden_state)
        return hidden.to(self.device)  # the last layers may be on another device
