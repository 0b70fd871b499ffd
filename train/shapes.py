"""A run's target and head without weights: what they hold, and what a pass of theirs allocates and computes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from speculator.errors import UserError, first_line
from speculator.heads import ARCHITECTURES, Speculator
from speculator.heads.training import TokenLosses, TrainingBatch
from speculator.target.aux_layers import AuxLayers
from speculator.target.kv_cache import Form, forms
from speculator.target.linear import FAST_DTYPES
from speculator.target.packed import packed
from speculator.target.sharding import check_heads
from train.config import HeadOptions, LossConfig
from train.initialise import head_config
from train.losses import ChunkedLoss, chunk_tokens
from train.traced import Trace, fake, fake_weights

_FUSED = "traced"
FORWARD, STATES, HEAD, LOSS, GRADIENTS = (
    "the target's pass",
    "hidden states and taps",
    "the head's activations",
    "loss: a chunk of logits",
    "the head's gradients",
)


def _fused(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """What fused attention leaves, and what transformers makes for it: a mask, and keys and values for each head."""
    rows, heads, width, _ = query.shape
    seen = query.new_empty(rows, width, key.shape[2], dtype=torch.bool)
    bias = seen.to(query.dtype)
    if width > 1 and key.shape[1] < heads:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    out = query.new_empty(rows, width, heads, value.shape[-1])
    del seen, bias
    return out, None


AttentionInterface.register(_FUSED, _fused)
AttentionMaskInterface.register(_FUSED, lambda *_, **__: None)


class Shapes:
    """A target and a head, made of `Fake` tensors.

    Args:
        config: the target's.
        dtype: of the target's weights.
        head: as configured.
        kind: of device: "cuda" or "cpu".
        parts: processes among which tensor parallelism divides the target's layers; what they hold, allocate and
            compute is then a part's.

    Raises:
        UserError: no causal LM, no such head for it, or a family that can't be run without its weights; heads that
            can't be divided.

    Attributes:
        weights: of the whole target; `experts` are those of them of which a token reads a part.
        bytes: of a part; `layer` those of its largest layer, `table` those of its output matrix.
        linear: bytes of a part's matrices that a CPU may lay out a second time.
        kv: what a position holds in a part's KV cache, of each layer.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, head: HeadOptions, kind: str, parts: int = 1):
        self.config, self.dtype, self.kind = config.get_text_config(), dtype, kind
        check_heads(config.name_or_path or config.model_type, self.config, parts)
        self.head = self._make_head(head)
        try:
            with torch.device("meta"):
                self.target = AutoModelForCausalLM.from_config(_part(config, parts), dtype=dtype)
                whole = AutoModelForCausalLM.from_config(_part(config, 1), dtype=dtype) if parts > 1 else self.target
            self.weights = sum(weight.numel() for weight in whole.parameters())
            self.bytes = _bytes(self.target)
            self.table = self.target.get_output_embeddings().weight.nbytes
            # `Target` has the output matrix whole; newer versions of transformers divide the embedding by its rows.
            if parts > 1 and "embed_tokens" in (self.target.base_model._tp_plan or {}):
                self.bytes += self.table // parts - (0 if self.tied else self.table)
            experts = [weight for weight in whole.parameters() if weight.ndim == 3]
            self.experts = sum(weight.numel() for weight in experts)
            chosen = getattr(self.config, "num_experts_per_tok", None) or 1
            self.chosen = chosen / experts[0].shape[0] if experts else 1.0
            linear = {id(m.weight): m.weight.nbytes for m in self.target.modules() if isinstance(m, nn.Linear)}
            self.linear = sum(linear.values()) if dtype in FAST_DTYPES else 0
            fake_weights(self.target.eval().requires_grad_(False))
            if self.target.config._attn_implementation != "eager":
                self.target.set_attn_implementation(_FUSED)
            if experts:
                self.target.set_experts_implementation("grouped_mm")
            self.head.bind(self.config, self.target.get_input_embeddings().weight)
            self.aux_layers = AuxLayers(self.target)
            self.layer = max(map(_bytes, self.aux_layers.layers), default=0)
            one = torch.zeros(1, 1, dtype=torch.long)
            with torch.no_grad():
                cache = self.target.base_model(input_ids=one, use_cache=True).past_key_values
            self.kv: list[tuple[Form, ...]] = forms(cache)
        except UserError:
            raise
        except Exception as error:  # whatever a family does with numbers that are not there
            raise UserError(f"{config.model_type}: can't be planned without its weights: {first_line(error)}") from None

    def _make_head(self, wanted: HeadOptions) -> Speculator:
        config = head_config(wanted, self.config)
        with torch.device("meta"):
            head = ARCHITECTURES[wanted.architecture](config)
        head.device_kind = self.kind
        self.trained = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
        fake_weights(head.train())
        return head

    @property
    def active(self) -> float:
        """Weights of the target that a token is multiplied by: of its experts those that it is sent to, and of the two
        tables one."""
        table = self.target.get_input_embeddings().weight.numel()
        return self.weights - self.experts * (1 - self.chosen) - (0 if self.tied else table)

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        return self.target.get_input_embeddings().weight is self.target.get_output_embeddings().weight

    @property
    def position(self) -> int:
        """Bytes of a position in the KV cache."""
        return sum(heads * size * dtype.itemsize for layer in self.kv for heads, size, dtype, _ in layer)

    @property
    def remembered(self) -> int:
        """Bytes of a position in the memory of a head that attends, in the target's dtype."""
        return self.head.config.cached_values * self.dtype.itemsize

    @cache  # noqa: B019  there is one of these in a process
    def forward(self, length: int) -> Pass:
        """A pass of the target over one whole row, as training has it; every row adds as much."""
        ids = torch.zeros(1, length, dtype=torch.long)
        with torch.no_grad(), Trace() as trace, trace.part(FORWARD):
            self.target.base_model(**packed(self.target, ids, torch.zeros_like(ids)), use_cache=False)
        return Pass(trace.peak, trace.operations + self._attention(length))

    def step(self, rows: int, length: int, loss: LossConfig, bf16: bool, again: bool) -> Pass:
        """A micro-batch behind the target's pass: the head's forward and backward pass, the loss.

        Args:
            bf16: autocast to bfloat16.
            again: whether the gradients of a micro-batch before are there.
        """
        chunk = chunk_tokens(self.kind, self.config.vocab_size)
        # From so many rows on each adds alike: their chunks are whole, and most is needed at the same moment.
        least = 2 * -(-2 * chunk // length)
        if rows <= least + 1:
            return self._step(rows, length, loss, bf16, again, chunk)
        one, two = (self._step(count, length, loss, bf16, again, chunk) for count in (least, least + 1))
        return two + (two + one * -1) * (rows - least - 1)

    def _step(self, rows: int, length: int, loss: LossConfig, bf16: bool, again: bool, chunk: int) -> Pass:
        ids = torch.zeros(rows, length, dtype=torch.long)
        documents = torch.zeros_like(ids)
        targets = self.head.config.training_targets(ids, documents, torch.ones_like(ids))
        trained = [weight for weight in self.head.parameters() if weight.requires_grad]
        matrices = {tuple(weight.shape) for weight in trained}

        def name(tensor: Tensor, part: str) -> str:
            own = part in (HEAD, LOSS) and tensor.dtype == torch.float32 and tuple(tensor.shape) in matrices
            return GRADIENTS if own else part

        for weight in trained:
            weight.grad = fake(*weight.shape, dtype=weight.dtype) if again else None
        with Trace(name) as trace:
            with trace.part(STATES):
                seen = {k: self._state(rows, length) for k in self.head.aux_layers}
                hidden = self._state(rows, length)
                states = torch.cat(list(seen.values()), -1) if seen else hidden
                given = states.float()
                del states
            batch = TrainingBatch(ids, documents, hidden, given, targets)
            output: Any = self.target.get_output_embeddings()

            class Traced(ChunkedLoss):
                def __call__(self, *args: Any) -> TokenLosses:
                    with trace.part(LOSS):
                        return super().__call__(*args)

            token_loss = Traced(output, loss, self.config.vocab_size, chunk)
            with trace.part(HEAD):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    metrics = self.head(batch, token_loss)
                metrics["objective"][0].backward()
        if again:
            trace.peak[GRADIENTS] += sum(weight.nbytes for weight in trained)
        for weight in trained:
            weight.grad = None
        return Pass(trace.peak, trace.operations)

    def _state(self, rows: int, length: int) -> Tensor:
        return fake(rows, length, self.config.hidden_size, dtype=self.dtype).clone()  # seen by a trace

    def _attention(self, length: int) -> int:
        """Operations of fused attention over a row: two products of the lower triangle, in each layer."""
        if self.target.config._attn_implementation == "eager":
            return 0  # they are counted
        config = self.target.config.get_text_config()
        size = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
        return 2 * config.num_attention_heads * size * length * length * config.num_hidden_layers


def _part(config: PreTrainedConfig, parts: int) -> PreTrainedConfig:
    """A model of the size that each process of a tensor parallel group runs: its heads, its columns."""
    config = copy.deepcopy(config)
    if parts > 1:
        text = config.get_text_config()
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"):
            if getattr(text, name, None):
                setattr(text, name, getattr(text, name) // parts)
    return config


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


@dataclass(frozen=True)
class Pass:
    """What a pass needs: bytes by part when they are most, and floating-point operations."""

    peak: dict[str, float]
    operations: float

    def __add__(self, other: Pass) -> Pass:
        names = self.peak | other.peak
        peak = {name: self.peak.get(name, 0) + other.peak.get(name, 0) for name in names}
        return Pass(peak, self.operations + other.operations)

    def __mul__(self, times: float) -> Pass:
        return Pass({name: size * times for name, size in self.peak.items()}, self.operations * times)

    @property
    def bytes(self) -> float:
        return sum(self.peak.values())
