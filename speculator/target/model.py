"""The frozen causal LM whose output distribution speculative decoding keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from speculator.chat import end_token
from speculator.device import resolve_device
from speculator.errors import UserError, refuse
from speculator.target import compiled
from speculator.target.attention import original_attention, using_attention
from speculator.target.aux_layers import AuxLayers
from speculator.target.fingerprint import fingerprint
from speculator.target.gguf import is_gguf
from speculator.target.kv_cache import Form, KVCache, forms
from speculator.target.linear import pack_linears
from speculator.target.loading import add_adapter, drop_vision_tower, read_target
from speculator.target.packed import Layout, one_per_row, packed, places
from speculator.target.probe import context_length, probe
from speculator.target.recurrences import intercept
from speculator.target.recurrent import StateForm, state_forms
from speculator.target.sharding import Group, make_whole
from speculator.target.tree import TokenTree
from speculator.terminal import log

_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"}


@dataclass
class _BodyOutput(ModelOutput):
    """Output of `_GivenHidden`; every other field that a family's forward pass reads is None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        return None


class _GivenHidden(nn.Module):
    """Stands in for a model's body, whose other attributes it has, and returns hidden states computed before."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.hidden: Tensor | None = None
        self._attribute_of_body = body.__getattribute__

    def __getattr__(self, name: str) -> Any:
        return self._attribute_of_body(name)

    def forward(self, *args, **kwargs) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=self.hidden)


class Target:
    """A causal LM with the calls that drafting and training need.

    `hidden` is always the state after the final norm, [B, T, D]: the input of the lm_head. The model's own code
    computes everything, logit scaling and soft-capping included.

    The model is modified: it is frozen, in eval mode, and uses `speculator.target.linear` for few rows and
    `speculator.target.attention`, which ignores padding. Run batches through this class.

    Args:
        model: a transformers causal LM whose layers are attention.
        tokenizer: its tokenizer.
        group: the processes that share it; None if this process holds the whole model.

    Attributes:
        original_attention: the model's attention implementation before, for `set_attn_implementation`.
        fingerprint: see `speculator.target.fingerprint`.
        document_attention: attention and layout that read several documents in a row exactly; None if none does.
        aux_layers: the auxiliary hidden states between its layers.
        context_length: longest sequence that it decodes exactly.
        output_matrix: the lm_head, if it alone gives the logits, bit for bit; else None.
        recurrent: some of its layers are recurrent, see `speculator.target.recurrent`.
        capturable: its forward pass never waits for the device, so that CUDA graphs can replay it.
        cache_name: what its forward pass and its output call the cache.

    Raises:
        UserError: the model's layers are not attention, or its logits through this class are not its own.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, group: Group | None = None):
        self.model, self.tokenizer, self.group = model.eval().requires_grad_(False), tokenizer, group
        self.config = model.config.get_text_config()
        self.name = model.config.name_or_path or type(model).__name__
        # Known from the config, so the message can name the kind of layer; the probe would only see logits that differ.
        if foreign := set(getattr(self.config, "layer_types", None) or []) - _LAYER_TYPES:
            raise UserError(
                f"{self.name}: layers of kind {', '.join(sorted(foreign))} can't be rolled back after a rejected "
                "draft; full and sliding-window attention and recurrent layers can"
            )
        self.original_attention = original_attention(model)
        if self.device.type == "cuda":
            # From torch 2.11 on, cuDNN comes first for masks in bfloat16. It builds a plan of 20 to 50 ms for every new
            # shape and keeps it for ever, and on B200 it changes texts of models with few key heads (pytorch#193893).
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.context_length = context_length(self.config, self.name)
        if group is not None and group.parallel == "tp":
            make_whole(model.get_output_embeddings())
        pack_linears(self.model)
        self.aux_layers = AuxLayers(model)
        self.output_matrix: nn.Module | None = None
        self.document_attention: tuple[Any, Layout] | None = None
        self.capturable = self.recurrent = False
        self._body, self._given = model.base_model, _GivenHidden(model.base_model)
        self._forms: dict[tuple[torch.dtype, torch.device], tuple[list[tuple[Form, ...]], list[tuple[StateForm, ...]]]]
        self._forms = {}
        # transformers 5.24 calls it `cache`; before, models without attention had a name of their own.
        known = signature(self._body.forward).parameters
        self.cache_name = next((name for name in ("cache", "cache_params") if name in known), "past_key_values")
        intercept(model)
        probe(self)
        self.fingerprint = fingerprint(model)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        adapter: str | None = None,
        trust_remote_code: bool = False,
        parallel: str = "none",
        parallel_size: int = 0,
    ) -> Target:
        """Load a model; a quantised checkpoint needs the package that its config names.

        Args:
            name: hub id, local folder, or GGUF file, whose weights are dequantised.
            revision: hub branch, tag or commit.
            dtype: "auto" (the checkpoint's own; float32 on a CPU), "float32", "bfloat16" or "float16".
            device: default: the accelerator if there is one, else the CPU.
            adapter: hub id or folder of a PEFT adapter, which is not merged into the weights.
            trust_remote_code: run the Python code that comes with the model.
            parallel: "none"; "tp" or "fsdp", sharded over processes, all of which must call this (see `Group`); or
                "device_map", layer by layer over the devices of this process.
            parallel_size: processes per copy of the model; 0: all.
        """
        group = Group(parallel, parallel_size) if parallel in ("tp", "fsdp") else None
        refuse(
            (parallel_size and group is None, f"parallel_size {parallel_size} needs parallel tp or fsdp"),
            (group and adapter is not None, f"parallel {parallel}: merge the adapter into the weights first"),
            (group and is_gguf(name), f"parallel {parallel}: each process reads a GGUF file whole"),
        )
        place = resolve_device(device)
        if dtype == "auto" and place.type == "cpu":  # without bfloat16 units bfloat16 is slower than float32
            dtype = "float32"
        where: Any = "auto" if parallel == "device_map" else group or place
        tokenizer, model = read_target(name, revision, dtype, where, trust_remote_code)
        if adapter is not None:
            add_adapter(model, adapter)
        drop_vision_tower(model)
        flags = {"revision": revision, "adapter": adapter}
        model.config.name_or_path = " ".join([name, *(f"--{flag} {value}" for flag, value in flags.items() if value)])
        target = cls(model, tokenizer, group)
        if missing := target.eos_token_ids - target._configured_ends:
            names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(missing))))
            log(f"{target.name}: a text also ends at {names}, which its generation config lacks")
        if target.device.type in compiled.DEVICES and compiled.can_compile(target.device) and group is None:
            compiled.compile_regions(target)
        return target

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """V, the number of rows of the output matrix; the tokenizer may use fewer."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """D, the size of the hidden states."""
        return self.config.hidden_size

    @property
    def eos_token_ids(self) -> set[int]:
        """Tokens that end a generation, by generation config, tokenizer and chat template.

        Fine-tunes often keep the base model's generation config, whose EOS they never write.
        """
        return self._configured_ends | self._written_ends

    @property
    def _configured_ends(self) -> set[int]:
        ids = self.model.generation_config.eos_token_id
        return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}

    @cached_property
    def _written_ends(self) -> set[int]:
        if self.tokenizer is None:
            return set()
        ends = {self.tokenizer.eos_token_id, end_token(self.tokenizer)} - {None}
        return {token for token in ends if token < self.vocab_size}

    def cache(self, rows: int, capacity: int) -> KVCache:
        """Create an empty KV cache of `rows` rows with `capacity` positions each."""
        form = (self.dtype, self.device)  # a model may be cast or moved after its load
        if form not in self._forms:
            tokens = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with torch.no_grad():
                made = getattr(self._body(input_ids=tokens, use_cache=True), self.cache_name)
                self._forms[form] = forms(made), [state_forms(layer) for layer in made.layers]
                self.recurrent = any(self._forms[form][1])
        attention, recurrent = self._forms[form]
        return KVCache(attention, rows, capacity, self.device, recurrent)

    @torch.no_grad()
    def hidden(
        self,
        tokens: Tensor,  # [B, S]
        documents: Tensor | None = None,  # [B, S] see `speculator.target.packed`
    ) -> Tensor:  # [B, S, D]
        """Compute the hidden states of whole rows for training, without a cache and with the model's own attention."""
        if documents is None:
            return self.hidden_of_documents(tokens, torch.zeros_like(tokens), self.original_attention, packed)
        if self.document_attention is None:
            kind = type(self.model).__name__
            raise UserError(f"{self.name}: {kind} can't separate the documents of a row, so no head can be trained")
        return self.hidden_of_documents(tokens, documents, *self.document_attention)

    def hidden_of_documents(self, tokens: Tensor, documents: Tensor, attention: Any, layout: Layout) -> Tensor:
        """Compute hidden states [B, S, D] with the given attention and layout of documents."""
        (rows, length), own_rows = tokens.shape, slice(None)
        if self.group is not None and self.group.parallel == "tp":  # all processes must run the same rows
            tokens, documents = self.group.gathered(tokens), self.group.gathered(documents)
            begin = self.group.rank * (len(tokens) // self.group.size)
            own_rows = slice(begin, begin + rows)

        place = places(documents)[0] if layout is one_per_row else None

        def own(states: Tensor) -> Tensor:
            if place is not None:
                states = states.reshape(-1, states.shape[-1])[place]
            return states.view(*tokens.shape, -1)[own_rows, :length].contiguous().to(self.device)

        with using_attention(self.model, attention), self.aux_layers.selecting(own):
            output = self._body(**layout(self.model, tokens, documents), use_cache=False)
        return own(output.last_hidden_state)

    @torch.no_grad()
    def extend(
        self,
        cache: KVCache,
        tokens: Tensor,  # [R, T]
        tree: TokenTree | None = None,
        base: int = 0,
        counts: Sequence[int] | None = None,
    ) -> Tensor:  # [R, T, D]
        """Append tokens to the selected rows of a cache and return their hidden states; `cache.commit` keeps them.

        Prefill and verification both use this. A draft may reach past the context's end: such tokens are never
        accepted, so their positions don't matter.

        Args:
            tree: structure of the tokens, which are its verify positions from `base` on; None for a chain.
            base: positions that earlier calls wrote and did not commit.
            counts: tokens of each row that will be committed, if known: the others are padding.
        """
        width = tokens.shape[1]
        if counts is not None:
            # Padding is on the right and never committed: the next pass overwrites its keys and values.
            tokens = nn.functional.pad(tokens, (0, cache.padded_width(width) - width))

        def own(states: Tensor) -> Tensor:
            return write.padded(states)[:, :width]

        with cache.writing(tokens.shape[1], tree, base, counts) as write, self.aux_layers.selecting(own):
            # Clamped, because a table of positions (GPT-2) has no row after the context's end.
            positions = write.packed(write.positions.clamp(max=self.context_length - 1))
            given: Any = {"position_ids": positions, self.cache_name: cache}
            output = self._body(input_ids=write.packed(tokens), use_cache=True, **given)
            hidden = own(output.last_hidden_state)
        return hidden.to(self.device)  # the last layers may be on another device

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:  # [..., D] -> [..., V]
        """Compute the model's own logits of hidden states.

        Without an `output_matrix`, the model's forward pass runs with its body replaced by the hidden states, which
        keeps logit scaling and soft-capping.
        """
        if self.output_matrix is not None:
            return self.output_matrix(hidden).to(hidden.device)
        # As one row of a batch: a token's logits depend on its own state alone.
        self._given.hidden = hidden.reshape(1, -1, hidden.shape[-1])
        prefix = self.model.base_model_prefix
        setattr(self.model, prefix, self._given)
        try:
            logits = self.model(inputs_embeds=self._given.hidden, use_cache=False).logits
        finally:
            setattr(self.model, prefix, self._body)
        return logits.view(*hidden.shape[:-1], -1).to(hidden.device)
