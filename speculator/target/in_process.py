"""The training half of a target in this process: hidden states and logits by the model's own code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_flash_attn_2_available

from speculator.device import resolve_device
from speculator.errors import UserError, refuse
from speculator.kernels.fused_norms import fuse_norms
from speculator.kernels.linear import HAS_ONEDNN, bfloat16_pays, pack_linears
from speculator.target.attention.attention import VARLEN, avoid_cudnn, original_attention, using_attention
from speculator.target.aux_layers import AuxLayers, without_output_layer
from speculator.target.base import TrainingTarget
from speculator.target.encoder.encoder import Encoder, StatesOnly
from speculator.target.fingerprint import digest_of_weights, fingerprint
from speculator.target.gguf.file import is_gguf
from speculator.target.loading import add_adapter, decoder_config, drop_vision_tower, read_target, warn_if_untied
from speculator.target.packed import (
    Layout,
    in_one_row,
    in_one_row_with_bounds,
    indices_by_document,
    masked,
    one_per_row,
    packed,
)
from speculator.target.probe import context_length, gap, not_finite, tolerance, what_now
from speculator.target.sharding import DECODE_INSTEAD, SHARDED, Group, make_whole, whole
from speculator.target.text import Source
from speculator.terminal import log

if TYPE_CHECKING:
    from typing_extensions import Self

PROBED = 16
"""Tokens of each of the probes' two texts."""


class _GivenHidden(nn.Module):
    """Stands in for a model's body, whose other attributes it has, and returns hidden states computed before."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.hidden: Tensor | None = None
        self._attribute_of_body = body.__getattribute__

    def __getattr__(self, name: str) -> Any:
        return self._attribute_of_body(name)

    def forward(self, *args, **kwargs) -> StatesOnly:
        return StatesOnly(last_hidden_state=self.hidden)


class ModelHere(TrainingTarget):
    """A training target whose transformers model is here, whole or, if servers run its layers, without them."""

    model: Any

    def _prepare_logits(self) -> None:
        """Find the model's body, which `logits` replaces; `output_matrix` is None until a probe has set it."""
        self.output_matrix = None
        model = self.model
        decoder = model.config.is_encoder_decoder
        self._body = model.get_decoder() if decoder else without_output_layer(model, model.base_model)
        path = next((name for name, part in model.named_modules() if part is self._body), "")
        where, _, name = path.rpartition(".")
        self._body_of: tuple[nn.Module, str] = model.get_submodule(where), name
        self._given = _GivenHidden(self._body)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def generation_config(self) -> GenerationConfig | None:
        return self.model.generation_config

    def embedding_matrix(self) -> Tensor:  # [V, D]
        model = self.model.get_decoder() if self.model.config.is_encoder_decoder else self.model
        return whole(model.get_input_embeddings().weight)

    def output_layer(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:  # [..., D] -> [..., V]
        """Compute the model's own logits of hidden states after the final norm.

        Without an `output_matrix`, the model's forward pass runs with its body replaced by the hidden states, which
        keeps logit scaling and soft-capping.
        """
        if self.output_matrix is not None:
            return self.output_matrix(hidden).to(hidden.device)
        # As one row of a batch, [1, all tokens, D]: a token's logits depend on its own state alone.
        self._given.hidden = hidden.reshape(1, -1, hidden.shape[-1])
        # The encoder's states are not read, because the decoder that would read them is replaced.
        given: Any = {"inputs_embeds": self._given.hidden}
        if self.model.config.is_encoder_decoder:
            given = {"decoder_inputs_embeds": self._given.hidden, "encoder_outputs": StatesOnly(self._given.hidden)}
        setattr(*self._body_of, self._given)
        try:
            logits = self.model(**given, use_cache=False).logits
        finally:
            setattr(*self._body_of, self._body)
        return logits.view(*hidden.shape[:-1], -1).to(hidden.device)


class InProcessTarget(ModelHere):
    """A causal LM whose hidden states this process computes, alone or with the other processes of a group.

    `hidden` is always the state after the final norm, [B, T, D]: the input of the lm_head. The model's own code
    computes everything, logit scaling and soft-capping included.

    The model is modified: it is frozen, in eval mode, and uses `speculator.kernels.linear` for few rows. If you change
    its weights, make another target of it.

    Args:
        model: a transformers causal LM.
        tokenizer: its tokenizer.
        group: the processes that share it; None if this process holds the whole model.

    Attributes:
        original_attention: the attention implementation that the model came with, for `set_attn_implementation`.
        document_attention: attention implementation and `Layout` that read several documents in a row exactly, as
            `hidden_of_documents` takes them; None if none does.
        aux_layers: the auxiliary hidden states between its layers.
        lock: held by whoever runs the model, which has hooks and replaced parts meanwhile.

    Raises:
        UserError: its logits are not those of its hidden states, or not finite.
    """

    sharding: ClassVar[bool] = True
    """Whether several processes may share one model of this class."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, group: Group | None = None):
        self.model, self.tokenizer, self.group = model.eval().requires_grad_(False), tokenizer, group
        self.config = decoder_config(model)
        self.name = model.config.name_or_path or type(model).__name__
        self.original_attention = original_attention(model)
        avoid_cudnn(self.device)
        if self.device.type == "cuda" and group is None:
            fuse_norms(self.model)
        self.context_length = context_length(self.config, self.name)
        if model.config.is_encoder_decoder:
            longest = context_length(model.get_encoder().config, self.name)
            self.encoder = Encoder(model, self.original_attention, self.name, longest)
        if group is not None and group.parallel == "tp":
            make_whole(model.get_output_embeddings())
        pack_linears(self.model)
        self.aux_layers, self.lock = AuxLayers(model), RLock()
        self.document_attention: tuple[Any, Layout] | None = None
        self._prepare_logits()
        self._probe()
        self.fingerprint = fingerprint(model)

    @torch.no_grad()
    def _probe(self) -> None:
        """Compare the logits of hidden states with the model's own, for a text alone and for documents of one row.

        Sets `document_attention` and `output_matrix`.

        Raises:
            UserError: the model's code needs more than hidden states for logits, or its logits differ or are not
                finite.
        """
        model, name, allowed = self.model, f"{self.name}: {type(self.model).__name__}", tolerance(self.model)
        try:
            texts, sources, inputs = self._probe_inputs()
            with using_attention(model, self.original_attention):
                own = self.aux_layers.prove(inputs).logits.float()
            hidden = self.hidden(texts, sources=sources)
            logits = self.logits(hidden)
            output = model.get_output_embeddings()
            if output is not None and torch.equal(output(hidden).to(logits.device), logits):
                self.output_matrix = output
            if not sources:
                self.document_attention = self._choose_document_attention(texts, allowed)
        except AttributeError as error:  # its forward pass takes its body apart, as OPT's does
            raise UserError(
                f"{name} is not supported: its code does not compute logits from hidden states alone{what_now(model)}"
            ) from error
        except (TypeError, RuntimeError, ValueError, IndexError) as error:
            raise UserError(f"{name} can't be run: {error}{what_now(model)}") from error
        worst = gap(logits.float(), own)
        refuse(
            (not own.isfinite().all(), not_finite(self)),
            (own.std() == 0, f"{self.name}: its logits are all the same: the weights are empty"),
            (
                not worst < allowed,
                f"{name} is not supported: the logits of its hidden states differ by {worst:.2g} standard "
                f"deviations{what_now(model)}",
            ),
        )

    def _probe_inputs(self) -> tuple[Tensor, list[Source], dict[str, Any]]:
        """Return the probe's two texts [2, PROBED], their sources, and both as arguments of the model's forward pass.

        With an encoder no token is the pad token, and the sources have unequal lengths, so that a visible pad would
        show; without one there are none.
        """
        texts = torch.arange(2 * PROBED, device=self.device).view(2, -1) * 7 % self.vocab_size
        if not self.encoder:
            return texts, [], {"input_ids": texts}
        if (pad := self.config.pad_token_id) is not None:  # which has no position in some families
            texts = (texts + (texts == pad)) % self.vocab_size
        sources = [tuple(row[:n]) for row, n in zip(texts.flip(1).tolist(), (PROBED // 2, 3), strict=True)]
        given = self.encoder.arguments(texts, sources)
        # Masks are given, because some families make theirs from pad tokens.
        masks = {"attention_mask": given["encoder_attention_mask"], "decoder_attention_mask": given["attention_mask"]}
        states = StatesOnly(given["encoder_hidden_states"])
        return texts, sources, {"encoder_outputs": states, "decoder_input_ids": texts, **masks}

    def _choose_document_attention(self, texts: Tensor, allowed: float) -> tuple[Any, Layout] | None:
        """Return the first (attention, layout) that reads several documents in a row as if each were alone, or None.

        `texts` [2, PROBED] are read as two documents per row. `allowed` is the largest `gap` between the logits and
        those of each document alone.
        """
        # Two documents of 8 tokens in a row of 16: their ids are False and True.
        half = PROBED // 2
        documents = torch.arange(PROBED, device=self.device).ge(half).expand_as(texts)
        alone = self.logits(self.hidden(texts.view(-1, half))).view(*texts.shape, -1).float()
        original = self.original_attention
        choices: list[tuple[Any, Layout]] = [(original, packed), (original, masked)]
        if "flash" in (original if isinstance(original, str) else original[""]):
            choices = [(original, in_one_row)]
        elif self.device.type == "cuda" and self.dtype.itemsize == 2:
            flash: list[tuple[Any, Layout]] = [(VARLEN, in_one_row_with_bounds)]
            choices[:0] = flash + [("flash_attention_2", in_one_row)] * is_flash_attn_2_available()
        if original == "eager" and self.device.type == "cuda":  # eager attention keeps the scores of all heads
            at = choices.index((original, packed))
            choices[at:at] = [("flex_attention", packed), ("flex_attention", masked)]
        choices.append((original, one_per_row))  # the slowest, for states that run through the row
        # The fastest first; a family that ignores the layout shows by its logits, one that lacks it by its error.
        for choice in choices:
            try:
                hidden = self.hidden_of_documents(texts, documents, *choice)
                if gap(self.logits(hidden).float(), alone) < allowed:
                    return choice
            except (ImportError, AttributeError, RuntimeError, TypeError, ValueError):  # not supported by this family
                continue
        return None

    def no_source(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return encoder states of zeros for a decoder's pass over tokens whose result does not matter, or {}."""
        return {"encoder_hidden_states": self.encoder.dummy.expand(*tokens.shape, -1)} if self.encoder else {}

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        adapter: str | Path | None = None,
        trust_remote_code: bool = False,
        parallel: str = "none",
        parallel_size: int = 0,
    ) -> Self:
        """Load a model and return it as a target; a quantised checkpoint needs the package that its config names.

        Args:
            name: hub id, local folder, or GGUF file, whose weights are dequantised.
            revision: hub branch, tag or commit.
            dtype: "auto" (the checkpoint's own; float32 on a CPU, and bfloat16 for a GGUF file elsewhere), "float32",
                "bfloat16" or "float16".
            device: default: the accelerator if there is one, else the CPU.
            adapter: hub id or folder of a PEFT adapter, which is not merged into the weights.
            trust_remote_code: run the Python code that comes with the model.
            parallel: "none"; "device_map", layer by layer over the devices of this process; or, for training only, "tp"
                or "fsdp", sharded over processes, all of which must call this (see `Group`).
            parallel_size: processes per copy of the model; 0: all.
        """
        name, adapter = str(name), None if adapter is None else str(adapter)
        refuse(
            (parallel in SHARDED and not cls.sharding, f"parallel {parallel} is for training only: {DECODE_INSTEAD}")
        )
        group = Group(parallel, parallel_size) if parallel in SHARDED else None
        refuse(
            (parallel_size and group is None, f"parallel_size {parallel_size} needs parallel tp or fsdp"),
            (group and adapter is not None, f"parallel {parallel}: merge the adapter into the weights first"),
            (group and is_gguf(name), f"parallel {parallel}: each process reads a GGUF file whole"),
        )
        resolved = resolve_device(device)
        if resolved.type == "cpu" and dtype == "auto":  # without bfloat16 units bfloat16 is slower
            dtype = "float32"
        elif dtype == "auto" and is_gguf(name):  # whose config has none, and float32 takes twice the memory
            dtype = "bfloat16"
        where: Any = "auto" if parallel == "device_map" else group or resolved
        # With oneDNN slow products go by way of float32. Without it, as on a Mac or another ARM, nothing widens them.
        if resolved.type == "cpu" and dtype == "bfloat16" and not HAS_ONEDNN and not bfloat16_pays():
            log("this processor multiplies bfloat16 slower than float32, which takes twice the memory")
        tokenizer, model = read_target(name, revision, dtype, where, trust_remote_code)
        warn_if_untied(model, name)
        if adapter is not None:
            add_adapter(model, adapter)
            own = Path(adapter) / "chat_template.jinja"
            if own.is_file() and own.read_text(encoding="utf-8") != tokenizer.chat_template:
                log(f"warning: chats have the template of {name}, not that of {adapter}, as merged weights would")
        drop_vision_tower(model)
        flags = {"revision": revision, "adapter": adapter}
        model.config.name_or_path = " ".join([name, *(f"--{flag} {value}" for flag, value in flags.items() if value)])
        target = InProcessTarget(model, tokenizer, group)
        if missing := target.eos_token_ids - target._configured_ends:
            names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(missing))))
            log(f"{target.name}: a text also ends at {names}, which its generation config lacks")
        return cls.of(target)

    @cached_property
    def digest(self) -> str | None:
        """Hash of all weights, which tells a fine-tune of the inner layers from its original; `fingerprint` does not.

        Of the files for a model that is sharded, quantised, or partly offloaded: what a process holds may differ by
        place.
        """
        quantised = getattr(self.model.config, "quantization_config", None)
        if self.group or quantised or any(weight.is_meta for weight in self.model.parameters()):
            return super().digest
        return digest_of_weights(self.model)

    @classmethod
    def of(cls, half: InProcessTarget) -> Self:
        """Return a target of this class that shares the model and all attributes of `half`; nothing is copied."""
        target = cls.__new__(cls)
        vars(target).update(vars(half))
        return target

    def check_aux_layers(self, wanted: Sequence[int]) -> None:
        self.aux_layers.check(wanted, self.name)

    def training_states(
        self,
        tokens: Tensor,
        documents: Tensor | None,
        aux_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:  # [B, S, D], [B, S, nD]
        with self.aux_layers.recorded(aux_layers) as states:
            hidden = self.hidden(tokens, documents)
        return hidden, states(hidden)

    @torch.no_grad()
    def hidden(
        self,
        tokens: Tensor,  # [B, S]
        documents: Tensor | None = None,  # [B, S] see `speculator.target.packed`
        sources: Sequence[Sequence[int]] = (),
    ) -> Tensor:  # [B, S, D]
        """Compute the hidden states of whole rows for training, without a cache and with the model's own attention.

        `documents` None: each row is one document. With an encoder, a row is one document of the decoder, and `sources`
        holds the encoder's token ids for each row. Raises a UserError if the model can't separate documents.
        """
        if self.encoder:
            given = self.encoder.arguments(tokens, sources)
            with using_attention(self.model, self.original_attention):
                return self._body(**given, use_cache=False).last_hidden_state
        if documents is None:
            return self.hidden_of_documents(tokens, torch.zeros_like(tokens), self.original_attention, packed)
        if self.document_attention is None:
            kind = type(self.model).__name__
            raise UserError(f"{self.name}: {kind} can't separate the documents of a row, so no head can be trained")
        return self.hidden_of_documents(tokens, documents, *self.document_attention)

    def hidden_of_documents(self, tokens: Tensor, documents: Tensor, attention: Any, layout: Layout) -> Tensor:
        """Compute hidden states [B, S, D] of documents [B, S] by an attention and its layout, see `packed.py`."""
        (rows, length), own_rows = tokens.shape, slice(None)
        if self.group is not None and self.group.parallel == "tp":  # all processes must run the same rows
            tokens, documents = self.group.gathered(tokens), self.group.gathered(documents)
            # Each process's rows, padded to the largest number: 2 processes with at most 3 rows have 0..2 and 3..5.
            begin = self.group.rank * (len(tokens) // self.group.size)
            own_rows = slice(begin, begin + rows)

        indices = indices_by_document(documents)[0] if layout is one_per_row else None

        # From the states in the layout's shape back to this process's rows: [B, S, D].
        def own(states: Tensor) -> Tensor:
            if indices is not None:
                states = states.reshape(-1, states.shape[-1])[indices]
            return states.view(*tokens.shape, -1)[own_rows, :length].contiguous().to(self.device)

        with using_attention(self.model, attention), self.aux_layers.selecting(own):
            output = self._body(**layout(self.model, tokens, documents), use_cache=False)
        return own(output.last_hidden_state)
