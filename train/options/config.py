"""The typed config of a run; the string below a field is its help text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from eval.tracking import Tracker
from train.options.loader import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share
from train.options.loss_table import LOSSES, Loss

ROOT = Path(__file__).resolve().parents[2]
HERE = "here"
"""Value of --plan without an argument: the devices of this machine."""


@dataclass(frozen=True)
class TargetConfig:
    """The model to draft for."""

    name_or_path: str = "examples/stdlib_target"
    """Hub id, local folder or GGUF file of a causal LM."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto, float32, bfloat16 or float16; auto is the checkpoint's own, float32 on a CPU."""
    adapter: str | None = None
    """Hub id or local folder of a PEFT adapter of the target; needs the package peft."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target."""
    parallel: Literal["none", "tp", "fsdp", "device_map"] = "none"
    """Sharding of a target that is too large for one GPU: tp (tensor parallel) or fsdp over processes, to train
    without decoding; device_map over the GPUs of one process."""
    parallel_size: NonNegativeInt = 0
    """Processes that hold a target together; 0: all. 8 GPUs and 4: two copies of the target, each on 4."""
    server: list[str] = field(default_factory=list)
    """Base URLs of vLLM servers that run the target and give its hidden states; `speculator server-command` prints
    the line that starts one. This process then loads what is outside the layers."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as you serve it: '{enable_thinking: false}'."""


@dataclass(frozen=True)
class HeadOptions:
    """The draft head's architecture and shape."""

    architecture: str = "mlp"
    """mlp (arXiv 2404.19124), eagle3 (attention over the target's layers), dspark (blocks) or mtp (the
    layer that the target ships)."""
    n_predict: PositiveInt = 4
    """Draft positions that training unrolls. mlp can draft no deeper."""
    inner_dim: NonNegativeInt = 0
    """Inner size of the head; 0 takes the target's."""
    draft_vocab_size: NonNegativeInt = 0
    """Number of tokens to draft from, the most frequent ones of the training text; 0, or more than the target has,
    drafts from all."""
    initialise: Literal["random", "target"] = "random"
    """Initial weights: random, or the target's embedding and output matrices (needs inner_dim 0), or its MTP layers.
    An architecture that keeps the target's output matrix always starts from it."""
    warm_start: str | None = None
    """Folder or hub id of a trained head to start from, in any checkpoint layout. Its architecture, sizes and options
    apply where none are given; those that are given must be the same."""
    warm_start_revision: str | None = None
    """Hub branch, tag or commit of warm_start."""
    served_by: Literal["vllm", "sglang", "llama.cpp"] | None = None
    """Program that has to load the head, vllm, sglang or llama.cpp: a run whose head it can't load is rejected."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the architecture itself, by the fields of its config: '{fc_norm: false}', or one by one as
    --speculator.options.fc_norm false. They are added to those of the recipe; null takes the default."""


@dataclass(frozen=True)
class SelfSourceConfig:
    """The source `self`: chats of which the target writes both sides, before training."""

    max_rows: PositiveInt = 4000
    """Number of chats to begin; chats with an unusable prompt are dropped."""
    turns: PositiveInt = 1
    """Maximum number of user turns in a chat."""
    max_prompt_tokens: PositiveInt = 256
    """Maximum number of tokens of a user turn."""
    temperatures: list[float] = field(default_factory=lambda: [1.0])
    """Sampling temperatures of the answers, each for an equal share of them."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens of an answer."""
    batch_size: PositiveInt = 16
    """Rows decoded together; of a target in servers the concurrent requests to each, at least 32."""


@dataclass(frozen=True)
class DataConfig:
    """The training data."""

    sources: list[str] = field(default_factory=lambda: ["python-sources"])
    """Hub dataset ids, local .jsonl, .json, .parquet, .txt, .md, .rst or .py files (also .gz), folders, python-sources,
    or self (text that the target writes); each may end in @weight."""
    seq_length: NonNegativeInt = 256
    """Maximum number of tokens per row; 0 takes the target's context, at most 4,096, or for a warm start the length
    that its head was trained on."""
    max_tokens: PositiveInt | None = None
    """Maximum number of training tokens (default: all)."""
    raw: bool = False
    """Never apply the target's chat template: prompts and completions stay text."""
    max_bad_rows: Share = 0.05
    """Maximum share of unusable rows, which are left out and counted; a larger share is an error."""
    num_proc: PositiveInt | None = None
    """Number of tokenising processes (default: one per core, up to 8); it does not change the rows."""
    seed: NonNegativeInt = 0
    """Seed of the text that the target writes, for self and stage 2. Runs that differ in `seed` alone train on the same
    text."""
    self_source: SelfSourceConfig = field(default_factory=SelfSourceConfig)
    """Settings of the source self."""


@dataclass(frozen=True)
class LossConfig:
    """Weights of the losses, which are summed over draft positions."""

    cross_entropy: NonNegativeFloat = 0.0
    """Weight of the cross-entropy with the next token of the text."""
    kl: NonNegativeFloat = 1.0
    """Weight of the KL divergence from the target's distribution of that token."""
    total_variation: NonNegativeFloat = 0.0
    """Weight of the total variation: the chance that a sampled draft token is rejected."""
    lk: NonNegativeFloat = 0.0
    """Weight of the LK hybrid: KL divergence while little is accepted, then total variation."""
    head_decay: PositiveFloat = 1.0
    """Decay of the weight per draft position: position i has weight head_decay^i."""
    d_pace: Share = 1.0
    """Smoothing alpha of D-PACE (arXiv 2605.18810): each position is also weighted by how much it adds to the draft's
    expected length, with chances (1 - alpha) q + alpha of its tokens; 1: off."""

    @property
    def needs_target(self) -> bool:
        """True if a loss needs the target's distribution of a token, and not the token alone."""
        return any(loss.needs_target for loss in self.used().values())

    def used(self) -> dict[str, Loss]:
        """Return the losses that have a weight, by name."""
        return {name: loss for name, loss in LOSSES.items() if getattr(self, name)}


@dataclass(frozen=True)
class StageConfig:
    """One stage of training."""

    max_steps: NonNegativeInt = 1000
    """Optimiser steps, unless epochs is set."""
    epochs: PositiveFloat | None = None
    """Passes over the rows, in place of max_steps. Fewer rows make a step if an epoch had fewer than 50 steps; the
    learning rate then shrinks by the square root."""
    learning_rate: PositiveFloat = 5e-3
    """Peak learning rate."""
    base_batch_size: PositiveInt | None = None
    """Rows per step, over all processes, that learning_rate is for; it follows their square root. Default: those of
    this config."""
    base_width: PositiveInt | None = None
    """Hidden size of the target that learning_rate is for: a target of half the width has twice the rate. Default: the
    target's own."""
    lr_scheduler_type: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    """Schedule of the learning rate after the warm-up."""
    warmup_steps: NonNegativeFloat = 50
    """Warm-up steps until the peak learning rate; below 1, their share of all steps."""
    per_device_train_batch_size: PositiveInt = 8
    """Rows per process and forward pass."""
    gradient_accumulation_steps: PositiveInt = 1
    """Forward passes per optimiser step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon (torch.optim.Muon) for the matrices inside the head and adamw for embeddings, output matrix, norms
    and biases, at the same learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; norms and biases have none."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Norm to which gradients are clipped."""
    bf16: bool = False
    """Autocast to bfloat16; the master weights stay float32."""
    logging_steps: PositiveInt = 10
    """Steps between log lines."""
    eval_steps: PositiveInt = 200
    """Steps between evaluations."""
    save_steps: NonNegativeInt = 0
    """Steps between checkpoints, a multiple of eval_steps; 0 takes eval_steps."""
    save_total_limit: int = 3
    """Number of checkpoints to keep, the best among them; at least 2."""
    keep_states: bool = False
    """Keep the target's states in files of the cache, which later passes, and other runs on the same text, read: the
    target then reads each text once."""
    patience: PositiveInt | None = None
    """Number of checkpoints in a row without a better one after which the stage ends (default: train all steps)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "save_steps", self.save_steps or self.eval_steps)

    @property
    def rows_per_step(self) -> int:
        """Rows that one process reads in an optimiser step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps


@dataclass(frozen=True)
class GenerateConfig:
    """Generation of the target's own text: it continues prompts from the data, with the head of stage 1 drafting."""

    max_rows: PositiveInt = 2000
    """Number of prompts."""
    prompt_tokens: PositiveInt = 64
    """Tokens of each prompt cut from text; chat prompts are taken whole."""
    max_new_tokens: PositiveInt = 192
    """New tokens per answer."""
    turns: PositiveInt | Literal["all"] = "all"
    """Answers to write in each chat: all, each after the answers before it, or the first few. The source self alone has
    data.self_source.turns."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Sampling temperatures, each for an equal share of the rows (0: greedy); name those that the head will draft
    at."""
    top_k: int = 0
    """Sample from the k likeliest tokens only (0: all)."""
    top_p: float = 1.0
    """Sample from the likeliest tokens with this total probability."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability."""
    batch_size: PositiveInt = 8
    """Rows decoded together; of a target in servers the concurrent requests to each, at least 32."""
    num_speculative_tokens: NonNegativeInt = 0
    """Tokens to draft per step (0: adaptive drafting); servers of the target draft as they were started."""


@dataclass(frozen=True)
class Stage2Config(StageConfig):
    """Training on the target's own text, from the best head of stage 1."""

    max_steps: NonNegativeInt = 400
    """Optimiser steps, unless epochs is set (0: no second stage)."""
    learning_rate: PositiveFloat = 2e-3
    """Peak learning rate."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """Generation of the training text."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluations during and after training."""

    validation_rows: PositiveInt = 64
    """Rows for the loss, the accuracies and the forecast at each evaluation; the forecast chooses the checkpoint."""
    validation_prompts: PositiveInt = 16
    """Prompts that are decoded at each evaluation, for the acceptance length."""
    prompt_tokens: PositiveInt = 64
    """Tokens of each prompt cut from held-out text."""
    tune_prompts: NonNegativeInt = 8
    """Validation prompts on which the best head is tuned for adaptive drafting (0: no tuning)."""
    max_prompts: PositiveInt = 32
    """Prompts of the final report."""
    max_new_tokens: int = 128
    """New tokens per prompt."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures of the final report."""


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run."""

    target: TargetConfig = field(default_factory=TargetConfig)
    speculator: HeadOptions = field(default_factory=HeadOptions)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    stage1: StageConfig = field(default_factory=StageConfig)
    stage2: Stage2Config = field(default_factory=Stage2Config)
    eval: EvalConfig = field(default_factory=EvalConfig)
    shard_optimizer: bool = False
    """Split Adam's moments among the processes (ZeRO-1); the head stays whole in each."""
    output_dir: str = "runs/speculator"
    """Folder of the run."""
    overwrite_output_dir: bool = False
    """Delete the run in that folder and start again."""
    dry_run: bool = False
    """Run both stages and the evaluation on tiny stand-ins, one step each, and keep nothing."""
    plan: str | None = None
    """Print the memory and time that the run needs, and the disk for kept states, and stop; on this machine, or on GPUs
    such as 8xH100."""
    seed: int = 0
    """Seed of the weights, the order of the data and the sampling."""
    deterministic: bool = False
    """Ask torch for operations whose results repeat exactly on a GPU (slower; torch warns of those that cannot)."""
    report_to: Tracker = "wandb"
    """Tracker: wandb (offline unless WANDB_MODE is online); tensorboard, trackio or mlflow (local files); or none."""

    @property
    def same_command(self) -> str:
        """The command that resumes this run, for messages; with `overwrite_output_dir` the same one begins again."""
        return "the same command" + (" without overwrite_output_dir" if self.overwrite_output_dir else "")


def values_of(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every setting in a section or config; a list gives a pair per item."""
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from values_of(value, f"{path}{item.name}.")
        else:
            yield from ((f"{path}{item.name}", each) for each in (value if isinstance(value, list) else [value]))
