"""A frozen causal LM, seen through the few calls that drafting and training need.

Longer than other files: every call that reaches the model is here, training's and decoding's, with its checks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput, is_flash_attn_2_available

from speculator.device import resolve_device
from speculator.errors import UserError, refuse
from speculator.target.attention import ATTENTION, WINDOWS, attending, own_attention
from speculator.target.aux_layers import AuxLayers
from speculator.target.gguf import is_gguf
from speculator.target.host_sync import has_host_sync
from speculator.target.kv_cache import Form, KVCache, forms
from speculator.target.linear import pack_linears
from speculator.target.loading import add_adapter, read_target
from speculator.target.packed import Layout, in_one_row, masked, packed
from speculator.target.probe import neighbours_matter, original_context, read_windows
from speculator.target.sharding import Group, make_whole, whole
from speculator.target.tree import TokenTree

_log = logging.getLogger(__name__)
_SAMPLES = 8  # of each table's weights in a fingerprint
_PROBE_LENGTH = 16
# Of the logits' standard deviation, by `_gap`: rounding stays below (30 layers in bfloat16: 0.1), a wrong mask or
# position does not (1 and more).
_PROBE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}


@dataclass
class _BodyOutput(ModelOutput):
    """What some family's head reads of its body's output; all but the hidden states are absent."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None
    shared_kv_states: None = None


class _Probe(NamedTuple):
    """What a model did in the probe at load."""

    logits: Tensor  # its own
    gap: float  # the most by which those through `Target` differ from them
    moved: float  # the most by which a longer text beside it changes one
    windowed: bool  # some layer's masks have a window


class _Given(nn.Module):
    """Stands in for a model's body: returns hidden states that were computed before."""

    def __init__(self):
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *args, **kwargs) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=self.hidden)


class Target:
    """The model whose output distribution speculation keeps.

    `hidden` is always the state after the final norm, [B, T, D]: what the lm_head reads. The model's own code
    does all the maths, logit scaling and soft-capping included; nothing of it is copied here.

    Args:
        model: a transformers causal LM whose layers are attention.
        tokenizer: its tokenizer.
        group: the processes that hold it together; None: it is whole in this one.

    The model is modified: it is frozen, in eval mode, and multiplies matrices fast for few rows
    (`speculator.target.linear`). It attends through `speculator.target.attention`, which ignores padding. Run batches
    through this class.

    Attributes:
        original_attention: what the model attended through before, as `set_attn_implementation` takes it.
        fingerprint: what tells this target from others of its sizes: facts of its config and a few of its weights, in
            bfloat16; of an adapter a few as well. Neither path, dtype, device nor the library's version is in it; see
            `same_target`.
        document_attention: what it reads rows of several documents through, and how they are given to it, seen to be
            exact in a probe at load; None where nothing was.
        taps: the residual stream between its layers, for heads that read it.
        context_length: the longest sequence that the model has positions for; with longrope its original context, as
            beyond it the factors of all positions follow the longest text of a batch.
        capturable: whether its forward pass asks the device nothing, seen in a probe at load. If so, it may be captured
            as a CUDA graph (mixtures of experts that route through the host, for one, may not).

    Raises:
        UserError: the model's layers are not attention, or its logits through this class are not its own.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, group: Group | None = None):
        self.model, self.group = model.eval().requires_grad_(False), group
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.name = model.config.name_or_path or type(model).__name__
        self.original_attention = own_attention(model)
        self.context_length = self._context()
        _ = self.eos_token_ids  # refused now rather than at the first text's end
        if group is not None and group.parallel == "tp":
            make_whole(model.get_output_embeddings())
        pack_linears(self.model)
        self._body, self._given = model.base_model, _Given()
        self.aux_layers = AuxLayers(model)
        self._output: nn.Module | None = None
        self.document_attention: tuple[Any, Layout] | None = None
        self.capturable = False
        self._forms: dict[tuple[torch.dtype, torch.device], list[tuple[Form, ...]]] = {}
        self._refuse_unsupported()
        self._refuse_inexact(self._probe())
        self.fingerprint = self._fingerprint()

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
        """Load a hub id, a local folder or a GGUF file.

        Args:
            name: hub id, folder, or a .gguf file, whose weights are dequantised.
            revision: hub branch, tag or commit; none of a folder or a file.
            dtype: "auto" (the checkpoint's own; float32 on a CPU), "float32", "bfloat16" or "float16".
            device: default: the accelerator if there is one, else the CPU.
            adapter: hub id or folder of a PEFT adapter, which stays beside the weights as transformers loads it.
            trust_remote_code: run the Python code that comes with the model.
            parallel: "none"; "tp" or "fsdp", sharded over processes, see `Group`, all of which have to come here; or
                "device_map", layer by layer over the devices that this process sees, as accelerate spreads it.
            parallel_size: of a group; 0: all processes.

        A checkpoint that is quantised is read as transformers reads it, by the package that it names.

        Raises:
            UserError: no such model, revision or adapter, or no causal LM in it, or no such device here; it can't be
                sharded so.
        """
        group = Group(parallel, parallel_size) if parallel in ("tp", "fsdp") else None
        refuse(
            (parallel_size and group is None, f"parallel_size {parallel_size} is of parallel tp or fsdp"),
            (
                group is not None and adapter is not None,
                f"parallel {parallel}: merge the adapter into the weights first",
            ),
            (group is not None and is_gguf(name), f"parallel {parallel}: a GGUF file is read whole by every process"),
        )
        place = resolve_device(device)
        # bf16 on a CPU without bf16 units is slower than fp32 and only less exact.
        wanted = "float32" if dtype == "auto" and place.type == "cpu" else dtype
        where: Any = "auto" if parallel == "device_map" else group or place
        tokenizer, model = read_target(name, revision, wanted, where, trust_remote_code)
        if adapter is not None:
            add_adapter(model, adapter)
        flags = {"revision": revision, "adapter": adapter}
        model.config.name_or_path = " ".join([name, *(f"--{flag} {value}" for flag, value in flags.items() if value)])
        return cls(model, tokenizer, group)

    def _refuse_unsupported(self) -> None:
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        foreign = kinds - {"full_attention", "sliding_attention"}
        if foreign:
            raise UserError(
                f"{self.name}: layers of kind {', '.join(sorted(foreign))} can't be rolled back after a rejected "
                "draft; only full and sliding-window attention is supported"
            )

    @torch.no_grad()
    def _probe(self) -> _Probe:
        """Run the model through this class, and find out what it can do: two rows of unequal prompts, a verify pass.

        What so short a probe can't see is asked apart: windows, and rotary factors that follow the longest text.

        Raises:
            UserError: the model can't be run so.
        """
        first, second = _PROBE_LENGTH // 2, _PROBE_LENGTH // 4
        texts = torch.arange(2 * _PROBE_LENGTH, device=self.device).view(2, -1) * 7 % self.vocab_size
        lengths = torch.tensor([first, second], device=self.device)
        width = _PROBE_LENGTH - first
        try:
            own = self.aux_layers.prove(texts).logits.float()
            windows = read_windows(self.model, self.context_length)
            WINDOWS.update(windows)
            self.model.set_attn_implementation(ATTENTION)
            cache = self.cache(2, _PROBE_LENGTH)
            hidden = self.extend(cache, texts[:, :first])
            cache.commit(lengths)
            prefill = self.logits(hidden).float()
            output = self.model.get_output_embeddings()
            if output is not None and torch.equal(output(hidden), self.logits(hidden)):
                self._output = output
            cache.select(0, 2, first)
            following = torch.stack([row[n : n + width] for row, n in zip(texts, (first, second), strict=True)])
            verify = self.logits(self.extend(cache, following)).float()
            syncs = has_host_sync(lambda: self.logits(self.extend(cache, following)), self.device)
            places = {weight.device for weight in self.model.parameters()}
            self.capturable = not syncs and len(places) == 1 and self.group is None
            moved = neighbours_matter(self._body, self.context_length, self.device)
            self.document_attention = self._choose_document_attention(texts)
        except (AttributeError, TypeError, RuntimeError, ValueError, IndexError) as error:
            raise UserError(f"{self.name}: {type(self.model).__name__} can't be run in parts: {error}") from error
        expected = torch.stack([row[n : n + width] for row, n in zip(own, (first, second), strict=True)])
        gap = max(_gap(prefill, own[:, :first]), _gap(verify, expected))
        return _Probe(own, gap, moved, any(windows.values()))

    def _refuse_inexact(self, probe: _Probe) -> None:
        """Refuse a model whose logits through this class are not its own."""
        refuse(
            (not probe.logits.isfinite().all(), f"{self.name}: its logits are not finite: the weights are damaged"),
            (probe.logits.std() == 0, f"{self.name}: its logits are all the same: the weights are empty"),
        )
        inexact = f"{self.name}: {type(self.model).__name__} can't be verified exactly"
        refuse(
            (
                not probe.gap < self._tolerance,
                f"{inexact}: its logits through a preallocated cache differ from its own by {probe.gap:.2g} standard "
                "deviations",
            ),
            (
                not probe.moved < self._tolerance,
                f"{inexact}: what it makes of a text depends on how long the other texts of a batch are",
            ),
            (
                self._has_window() and not probe.windowed,
                f"{inexact}: its sliding window of {getattr(self.config, 'sliding_window', None)} tokens is in none of "
                "the masks that are seen here",
            ),
        )

    def _choose_document_attention(self, texts: Tensor) -> tuple[Any, Layout] | None:
        """Of the ways to read several documents in a row the first that gives each as if alone."""
        documents = torch.arange(texts.shape[1], device=self.device).ge(_PROBE_LENGTH // 2).expand_as(texts)
        alone = self.logits(self.hidden(texts.view(-1, _PROBE_LENGTH // 2))).view(*texts.shape, -1).float()
        original = self.original_attention
        name = original if isinstance(original, str) else original[""]
        choices: list[tuple[Any, Layout]] = [(original, packed), (original, masked)]
        if "flash" in name:
            choices = [(original, in_one_row)]
        elif self.device.type == "cuda" and self.dtype.itemsize == 2 and is_flash_attn_2_available():
            choices.insert(0, ("flash_attention_2", in_one_row))
        for choice in choices:
            try:
                gap = _gap(self.logits(self._hidden(texts, documents, *choice)).float(), alone)
            except (ImportError, RuntimeError, ValueError):  # not with this family
                continue
            if gap < self._tolerance:
                return choice
        return None

    @property
    def _tolerance(self) -> float:
        # Rounded activations, as some quantised models have, are as coarse as bfloat16's.
        return _PROBE_TOLERANCE[torch.bfloat16 if getattr(self.model, "is_quantized", False) else self.dtype]

    def _has_window(self) -> bool:
        """Whether the config promises a sliding window that a text can outgrow."""
        window, kinds = getattr(self.config, "sliding_window", None), getattr(self.config, "layer_types", None)
        on = getattr(self.config, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
        return bool(on and isinstance(window, int) and window < self.context_length)

    def _context(self) -> int:
        length = getattr(self.config, "max_position_embeddings", None)
        original = original_context(self.config)
        for value in (length, original):
            refuse(
                (
                    value is not None and (type(value) is not int or value < 2),
                    f"{self.name}: its config has a context of {value!r} tokens",
                )
            )
        if original and (length is None or original < length):
            _log.warning(
                f"{self.name}: texts end at {original} tokens here: beyond its original context longrope makes a text "
                "depend on the length of others in its batch"
            )
            return original
        return length or 2**31

    def broadcast(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """What the next pass depends on, as the first of the processes that hold this target has it."""
        return tensors if self.group is None else self.group.broadcast(*tensors)

    def broadcast_object(self, value: Any) -> Any:
        """What the first of them says; all have to ask."""
        return value if self.group is None else self.group.broadcast_object(value)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """V, as in the model's config: the tokenizer may use fewer."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.config.hidden_size

    @property
    def eos_token_ids(self) -> set[int]:
        """The tokens that end a generation, from the generation config.

        Raises:
            UserError: they are no token ids.
        """
        ids = self.model.generation_config.eos_token_id
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        refuse((any(type(each) is not int for each in listed), f"{self.name}: eos_token_id is {ids!r}, no token id"))
        return set(listed)

    def _fingerprint(self) -> str:
        facts = [self.config.model_type, self.config.num_hidden_layers, self.hidden_size, self.vocab_size]
        tables = [
            part.weight for part in (self.model.get_input_embeddings(), self.model.get_output_embeddings()) if part
        ]
        samples = []
        for table in map(whole, tables):
            # Spread over the whole table by a multiplier without a common factor with its size.
            places = torch.arange(1, _SAMPLES + 1) * 2654435761 % table.numel()
            rows, columns = places // table.shape[1], places % table.shape[1]
            values = table[rows.to(table.device), columns.to(table.device)]
            samples += values.to(torch.bfloat16).view(torch.int16).tolist()
        if getattr(self.model, "_hf_peft_config_loaded", False):
            added = [weight for _, weight in sorted(self.model.get_adapter_state_dict().items())]
            middles = torch.stack(
                [weight.flatten()[weight.numel() // 2] for weight in added[:: -(-len(added) // _SAMPLES)]]
            )
            samples += middles.to(torch.bfloat16).view(torch.int16).tolist()
        return "-".join(map(str, facts)) + ":" + "".join(f"{value & 0xFFFF:04x}" for value in samples)

    def cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache of `rows` rows of `capacity` positions."""
        form = (self.dtype, self.device)  # a model may be cast or moved after its load
        if form not in self._forms:
            tokens = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with torch.no_grad():
                self._forms[form] = forms(self._body(input_ids=tokens, use_cache=True).past_key_values)
        return KVCache(self._forms[form], rows, capacity, self.device)

    @torch.no_grad()
    def hidden(
        self,
        tokens: Tensor,  # [B, S]
        documents: Tensor | None = None,  # [B, S] see `speculator.target.packed`
    ) -> Tensor:  # [B, S, D]
        """Hidden states of whole rows, without a cache and through the model's own attention: what training reads.

        Raises:
            UserError: several documents in a row, and the model can't read each as if alone.
        """
        if documents is None:
            return self._hidden(tokens, torch.zeros_like(tokens), self.original_attention, packed)
        if self.document_attention is None:
            kind = type(self.model).__name__
            raise UserError(f"{self.name}: {kind} can't read the documents of a row apart, so no head can be trained")
        return self._hidden(tokens, documents, *self.document_attention)

    def _hidden(self, tokens: Tensor, documents: Tensor, attention: Any, layout: Layout) -> Tensor:
        (rows, length), own = tokens.shape, slice(None)
        if self.group is not None and self.group.parallel == "tp":  # whose pass has to be of the same rows everywhere
            tokens, documents = self.group.gathered(tokens), self.group.gathered(documents)
            begin = self.group.rank * (len(tokens) // self.group.size)
            own = slice(begin, begin + rows)

        def mine(states: Tensor) -> Tensor:
            return states.view(*tokens.shape, -1)[own, :length].contiguous().to(self.device)

        with attending(self.model, attention), self.aux_layers.of(mine):
            output = self._body(**layout(self.model, tokens, documents), use_cache=False)
        return mine(output.last_hidden_state)

    @torch.no_grad()
    def extend(
        self,
        cache: KVCache,
        tokens: Tensor,  # [R, T]
        tree: TokenTree | None = None,
        base: int = 0,
    ) -> Tensor:  # [R, T, D]
        """Hidden states of `tokens` appended to the cache's selected rows: prefill and verify alike.

        `cache.commit` keeps them.
        With a `tree` they are its verify positions from `base` on; `base` positions were written before them and not
        committed. A draft may reach past the context's end; such tokens are never accepted, so their positions don't
        matter.
        """
        with cache.writing(tokens.shape[1], tree, base) as positions:
            positions = positions.clamp(max=self.context_length - 1)
            output = self._body(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
        return output.last_hidden_state.to(self.device)  # the last layers may lie elsewhere

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:  # [..., D] -> [..., V]
        """The model's own logits of hidden states.

        Where the output matrix alone gives them, to the bit on the load's probe, it is used alone; else the model's
        forward runs with its body stubbed out, which keeps scaling and soft-capping.
        """
        if self._output is not None:
            return self._output(hidden).to(hidden.device)
        self._given.hidden = hidden.reshape(1, -1, hidden.shape[-1])
        prefix = self.model.base_model_prefix
        setattr(self.model, prefix, self._given)
        try:
            logits = self.model(inputs_embeds=self._given.hidden, use_cache=False).logits
        finally:
            setattr(self.model, prefix, self._body)
        return logits.view(*hidden.shape[:-1], -1).to(hidden.device)


def _gap(logits: Tensor, expected: Tensor) -> float:  # [B, S, V] both
    """The root mean square difference at the worst position, in standard deviations of what is expected.

    Not the largest difference of all: by rounding alone it grows with the vocabulary.
    """
    worst = (logits - expected).square().mean(-1).max().sqrt()
    return (worst / expected.std()).item()


def same_target(one: str, other: str) -> bool:
    """Whether two fingerprints are of the same target, rounding and a little further training allowed for."""
    (facts, samples), (other_facts, others) = one.partition(":")[::2], other.partition(":")[::2]
    pieces = [(samples[i : i + 4], others[i : i + 4]) for i in range(0, len(samples), 4)]
    alike = sum(a == b for a, b in pieces)
    return facts == other_facts and len(samples) == len(others) and 4 * alike >= 3 * len(pieces)
