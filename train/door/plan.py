"""Memory and time that a run needs, estimated by formula before anything is loaded: `train.py --plan 8xH100`.

Of the target, only the config is read. Weights are counted on torch's meta device; activations follow from a few
constants that were calibrated on an H100 (docs/results.md). The allocator and CUDA itself take about a GB more.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from data.mixture import SELF
from eval.timing import step_seconds
from eval.tune import LONGEST, ROWS
from eval.validation import NEW_TOKENS
from speculator.decoding.rows import RESERVED_NEW_TOKENS
from speculator.device import dtype_name
from speculator.errors import UserError, first_line
from speculator.kernels.linear import packed_bytes
from speculator.tables import gigabytes, markdown_table
from speculator.target.base import TrainingTarget
from speculator.target.cache.kv_cache import BUCKETS
from speculator.target.gguf.file import is_gguf
from speculator.target.loading import auto_class, drop_vision_tower
from speculator.target.model import Target
from speculator.target.probe import usable_context
from speculator.target.sharding import SHARDED, divided
from train.door.head import without_memory
from train.door.settle import Run
from train.door.sizes import Prompt, expected_prompts, expected_rows
from train.losses import chunk_tokens
from train.optimizers import bytes_of_moments
from train.options.config import RunConfig, StageConfig, values_of
from train.states.sources import bytes_per_token

_USUAL_MFU, _MFU_OF_SMALL, _SMALL = 0.33, 0.08, 10**9
"""Share of the peak that recipes reached on an H100: 29 to 38%, but 7 to 9% for a target of 135 million weights."""
_MFU_ON_CPU = 0.5
"""The same on a CPU, of the rate of one large product: 50 to 60% on a core of an AMD EPYC, SmolLM2 in float32."""
_NF4 = 4.5
"""Bits of a weight in 4 bits, with a float32 scale for 64 of them, as bitsandbytes stores it."""
_SHORT, _FEW_DRAFTED = 1024, 3
"""Tokens of a row and of a draft, below which `Plan.remedy` does not go."""
_OVER_BANDWIDTH = 2
"""Time of a plain decoding step over that of reading the weights: 1.9 and 2.4 on an H100, for 1 and 32 rows of 8B."""
_FORWARD = 1 / 3
"""Share of a training step that an evaluation of the same rows takes: no backward pass."""
_DECODERS = 5
"""Ways to decode in a run's report: plainly, with the head, adaptively, by n-gram lookup, by transformers."""
_TUNING = 250
"""Plain steps that measuring costs takes at each number of rows: two temperatures, five rounds, some ten drafts."""
_TIMED_PROMPT = 16
MEASURING = "measuring"
_SHORTER = {
    SELF: "--data.self_source.max_rows",
    "stage1": "--stage1.max_steps",
    "generating": "--stage2.generate.max_rows",
    "stage2": "--stage2.max_steps",
    MEASURING: "--eval.max_prompts",
}
"""The setting that shortens each phase."""
_OF_THE_HEAD = ("head's weights and gradients", "moments")
_COPIES = "copies of weights, for products of few rows"
_GUESSED = (
    "stage2: the prompts are not known yet; figures for stage2.generate.prompt_tokens, and chats are taken whole. The "
    "run counts them before it trains"
)


@dataclass(frozen=True)
class GeneratedText:
    """Text that the target generates in one phase of a run, at its largest."""

    rows: int  # number of rows
    batch_size: int  # rows decoded together
    length: int  # tokens of the longest row, prompt included
    new: int  # new tokens of a row; in a chat those of one answer
    answers: float  # number of answers of a row, on average
    mean: float  # tokens of a row, on average
    depth: int = 0  # number of speculative tokens per step (G); 0: plain decoding

    def packed_rows(self, length: int) -> int:
        """Return the number of training rows of `length` tokens that the text fills."""
        return ceil(self.rows * self.mean / length)


class Speed(NamedTuple):
    """How fast a run works, as expected or as measured."""

    row: dict[str, float]  # seconds in which a process trains on a row, by stage
    decode: Callable[[int], float] | None  # returns the seconds of a plain decoding step of some rows; None: unknown


def _in_linear_layers(module: nn.Module) -> int:
    """Return the number of weights in a module's linear layers."""
    return sum(part.weight.numel() for part in module.modules() if type(part) is nn.Linear)


def generated_texts(
    run: Run, length: int, prompts: Sequence[Prompt] | None, rows: int | None = None
) -> dict[str, GeneratedText]:
    """Return the text that the target generates in a run, by phase; a phase without such text is left out.

    "self" are the chats of the source `self`, before training, and "generating" is the text that stage 2 trains on. No
    data are read. Rows of stage 1 have `length` tokens, and stage 2 has `rows` texts, if known. `prompts` are the sizes
    of its prompts, known or estimated. None: unknown, so each has `stage2.generate.prompt_tokens` and one answer.
    """
    lengths, context = run.lengths, usable_context(run.text)
    found, source, generate = {}, run.config.data.self_source, run.config.stage2.generate

    def capped(length: int) -> int:
        return min(length, context or length)

    if lengths.chat:
        written = capped(lengths.chat_tokens)
        found[SELF] = GeneratedText(
            rows=source.max_rows, batch_size=source.batch_size, length=written, new=written, answers=1, mean=written
        )
    if own := lengths.own:
        if run.mixture.is_self:
            new = capped(lengths.turns * own.tokens())
            sizes, answers = [new], 1.0
        else:
            prompts = prompts or [Prompt(own.prompt)]
            # A chat is answered until it is longer than rows of stage 1.
            most = own.tokens(max(length, own.prompt))
            sizes = [capped(min(most, own.tokens(each.tokens, each.answers))) for each in prompts]
            new = min(own.new, max(sizes))
            answers = sum(each.answers for each in prompts) / len(prompts)
        found["generating"] = GeneratedText(
            rows=generate.max_rows if rows is None else rows,
            batch_size=generate.batch_size,
            length=max(sizes),
            new=new,
            answers=answers,
            mean=sum(sizes) / len(sizes),
            depth=generate.num_speculative_tokens or run.config.speculator.n_predict,
        )
    return found


class Plan:
    """Estimated memory and time of a run whose target's config is known; `str(plan)` is what `--plan` prints.

    Phases are named "self" and "generating" (the target generates text), "stage1" and "stage2" (the head is trained).

    Attributes:
        uncounted: the reason that the target's layers are not counted; "" if they are.
        weights, active: number of the target's weights, and of those that a token is multiplied by.
        copied, copied_of_head: number of the weights in linear layers, which a CPU copies while they are frozen.
        trained: number of the head's trainable weights.
        size: bytes of a target's weight that is not quantised.
        bits: bits of a weight in its linear layers, those of scales included; None: quantised in a way not known here.
        generated, stages: text to generate and settings of training, by phase.
        unknown: stages whose number of rows is not known yet.
        guessed: the prompts of stage 2 are not known yet.
    """

    def __init__(self, run: Run):
        self.place, target = run.place, run.target
        assert target is not None
        assert run.text is not None
        self.text = run.text
        self.served = bool(run.config.target.server)  # its layers run elsewhere, and so does the writing of text
        self.uncounted = ""
        model: Any = nn.Module()
        if run.config.target.parallel == "device_map":
            self.uncounted = "target.parallel device_map spreads it over all GPUs"
        else:
            try:
                with torch.device("meta"):
                    trusted = run.config.target.trust_remote_code
                    model = auto_class(target).from_config(target, trust_remote_code=trusted)
                    drop_vision_tower(model)
            except Exception as error:  # whatever the family's code needs
                self.uncounted = f"{self.text.model_type}: {first_line(error)}"
        self._take(run)
        self.dtype = self._dtype(target)
        self.size = self.dtype.itemsize
        self.table = self.text.vocab_size * self.text.hidden_size
        self.weights = sum(weight.numel() for weight in model.parameters()) or self.table
        self.active = self.weights - self.table - _idle_experts(model, self.text)
        """Weights that a token is multiplied by: without the embedding, and of the experts only the chosen ones."""
        self.copied = _in_linear_layers(model)
        output = None if self.uncounted else model.get_output_embeddings()
        self.inner = self.copied - (output.weight.numel() if type(output) is nn.Linear else 0)
        """Weights in linear layers that a quantised target has in fewer bits: all but the output matrix."""
        schemes = [found for each in (target, self.text) if (found := getattr(each, "quantization_config", None))]
        self.quantised = bool(schemes)
        self.bits = bits_of(schemes[0]) if schemes else 8.0 * self.size
        self._counted: dict[str, int] = {}
        prompts = expected_prompts(run.config, run.mixture) if run.continues else None
        self._expect(self.config.data.seq_length, prompts)

    def _take(self, run: Run) -> None:
        """Set the attributes that depend on settings, of a run on the same target."""
        self.run, self.config, self.head = run, run.config, run.head
        sharded = self.config.target.parallel in SHARDED
        self.shards = divided(run.processes, self.config.target.parallel_size) if sharded else 1
        self.head_module = head = without_memory(run.head)
        self.copied_of_head = _in_linear_layers(head)
        self.trained = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
        # The largest matrix has its own buffers in the loss, see `_micro_batch`.
        self.largest = max(weight.numel() for weight in head.parameters() if weight.requires_grad)

    def knowing(self, length: int, prompts: Sequence[Prompt] | None, **rows: int) -> Plan:
        """Return the plan of the same run with what its data decide: `rows` are training rows by stage, where known.

        Rows of stage 1 have `length` tokens. Without `prompts`, stage 2 has none, or the target writes them itself.
        """
        known = copy.copy(self)
        known._counted = rows
        known._expect(length, prompts)
        return known

    def _expect(self, length: int, prompts: Sequence[Prompt] | None) -> None:
        """Set the attributes that depend on the data, from the arguments of `generated_texts`."""
        self._length, self._prompts, run = length, prompts, self.run
        self.guessed = run.continues and prompts is None
        texts = len(prompts) if self._counted and prompts else None  # else they are a sample
        self.generated = generated_texts(run, length, prompts, texts)
        generated = self.generated.get("generating")
        rows = {"stage1": expected_rows(run.config, run.mixture, run.lengths.chat_tokens, length), "stage2": None}
        if generated:
            rows["stage2"] = generated.packed_rows(self.length("stage2"))
        rows |= self._counted
        self.stages: dict[str, StageConfig] = {
            name: run.stage(name, count) if count else stage
            for name, count in rows.items()
            if (stage := getattr(self.config, name)).max_steps
        }
        self.rows = {name: count for name, count in rows.items() if count}
        self.unknown = [name for name, stage in self.stages.items() if stage.epochs and not rows[name]]

    def _dtype(self, target: PreTrainedConfig) -> torch.dtype:
        """Return the dtype in which the target's weights are loaded."""
        here = self.place.kind == "cuda" or self.served
        if (asked := self.config.target.dtype) != "auto":
            return getattr(torch, asked)
        if here and is_gguf(self.config.target.name_or_path):
            return torch.bfloat16
        stored = self.text.dtype or target.dtype
        return stored if here and isinstance(stored, torch.dtype) else torch.float32

    def length(self, stage: str) -> int:
        """Return the number of tokens in each training row of a stage."""
        if stage == "stage1":
            return self._length
        return max(self._length, self.generated["generating"].length)  # texts are packed

    # ---- memory

    @property
    def _bytes(self) -> int:
        """Bytes of the target's weights, over all processes that share it; unquantised if its bits are not known."""
        bits = 8 * self.size if self.bits is None else self.bits
        return round((self.weights - self.inner) * self.size + self.inner * bits / 8)

    def memory(self) -> dict[str, Counter[str]]:
        """Return the peak bytes of each part in one process, by phase of the run: {phase: {part: bytes}}."""
        # Of N processes that share a target each has 1/N of the body, and the whole output matrix.
        target = 2 * self.table * self.size if self.served else self._bytes // self.shards
        if self.shards > 1:  # the output matrix is whole in every process
            target += self.table * self.size
            target -= self.table * self.size // self.shards if self.config.target.parallel == "tp" else 0
            if not any(isinstance(module, nn.Embedding) for module in self.head_module.modules()):
                target += self.table * self.size  # so is the embedding that the head reads
        shared = self.place.processes if self.config.shard_optimizer else 1
        always = Counter({"target's weights": target})
        frozen = Counter({"head's weights and gradients": self.size * self.trained})
        if self.place.kind == "cpu":  # see `speculator.kernels.linear`; sharded weights have no copy
            whole = not self.served and self.shards == 1
            always[_COPIES] = packed_bytes(self.copied, self.dtype) if whole else 0
            frozen[_COPIES] = packed_bytes(self.copied_of_head, self.dtype)
        needs = {}
        for name, stage in self.stages.items():
            moments = bytes_of_moments(self.head_module, stage.optimizer, shared)
            # DDP keeps gradients in buckets, and those of the micro-batches before the last one beside them.
            buckets = self.place.processes > 1 and stage.gradient_accumulation_steps > 1
            weights = (12 if buckets else 8) * self.trained
            training = Counter({"head's weights and gradients": weights, "moments": moments})
            if self.place.kind == "cpu":
                joined = bytes_of_moments(self.head_module, stage.optimizer, 1) * (1 + (shared > 1))  # before the copy
                training["copy that a checkpoint is written from"] = 4 * self.trained + joined
            needs[name] = always + training + self._micro_batch(name)
        for name, own in () if self.served else self.generated.items():
            caches = 2 if own.depth else 1  # plain decoding is timed too, with a cache of its own
            needs[name] = always + (frozen if own.depth else Counter()) + self._decoding(own, caches)
        return needs

    def _micro_batch(self, name: str) -> Counter[str]:
        """Return the bytes of one micro-batch's activations by part.

        The target's forward pass and the head's loss don't peak together: only the larger one counts.
        """
        stage, text = self.stages[name], self.text
        tokens = stage.per_device_train_batch_size * self.length(name)
        inputs = 1 + len(self.head_module.aux_layers)
        # Each token's final hidden state and those of the auxiliary layers, in the target's dtype and in float32.
        states = tokens * text.hidden_size * inputs * (self.size + 4)
        parts = self.shards if self.config.target.parallel == "tp" else 1  # such a group reads all its rows together
        widest = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
        widest = max(widest) if isinstance(widest, list | tuple) else widest or 4 * text.hidden_size
        forward = tokens * (3 * widest + 4 * text.hidden_size * parts) * self.size
        if self.served:
            forward = 0
        if self.shards > 1 and parts == 1:  # FSDP: a layer as received and as used
            forward += 2 * self.weights * self.size // text.num_hidden_layers
        vocab, drafted = text.vocab_size, self.head.output_size
        chunk = chunk_tokens(self.place.kind, vocab)
        # The output matrix in bfloat16, its gradient in float32; 4 copies of p and 8 of q for one chunk of tokens.
        loss = 6 * self.largest + 4 * min(chunk, tokens) * (4 * vocab + 8 * drafted)
        if self.place.kind == "cuda":  # the logits of all steps of a chunk
            loss += 2 * min(chunk, tokens) * drafted * self.head.n_predict
        if stage.keep_states and self._draws_from_some:  # the lm_head's rows of the draft vocabulary
            loss += drafted * text.hidden_size * self.size
        kept = tokens * self.head.activation_bytes(self.length(name))
        # The larger of the two: when the head runs, the target's activations are free again.
        peak = (
            ("target's forward pass", forward)
            if forward > kept + loss
            else ("head's activations and loss", kept + loss)
        )
        return Counter({"hidden states": states, peak[0]: peak[1]})

    def _decoding(self, own: GeneratedText, caches: int) -> Counter[str]:
        """Return the bytes of `caches` KV caches and of the logits while the target generates text."""
        # KV per position: keys and values, 2 numbers for each layer, key head and dimension.
        text, bucket = self.text, BUCKETS.get(self.place.kind, 1)
        heads = getattr(text, "num_attention_heads", 1)  # recurrent layers count as attention: their states are smaller
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        per_position = 2 * text.num_hidden_layers * kv_heads * head_dim * self.size
        # The prompt and the new tokens that a slot reserves, then the spare positions of two steps.
        longest = min(own.length, own.length - own.new + RESERVED_NEW_TOKENS) + 2 * (1 + own.depth)
        positions = own.batch_size * (ceil(longest / bucket) + 1) * bucket
        memory = positions * self.head.cached_values * self.size if own.depth else 0
        # A step's logits in the target's dtype, and three copies in float32.
        logits = own.batch_size * (1 + own.depth) * text.vocab_size * (self.size + 3 * 4)
        return Counter({"KV cache": positions * per_position * caches + memory, "logits": logits})

    def refuse_too_large(self) -> None:
        """Raise a UserError, with what would fit, if a phase needs more memory than a device has.

        A target that is quantised in an unknown way takes less than is counted, so its weights are left out here. Of
        one whose layers are not counted nothing is known but what the head's training takes.
        """
        parts = self.memory()
        for phase in parts.values():
            if self.bits is None and not self.served:
                del phase["target's weights"]
            for part in [*phase] if self.uncounted else ():
                if part not in _OF_THE_HEAD:
                    del phase[part]
        needs = {name: phase.total() for name, phase in parts.items()}
        name = max(needs, key=lambda name: needs[name])
        if self.place.holds(needs[name], spare=False):
            return
        assert self.place.memory is not None
        (largest, size), *_ = parts[name].most_common()
        raise UserError(
            f"{name} needs {gigabytes(needs[name])} GB in each process, and {self.place.name} has "
            f"{gigabytes(self.place.memory)}; {gigabytes(size)} of it are the {largest}; "
            f"{self.remedy()}{self.place.advice}"
        )

    def _needs(self) -> dict[str, int]:
        """Return the peak bytes of one process by phase."""
        return {name: sum(parts.values()) for name, parts in self.memory().items()}

    def _unfit(self) -> list[str]:
        return [name for name, need in self._needs().items() if not self.place.holds(need, spare=True)]

    def remedy(self) -> str:
        """Return the first change that lets all phases fit, found by trying, and what they then need."""
        config, head = self.config, self.config.speculator
        whole = self.bits == 8 * self.size and not self.served and config.target.parallel == "none"
        lengths = [self._length >> i for i in range(8) if i == 0 or self._length >> i >= _SHORT]
        rows = [replace(config, data=replace(config.data, seq_length=length)) for length in lengths[1:]]
        changes = [(changed, self.bits, "") for changed in (config, *rows)]
        if head.n_predict > _FEW_DRAFTED and not head.warm_start:
            changes.append((replace(config, speculator=replace(head, n_predict=_FEW_DRAFTED)), self.bits, ""))
        if whole and self.place.processes > 1:
            target, without = replace(config.target, parallel="fsdp"), replace(config.stage2, max_steps=0)
            changes.append((replace(config, target=target, stage2=without), self.bits, ""))
        if whole and self.place.kind == "cuda":
            in_4_bits = "a target in 4 bits (docs/guides/hardware.md)"
            changes += [(changed, _NF4, in_4_bits) for changed in (config, *rows)]
        for changed, bits, named in changes:
            try:
                made = self._with(changed, bits)
            except UserError:  # such as an adapter that can't be sharded
                continue
            while (unfit := made._unfit()) and (smaller := _halved(made.config, unfit)) != made.config:
                made = made._with(smaller, bits)
            if not unfit:
                pairs = zip(values_of(config), values_of(made.config), strict=True)
                flags = [f"--{name} {value}" for (name, old), (_, value) in pairs if value != old]
                most = gigabytes(max(made._needs().values()))
                return f"{' and '.join(filter(None, [named, ' '.join(flags)]))} would need {most} GB"
        need = max(parts["head's weights and gradients"] + parts["moments"] for parts in self.memory().values())
        if not self.place.holds(need, spare=False):
            return (
                f"speculator: a head of {self.head_module.num_parameters():,} weights needs {need / 1e9:,.0f} GB to "
                "train: take a smaller speculator.inner_dim or speculator.n_predict, or "
                "speculator.options.tie_weights, or split the moments over more GPUs by shard_optimizer"
            )
        return "no smaller batch, row or precision fits: take a smaller target, or more or larger GPUs"

    def _with(self, config: RunConfig, bits: float | None) -> Plan:
        """Return the plan for other settings on the same target, or for one with other `bits`."""
        made = copy.copy(self)
        made.bits = bits
        made._take(self.run.changed(config))
        length = min(self._length, made.config.data.seq_length)
        made._counted = self._counted if length == self._length else {}
        made._expect(length, self._prompts)
        return made

    # ---- time

    def tokens(self) -> dict[str, int]:
        """Return the number of tokens over all processes by phase, in order: trained on, or generated at most."""
        counts = {name: round(own.rows * own.new * own.answers) for name, own in self.generated.items()}
        for name, stage in self.stages.items():
            rows = stage.max_steps * stage.rows_per_step
            counts[name] = rows * self.length(name) * self.place.processes
        return {name: counts[name] for name in (SELF, "stage1", "generating", "stage2") if name in counts}

    def _passes(self, name: str) -> float:
        """Return how often a stage reads its rows, of which the target computes one pass; 1 if it computes all."""
        stage, rows = self.stages[name], self.rows.get(name)
        if not stage.keep_states or not rows:
            return 1.0
        per_step = stage.rows_per_step * self.place.processes
        return max(1.0, stage.max_steps * per_step / rows)

    def kept_bytes(self) -> dict[str, int]:
        """Return the bytes of the states that stages keep in files; a stage of unknown rows as if it had one pass."""
        per_token = bytes_per_token(
            self.text.hidden_size, self.head_module.aux_layers, self.dtype, self._draws_from_some
        )
        kept = [name for name, stage in self.stages.items() if stage.keep_states]
        validation = {name: self.config.eval.validation_rows * self.length(name) for name in kept}
        return {name: (round(self.tokens()[name] / self._passes(name)) + validation[name]) * per_token for name in kept}

    @property
    def _draws_from_some(self) -> bool:
        """True if the loss compares the target's distribution with a head's that has a draft vocabulary."""
        return self.config.loss.needs_target and self.head.output_size < self.text.vocab_size

    def token_at_peak(self, name: str) -> tuple[float, float] | None:
        """Return the seconds that a token of a stage takes at the device's peak, by target and head; None: unknown.

        MFU is this over the measured time. It counts the target's forward pass over every token, and for labelled ones
        the target's logits and the head's forward and backward passes. Where states are kept, the target's share is
        that of one pass over the rows, spread over all.
        """
        if self.place.gpu is None or self.uncounted:
            return None
        half, single = self.place.gpu.half * 1e12, self.place.gpu.single * 1e12
        text = self.text
        attention = 2 * text.num_hidden_layers * text.hidden_size * self.length(name)  # causal: half of 4 L D S
        # 2 operations per weight in the forward pass, and 4 more in the backward pass, which the frozen target lacks.
        # `active` has an untied output matrix, which training multiplies by for the target's own distribution only.
        output = 0 if self.text.tie_word_embeddings else self.table
        target = 0 if self.served else 2 * (self.active - output) + attention
        head = 6 * self.head_module.weights_per_token(self.length(name))
        passes = self._passes(name)
        logits = 2 * self.table * self.config.loss.needs_target
        if self._draws_from_some and self.stages[name].keep_states:  # all logits in the first pass alone
            logits = logits / passes + 2 * self.head.output_size * text.hidden_size
        as_target, as_head = half if self.size == 2 else single, half if self.stages[name].bf16 else single
        return target / passes / as_target, logits / as_target + head / as_head

    def seconds_per_token(self, name: str) -> float:
        """Return the sum of `token_at_peak`, as if every token had a label; the device's peak must be known."""
        at_peak = self.token_at_peak(name)
        assert at_peak is not None
        return sum(at_peak)

    def expected_speed(self) -> Speed:
        """Return the speed that is expected of a device whose peak is known."""
        assert self.place.gpu is not None
        decode = self._bytes / self.place.gpu.bandwidth / 1e12 * _OVER_BANDWIDTH  # each step reads all weights
        rows = {name: self.length(name) * self.seconds_per_token(name) / self._mfu for name in self.stages}
        return Speed(rows, lambda rows: decode)

    def seconds(self, speed: Speed) -> dict[str, float]:
        """Return the seconds of each phase that runs here, in order, with evaluations.

        The last one, "measuring", tunes the head too. Texts are counted as if no answer ended early and no draft was
        accepted. If the speed has no `decode`, or the target only trains, what decodes is left out.
        """
        settings, processes, decode = self.config.eval, self.place.processes, speed.decode
        if self.served or self.shards > 1:
            decode = None
        found = {}
        if decode:
            for name, own in self.generated.items():
                batches = ceil(own.rows / own.batch_size / processes)
                found[name] = batches * own.new * own.answers * decode(min(own.batch_size, own.rows))
        prompts = ceil(settings.validation_prompts / processes)
        for name, stage in self.stages.items():
            row = speed.row[name]
            check = ceil(settings.validation_rows / processes) * row * _FORWARD
            check += 2 * NEW_TOKENS * decode(prompts) if decode else 0
            found[name] = stage.max_steps * stage.rows_per_step * row + stage.max_steps // stage.eval_steps * check
        if decode:
            texts = len(settings.temperatures) * settings.max_prompts * _DECODERS
            if settings.tune_prompts:
                found[MEASURING] = min(LONGEST, sum(_TUNING * decode(rows) for rows in ROWS))
                texts += 2 * settings.tune_prompts
            found[MEASURING] = found.get(MEASURING, 0) + texts * settings.max_new_tokens * decode(1)
        return {name: found[name] for name in _SHORTER if name in found}

    def outlook(self, target: TrainingTarget, prompt: Sequence[int], name: str, step: float) -> str:
        """Return a log line with the time of each phase from a stage on, and the setting that shortens the longest.

        On a CPU plain decoding after `prompt` is timed. A GPU's graphs take longer to capture than the text to write,
        so what is expected of its peak stands in for it. The stage `name` has begun; its optimiser step takes `step`
        seconds.
        """
        timed: dict[int, float] = {}

        def decode(rows: int) -> float:
            if rows not in timed:
                timed[rows] = step_seconds(target, prompt[:_TIMED_PROMPT], rows)  # type: ignore[arg-type]
            return timed[rows]

        measured = isinstance(target, Target) and target.device.type == "cpu"
        token = step / self.stages[name].rows_per_step / self.length(name)
        rows = {each: token * self.length(each) for each in self.stages}
        known = isinstance(target, Target) and self.place.gpu and not self.uncounted
        expected = self.expected_speed().decode if known else None
        parts = self.seconds(Speed(rows, decode if measured else expected))
        parts = {each: seconds for each, seconds in parts.items() if [*_SHORTER].index(each) >= [*_SHORTER].index(name)}
        whole = "this run" if MEASURING in parts else "training, without decoding,"
        whole = whole if name == "stage1" else f"the rest of {whole}"
        kept = any(stage.keep_states for stage in self.stages.values())
        # The timed steps may have read an earlier run's files, so with kept states the time is no bound.
        rest = "; steps that read kept states are the faster ones" if kept else ""
        bound = "" if kept or (expected and not measured) else "at most "
        shown = ", ".join(f"{each} {timedelta(seconds=round(seconds))}" for each, seconds in parts.items())
        return (
            f"{whole} takes {bound}about {timedelta(seconds=round(sum(parts.values())))} here: {shown} "
            f"({_SHORTER[max(parts, key=lambda each: parts[each])]} shortens it{rest})"
        )

    def _for_servers(self) -> str:
        """Return a line about what the target's servers have to hold, compute and send."""
        inputs = 1 + len(self.head_module.aux_layers)
        state = inputs * self.text.hidden_size * self.size
        weights = f"{gigabytes(self._bytes)} GB of weights in {dtype_name(self.dtype)}"
        return f"servers: {weights}; per token {2 * self.active / 1e9:,.1f} GFLOP and {state / 1024:,.1f} KiB of states"

    def __str__(self) -> str:
        place, needs = self.place, self.memory()
        parts = dict.fromkeys(part for phase in needs.values() for part in phase)
        memory = [
            [part, *(gigabytes(phase[part]) if phase[part] else "" for phase in needs.values())] for part in parts
        ]
        totals = [sum(phase.values()) for phase in needs.values()]
        memory.append(["total", *map(gigabytes, totals)])
        if place.memory is not None:
            unfit = self._unfit()
            memory.append(["fits", *("NO" if name in unfit else "?" if self.uncounted else "yes" for name in needs)])
        shards = f", each with 1/{self.shards} of the target ({self.config.target.parallel})" if self.shards > 1 else ""
        has = f" of {gigabytes(place.memory)} GB" if place.memory else ""
        return "\n".join(
            [
                f"target: {self.config.target.name_or_path}, {self.weights / 1e9:,.2f} billion weights, "
                + dtype_name(self.dtype),
                f"head: {self.config.speculator.architecture}, {self.trained / 1e6:,.1f} million weights",
                f"processes: {place.processes} on {place.name}{has}{shards}",
                *([self._for_servers()] if self.served else []),
                *(["the target is quantised: its weights take less than here"] if self.bits is None else []),
                *([f"NOT COUNTED: the target's layers ({self.uncounted})"] if self.uncounted else []),
                "",
                markdown_table(("peak memory of a process, GB", *needs), memory),
                *([f"to fit: {self.remedy()}"] if place.memory is not None and self._unfit() else []),
                "",
                "tokens: " + ", ".join(f"{name} {count:,}" for name, count in self.tokens().items()),
                *(f"{name}: {gigabytes(size)} GB of states in files" for name, size in self.kept_bytes().items()),
                *([self._expected_time()] if place.gpu and not self.uncounted else []),
                *(f"{name}: the size of the data is not known yet; figures for max_steps" for name in self.unknown),
                *([_GUESSED] if self.guessed else []),
            ]
        )

    @property
    def _mfu(self) -> float:
        """Share of the device's peak at which training is expected to run."""
        if self.place.kind == "cpu":
            return _MFU_ON_CPU
        return _MFU_OF_SMALL if self.weights < _SMALL else _USUAL_MFU

    def _expected_time(self) -> str:
        """Return a line about the time of each phase that runs here, and of all."""
        phases = self.seconds(self.expected_speed())
        parts = ", ".join(f"{name} {_time(seconds)}" for name, seconds in phases.items())
        waiting = ", without waiting for servers" * self.served
        peak = "this CPU's peak; decoding is not measured"
        if self.place.kind != "cpu":
            peak = "the GPU's peak, decoding at half its bandwidth, as measured on an H100"
        return (
            f"expected time: {parts}; {_time(sum(phases.values()))} in all{waiting} "
            f"(training at {self._mfu:.0%} of {peak})"
        )


def bits_of(scheme: Any) -> float | None:
    """Return the bits of a weight by a `quantization_config`, with those of its scales; None: an unknown method."""
    stated = scheme if isinstance(scheme, dict) else scheme.to_dict()
    if stated.get("load_in_4bit"):  # a float32 scale for 64 weights, or 8 bits of it
        return 4.127 if stated.get("bnb_4bit_use_double_quant") else _NF4
    if stated.get("load_in_8bit") or stated.get("quant_method") in ("fp8", "fbgemm_fp8"):
        return 8.0
    if stated.get("quant_method") in ("gptq", "awq"):  # scale and zero of a group, often of 128 weights
        bits, group = stated.get("bits", 4), max(stated.get("group_size", 128), 32)
        return bits + (16 + bits) / group
    return None


def _halved(config: RunConfig, phases: Sequence[str]) -> RunConfig:
    """Return settings with half the batch in some phases, with as many rows a step as before; 1 stays 1."""
    for name in phases:
        if name == SELF:
            own = config.data.self_source
            half = replace(own, batch_size=max(1, own.batch_size // 2))
            config = replace(config, data=replace(config.data, self_source=half))
        elif name == "generating":
            generate = config.stage2.generate
            fewer = replace(generate, batch_size=max(1, generate.batch_size // 2))
            config = replace(config, stage2=replace(config.stage2, generate=fewer))
        elif (batch := (stage := getattr(config, name)).per_device_train_batch_size) > 1:
            twice = 2 * stage.gradient_accumulation_steps
            changed = replace(stage, per_device_train_batch_size=batch // 2, gradient_accumulation_steps=twice)
            config = replace(config, **{name: changed})
    return config


def _idle_experts(model: nn.Module, text: PreTrainedConfig) -> int:
    """Return the number of weights in the experts that a token is not routed to; 0 for a model without experts."""
    count = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    if not count or not chosen:
        return 0
    experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    return round(experts * (1 - chosen / count))


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
