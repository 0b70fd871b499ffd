"""What a run will need, before anything of it is loaded: memory, time, disk, tokens.

Of the target its config is read, and nothing else; target and head are made without weights (`train.shapes`). Memory
is what tensors hold when they hold most. The allocator's own losses, CUDA's context and kernels (about a GB) come on
top. Times are bounds: what the operations take at the peak that a GPU's maker names, and what the weights take to be
read at its bandwidth. Nothing runs as fast as that.

Longer than other files: each of the tables is one idea with the others, and they share the parts' names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil

import torch
from transformers import PreTrainedConfig

from data.magpie import SELF, names_self, only_self
from eval.validation import NEW_TOKENS
from speculator.decoding.engine import PREFILL_CHUNK, RESERVED_NEW_TOKENS
from speculator.device import dtype_name
from speculator.errors import UserError, first_line
from speculator.tables import gigabytes, markdown_table
from speculator.target.gguf import read_config
from speculator.target.kv_cache import BUCKETS
from speculator.target.sharding import divided
from train.config import HERE, RunConfig, StageConfig
from train.place import Gpu, Place
from train.shapes import FORWARD, GRADIENTS, HEAD, LOSS, STATES, Pass, Shapes

TARGET, GATHERED, COPIES, WEIGHTS, MOMENTS, BUCKET, CACHE, STEP = (
    "the target's weights",
    "layers of it that other processes send",
    "their copies for oneDNN, at most",
    "the head's weights",
    "AdamW's moments",
    "buckets of the gradients' reduction",
    "KV cache",
    "a step's pass and logits",
)
_FROZEN, _TRAINED = (TARGET, GATHERED, COPIES), (WEIGHTS, GRADIENTS, MOMENTS, BUCKET)
_PARTS = (*_FROZEN, *_TRAINED, FORWARD, STATES, HEAD, LOSS, CACHE, STEP, "other")


def target_config(config: RunConfig) -> PreTrainedConfig:
    """The target's config: of a folder, a GGUF file or the hub.

    Raises:
        UserError: there is none to be read.
    """
    target = config.target
    try:
        return read_config(target.name_or_path, target.trust_remote_code, revision=target.revision)
    except UserError:
        raise
    except Exception as error:  # a damaged file fails anywhere in the libraries that read it
        raise UserError(f"target {target.name_or_path!r}: its config can't be read: {first_line(error)}") from None


def dtype_of(config: RunConfig, target: PreTrainedConfig, kind: str) -> torch.dtype:
    """What the target will be loaded as."""
    if config.target.dtype != "auto":
        return getattr(torch, config.target.dtype)
    stored = target.get_text_config().dtype or target.dtype
    return stored if kind != "cpu" and isinstance(stored, torch.dtype) else torch.float32


@dataclass(frozen=True)
class Writing:
    """Rows that the target writes, at most: of so many turns, each a prompt and an answer.

    Attributes:
        rows, batch_size: all of them, and those that are decoded together.
        prompt, answer: tokens of each turn.
        asks: whether the target writes the prompts as well.
        depth: of the drafts.
        context: what a row can't be longer than, if that is known.
    """

    rows: int
    batch_size: int
    prompt: int
    answer: int
    turns: int = 1
    asks: bool = False
    depth: int = 0
    context: int | None = None

    @property
    def length(self) -> int:
        """Tokens of a row."""
        length = self.turns * (self.prompt + self.answer)
        return min(length, self.context or length)

    @property
    def new(self) -> int:
        """Tokens of a row that the target writes."""
        return min(self.turns * (self.answer + self.asks * self.prompt), self.length)


def context_of(target: PreTrainedConfig | None) -> int | None:
    """The most tokens of a text, where the target's config is at hand and says so."""
    return getattr(target.get_text_config(), "max_position_embeddings", None) if target else None


def writings(config: RunConfig, target: PreTrainedConfig | None) -> dict[str, Writing]:
    """What the target of a run, known by its config, writes: before training, and between its stages."""
    found, own, generate, context = {}, config.data.self_source, config.stage2.generate, context_of(target)
    chats = Writing(
        own.max_rows, own.batch_size, own.max_prompt_tokens, own.max_new_tokens, own.turns, True, 0, context
    )
    if names_self(config.data.sources):
        found[SELF] = chats
    if config.stage2.max_steps:
        alone = only_self(config.data.sources)
        found["generating"] = Writing(
            generate.max_rows,
            generate.batch_size,
            own.max_prompt_tokens if alone else generate.prompt_tokens,
            generate.max_new_tokens,
            own.turns if alone else 1,
            alone,
            generate.num_speculative_tokens or config.speculator.n_predict,
            context,
        )
    return found


class Plan:
    """A run's needs.

    Args:
        config: of the run.
        target: the target's own config.
        place: where it is to be.

    Raises:
        UserError: as `Shapes`.
    """

    def __init__(self, config: RunConfig, target: PreTrainedConfig, place: Place):
        self.config, self.place = config, place
        self.parts = place.shards if config.target.parallel == "tp" else 1
        self.dtype = dtype_of(config, target, place.kind)
        self.shapes = Shapes(target, self.dtype, config.speculator, place.kind, self.parts)
        self.writings = writings(config, target)
        self.lengths = {"stage1": config.data.seq_length}
        if "generating" in self.writings:
            self.lengths["stage2"] = self.writings["generating"].length
        self.stages: dict[str, StageConfig] = {"stage1": config.stage1, "stage2": config.stage2}
        self.stages = {name: stage for name, stage in self.stages.items() if stage.max_steps}
        self.passes = {name: self._micro_step(name) for name in self.stages}

    def _micro_step(self, name: str) -> tuple[Pass, Pass]:
        """The target's part, and the head's."""
        stage, length = self.stages[name], self.lengths[name]
        rows, again = stage.per_device_train_batch_size, stage.gradient_accumulation_steps > 1
        forward = self.shapes.forward(length) * (rows * self.parts)  # of all rows of the group
        if gathered := self._gathered(forward.bytes):
            forward.peak[GATHERED] = gathered
        if again:
            forward.peak[GRADIENTS] = 4 * self.shapes.trained
        return forward, self.shapes.step(rows, length, self.config.loss, stage.bf16, again)

    # ---- memory

    def memory(self) -> dict[str, Counter[str]]:
        """Of each phase of a run, the bytes of each part in one process at the moment when their sum is largest."""
        shapes, config = self.shapes, self.config
        always = Counter({TARGET: shapes.bytes, COPIES: shapes.linear if self.place.kind == "cpu" else 0})
        if self.place.shards > self.parts:  # FSDP2
            always[TARGET] = shapes.bytes // self.place.shards + shapes.table  # the output matrix is whole as well
            always[COPIES] = 0
        trained = Counter({WEIGHTS: 4 * shapes.trained, MOMENTS: 8 * shapes.trained})
        if config.shard_optimizer:  # whole tensors of about as many numbers in each process
            largest_tensor = max(weight.numel() for weight in shapes.head.parameters() if weight.requires_grad)
            trained[MOMENTS] = 8 * max(shapes.trained // self.place.processes, largest_tensor)
        if self.place.processes > 1:
            trained[BUCKET] = 4 * shapes.trained
        largest = {name: max(parts, key=lambda part: part.bytes) for name, parts in self.passes.items()}
        needs = {name: always + trained + Counter(part.peak) for name, part in largest.items()}
        prompts = ceil(config.eval.validation_prompts / self.place.copies)
        decoded = self._decoding(prompts, config.eval.prompt_tokens, NEW_TOKENS, config.speculator.n_predict, 4)
        needs["evaluations"] = always + trained + decoded
        frozen = Counter({WEIGHTS: shapes.dtype.itemsize * shapes.trained})
        for name, own in self.writings.items():
            asked = max(1, own.length - own.answer)
            needs[name] = always + self._decoding(own.batch_size, asked, own.answer, own.depth)
            if own.depth:  # rows are decoded without a draft too, for its clock
                plain = self._decoding(own.batch_size, asked, own.answer, 0)
                needs[name] += frozen + Counter({CACHE: plain[CACHE]})
        return needs

    def _gathered(self, others: float = 0) -> float:
        """Bytes that FSDP2 adds to a pass of the target that holds so many others while a layer runs.

        A layer is there twice: as it was received, and as it is used. So is the embedding, before all others, unless
        it is the output matrix.
        """
        if self.place.shards == self.parts:
            return 0
        return max(2 * self.shapes.layer, 0 if self.shapes.tied else 2 * self.shapes.table - others)

    def _decoding(self, rows: int, prompt: int, new: int, depth: int, size: int | None = None) -> Counter[str]:
        """Of decoding rows together.

        Args:
            depth: of the drafts.
            size: bytes of a number of the head's; default: of the target's.
        """
        shapes, bucket = self.shapes, BUCKETS.get(self.place.kind, 1)
        positions = ceil((prompt + min(new, RESERVED_NEW_TOKENS) + 2 * (1 + depth) + bucket) / bucket) * bucket
        if new > RESERVED_NEW_TOKENS:  # it grows by half, and for a moment both are held
            positions = ceil((prompt + new) * (1.5 + 1))
        length = next(iter(self.lengths.values()))
        chunk = shapes.forward(length).bytes / length * rows * min(PREFILL_CHUNK, prompt)
        logits = rows * (1 + depth) * shapes.config.vocab_size * (shapes.dtype.itemsize + 3 * 4)
        drafts = rows * depth * shapes.config.vocab_size * (size or shapes.dtype.itemsize)
        kept = rows * positions * (shapes.position + (shapes.remembered if depth else 0))
        return Counter({CACHE: kept, STEP: max(chunk, logits + drafts), GATHERED: self._gathered()})

    def refuse_too_large(self) -> None:
        """Refuse what can't fit.

        Raises:
            UserError: one thing that the run does needs more than each device has.
        """
        if self.place.memory is None:
            return
        for name, parts in self.memory().items():
            need = sum(parts.values())
            if need > self.place.memory:
                (largest, size), *_ = parts.most_common()
                raise UserError(
                    f"{name} needs {gigabytes(need)} GB in each process, and {self.place.name} has "
                    f"{gigabytes(self.place.memory)}; "
                    f"{gigabytes(size)} of it are {largest}: {self._advice(name, largest)}"
                )

    def _advice(self, name: str, part: str) -> str:
        if part == TARGET:
            more = "" if self.place.shards > 1 else ", or shard it by target.parallel"
            return f"take a smaller target or a larger GPU{more}"
        if part in _TRAINED:
            return "take a smaller speculator.inner_dim or speculator.n_predict, or speculator.tie_weights"
        setting = {
            "evaluations": "eval.validation_prompts",
            "generating": "stage2.generate.batch_size",
            SELF: "data.self_source.batch_size",
        }
        rows = setting.get(name, f"{name}.per_device_train_batch_size")
        more = f" and more {name}.gradient_accumulation_steps" if name in self.stages else ""
        return f"take a smaller {rows}{more}"

    # ---- tokens, time, disk

    def tokens(self) -> dict[str, int]:
        """Of all processes: trained on, or new ones at most."""
        counts = {name: own.rows * own.new for name, own in self.writings.items()}
        for name in self.stages:
            counts[name] = self._steps(name) * self._rows(name) * self.lengths[name] * self.place.processes
        return {name: counts[name] for name in (SELF, "stage1", "generating", "stage2") if name in counts}

    def _steps(self, name: str) -> int:
        """Micro-batches of a process."""
        return self.stages[name].max_steps * self.stages[name].gradient_accumulation_steps

    def _rows(self, name: str) -> int:
        return self.stages[name].per_device_train_batch_size

    def operations(self) -> dict[str, tuple[float, float]]:
        """Of each process: floating-point operations in 16 bits, and in float32."""
        found = {}
        for name, tokens in self.tokens().items():
            if name in self.stages:
                target, head = (part.operations for part in self.passes[name])
                half = target * (self.dtype.itemsize == 2) + head * self.stages[name].bf16
                found[name] = half * self._steps(name), (target + head - half) * self._steps(name)
            else:  # each token goes through the target once, if every draft is accepted
                each = 2 * self.shapes.active * tokens / self.place.copies / self.parts
                found[name] = (each, 0.0) if self.dtype.itemsize == 2 else (0.0, each)
        return found

    def token_at_peak(self, name: str) -> float | None:
        """Seconds for the operations of a stage's token, at its GPU's peak; None where that is not known."""
        if self.place.gpu is None:
            return None
        tokens = self._steps(name) * self._rows(name) * self.lengths[name]
        return self._at_peak(self.place.gpu, *self.operations()[name]) / tokens

    @staticmethod
    def _at_peak(gpu: Gpu, half: float, single: float) -> float:
        return half / gpu.half / 1e12 + single / gpu.single / 1e12

    def traffic(self) -> dict[str, float]:
        """Of each process: the least bytes that are read and written: weights, and the optimiser's state."""
        shapes, found = self.shapes, {}
        for name in self.tokens():
            if name in self.stages:
                update = 28 * shapes.trained  # weight, gradient and both moments read, all but the gradient written
                each = shapes.bytes + 2 * 4 * shapes.trained
                found[name] = float(self._steps(name) * each + self.stages[name].max_steps * update)
                continue
            own = self.writings[name]
            batches = ceil(own.rows / own.batch_size / self.place.copies)
            read = self._read(own.batch_size * (1 + own.depth))
            context = own.batch_size * (own.length - own.new / 2) * shapes.position
            head = own.depth * shapes.head.config.output_size * shapes.head.config.inner_dim * self.dtype.itemsize
            found[name] = batches * ceil(own.new / (1 + own.depth)) * (read + context + head)
        return found

    def _read(self, tokens: int) -> float:
        """Bytes of weights that a pass of so many tokens reads: all, but of experts those that some token is sent to,
        if each chooses as if by lot."""
        asleep = (1 - self.shapes.chosen) ** tokens
        return self.shapes.bytes - self.shapes.experts * self.dtype.itemsize / self.parts * asleep

    def disk(self) -> dict[str, int]:
        """Bytes that the run writes and leaves."""
        head, found = self.shapes.trained, {}
        for name, stage in self.stages.items():
            # One is written before the oldest goes.
            kept = min(stage.save_total_limit + 1, ceil(stage.max_steps / stage.save_steps))
            found[f"{name}: {kept} checkpoints"] = 12 * head * kept
        found["the best heads"] = 4 * head * (1 + len(self.stages))
        if own := self.writings.get("generating"):
            found["generated rows, at most"] = 5 * own.rows * self.lengths["stage2"]
        return found

    # ---- as a text

    def __str__(self) -> str:
        shapes, place, config = self.shapes, self.place, self.config
        read = "" if shapes.chosen == 1 else f", {shapes.active / 1e9:,.2f} of them for a token"
        where = f"{place.processes} process{'es' if place.processes > 1 else ''}, each "
        where += f"with 1/{place.shards} of the target ({config.target.parallel}), on " if place.shards > 1 else "on "
        where += place.name if place.memory is None else f"one {place.name} of {gigabytes(place.memory)} GB"
        dtype = dtype_name(self.dtype)
        head = config.speculator
        lines = [
            f"target: {config.target.name_or_path}, {shapes.config.model_type}, {shapes.weights / 1e9:,.2f} billion "
            f"weights{read}, {dtype}",
            f"head: {head.architecture}, {shapes.trained / 1e6:,.1f} million weights to train, drafts {head.n_predict}",
            f"on {where}",
            "",
            self._memory_table(),
            "",
            self._work_table(),
            "",
            markdown_table(("disk, GB", ""), ((name, gigabytes(size)) for name, size in self.disk().items())),
            "",
            "Memory is what tensors hold; the allocator and CUDA itself take about a GB more. Times are bounds and no "
            "forecast: nothing runs as fast.",
        ]
        return "\n".join(lines)

    def _memory_table(self) -> str:
        needs = self.memory()
        rows: list[list[str]] = [
            [part, *(gigabytes(parts[part]) if parts[part] else "" for parts in needs.values())]
            for part in _PARTS
            if any(parts[part] for parts in needs.values())
        ]
        rows.append(["in all", *(gigabytes(sum(parts.values())) for parts in needs.values())])
        if self.place.memory is not None:
            fits = ["yes" if sum(parts.values()) <= self.place.memory else "NO" for parts in needs.values()]
            rows.append(["fits", *fits])
        return markdown_table(("memory of a process at the most, GB", *needs), rows)

    def _work_table(self) -> str:
        gpu, operations, traffic = self.place.gpu, self.operations(), self.traffic()
        rows = []
        for name, tokens in self.tokens().items():
            half, single = operations[name]
            times = ("", "")
            if gpu:
                times = (
                    _time(self._at_peak(gpu, half, single)),
                    _time(traffic[name] / gpu.bandwidth / 1e12),
                )
            rows.append((name, f"{tokens:,}", f"{(half + single) / 1e15:,.2f}", f"{traffic[name] / 1e12:,.2f}", *times))
        header = ("stage", "tokens", "PFLOP of a process", "TB read and written", "bound by operations", "by bandwidth")
        if not gpu:
            header, rows = header[:4], [row[:4] for row in rows]
        return markdown_table(header, rows)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def plan(config: RunConfig, processes: int) -> Plan:
    """What a run needs, where `config.plan` says it is to be.

    Raises:
        UserError: no such GPU or target, or one that can't be planned.
    """
    return Plan(config, target_config(config), place_of(config, config.plan or HERE, processes))


def place_of(config: RunConfig, wanted: str, processes: int) -> Place:
    """Where a run is to be, with the target in as many shards as it is configured.

    Raises:
        UserError: no such GPU; processes that can't be divided so; devices that one process shares out.
    """
    place, target = Place.of(wanted, processes), config.target
    if target.parallel == "device_map":
        raise UserError("target.parallel device_map: what lies on which GPU is not planned")
    sharded = target.parallel != "none"
    return replace(place, shards=divided(place.processes, target.parallel_size)) if sharded else place


def refuse_too_large(config: RunConfig, processes: int) -> None:
    """Refuse a run that can't fit the devices here, where their memory is known.

    What can't be planned goes through: whatever is wrong with it is said when it is loaded.

    Raises:
        UserError: some part of it does not fit.
    """
    try:
        place = place_of(config, HERE, processes)
        if place.memory is None:
            return
        made = Plan(config, target_config(config), place)
    except UserError:
        return
    made.refuse_too_large()


def token_at_peak(config: RunConfig, name: str, processes: int) -> float | None:
    """Of `Plan`, for a stage that runs here; None also where the run can't be planned."""
    try:
        place = place_of(config, HERE, processes)
        return None if place.gpu is None else Plan(config, target_config(config), place).token_at_peak(name)
    except UserError:
        return None
