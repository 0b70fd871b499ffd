"""The one typed config of a run: every field of it, with its line of help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

ROOT = Path(__file__).resolve().parents[1]
HERE = "here"
"""The plan of a run where it is started: --plan without a value."""


@dataclass
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
    """Of a target that is too large for one GPU: tp (tensor parallel) or fsdp shard it over processes, device_map lays
    it over the GPUs of one process."""
    parallel_size: NonNegativeInt = 0
    """Processes that hold a target together; 0: all. 8 GPUs and 4: two copies of the target, each on 4."""


@dataclass
class HeadOptions:
    """The draft head's architecture and shape."""

    architecture: str = "mlp"
    """mlp (arXiv 2404.19124), lstm (Arctic's) or eagle3 (attention over three of the target's layers)."""
    n_predict: PositiveInt = 4
    """Draft positions that training unrolls. mlp and lstm can draft no deeper."""
    inner_dim: NonNegativeInt = 0
    """Inner size of the head; 0 takes the target's."""
    draft_vocab_size: NonNegativeInt = 0
    """Number of tokens to draft from, the most frequent ones of the training text; 0 drafts from all."""
    initialise: Literal["random", "target"] = "random"
    """Initial weights: random, or the target's embedding and output matrices (needs inner_dim 0).
    An architecture that keeps the target's output matrix always starts from it."""
    warm_start: str | None = None
    """Folder of a trained head to start from, in any checkpoint layout; it must have the shape configured here."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the architecture itself, by the fields of its config: '{tie_weights: false}', '{fc_norm: false}'."""


@dataclass
class SelfSourceConfig:
    """What the source self writes before there is a head: chats of which the target writes both sides."""

    max_rows: PositiveInt = 4000
    """Chats that it begins; those whose prompt can't be used are dropped."""
    turns: PositiveInt = 1
    """Of the user in a chat, at most."""
    max_prompt_tokens: PositiveInt = 256
    """Tokens of a user's turn at most."""
    prompt_temperature: float = 1.0
    """Of the user's turns."""
    prompt_top_p: float = 0.99
    """Of the user's turns."""
    temperatures: list[float] = field(default_factory=lambda: [1.0])
    """Of the answers, which take them in turn."""
    max_new_tokens: PositiveInt = 256
    """Tokens of an answer at most."""
    batch_size: PositiveInt = 16
    """Rows decoded together."""


@dataclass
class DataConfig:
    """What to train on."""

    sources: list[str] = field(default_factory=lambda: ["python-sources"])
    """Each a hub dataset id, a local .jsonl, .json, .parquet or .txt (.gz too), a folder, python-sources, or self: the
    target writes it; @weight."""
    seq_length: PositiveInt = 256
    """Tokens per row."""
    max_tokens: PositiveInt | None = None
    """Use at most this many tokens."""
    max_package_bytes: PositiveInt = 2_000_000
    """python-sources: at most this much of each top-level package."""
    max_bad_rows: ClosedUnitInterval = 0.05
    """Rows that can't be used are left out, counted and shown; a larger share of them is an error; 0 allows none."""
    num_proc: PositiveInt | None = None
    """Processes that tokenise, whose number changes no row; default: one for each core, up to 8."""
    self_source: SelfSourceConfig = field(default_factory=SelfSourceConfig)
    """How the source self is written."""


@dataclass
class LossConfig:
    """Weights of the losses, which are summed over heads."""

    cross_entropy: NonNegativeFloat = 0.0
    """Of the token that the text goes on with: the published recipe."""
    kl: NonNegativeFloat = 1.0
    """Of the divergence from the target's own distribution of that token."""
    total_variation: NonNegativeFloat = 0.0
    """Of the chance that a sampled draft is rejected."""
    lk: NonNegativeFloat = 0.0
    """Of the LK hybrid: divergence while little is accepted, then the chance of rejection."""
    kl_temperature: PositiveFloat = 1.0
    """Softens both distributions in the divergence."""
    lk_eta: NonNegativeFloat = 3.0
    """How soon the hybrid turns from divergence to acceptance."""
    head_decay: PositiveFloat = 1.0
    """Head i counts head_decay^i times."""


@dataclass
class StageConfig:
    """One stage of training, in transformers' names."""

    max_steps: NonNegativeInt = 1000
    """Optimiser steps."""
    learning_rate: PositiveFloat = 5e-3
    """At its peak."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    """How the learning rate falls."""
    warmup_steps: NonNegativeInt = 50
    """Steps until the peak."""
    per_device_train_batch_size: PositiveInt = 8
    """Rows per process and forward pass."""
    gradient_accumulation_steps: PositiveInt = 1
    """Forward passes per optimiser step."""
    weight_decay: NonNegativeFloat = 0.0
    """On matrices; never on norms or biases."""
    adam_beta2: float = 0.95
    """AdamW's second-moment decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip gradients to this norm."""
    bf16: bool = False
    """Autocast to bfloat16; the master weights stay float32."""
    logging_steps: PositiveInt = 10
    """Steps between log lines."""
    eval_steps: PositiveInt = 200
    """Steps between evaluations."""
    save_steps: PositiveInt = 200
    """Steps between checkpoints: a multiple of eval_steps."""
    save_total_limit: int = 3
    """Checkpoints to keep, the best among them; at least 2."""


@dataclass
class GenerateConfig:
    """The target's own text: it continues prompts from the data, with the head of stage 1 drafting."""

    max_rows: PositiveInt = 2000
    """How many prompts it continues."""
    prompt_tokens: PositiveInt = 64
    """Tokens of each prompt cut from text; chat prompts are taken whole."""
    max_new_tokens: PositiveInt = 192
    """New tokens per prompt."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """0 is greedy. The prompts take them in turn: name those that the head will draft at."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that make up this much."""
    min_p: float = 0.0
    """Keep tokens at least this likely, as a share of the likeliest."""
    batch_size: PositiveInt = 8
    """Rows decoded together."""
    num_speculative_tokens: NonNegativeInt = 0
    """Tokens drafted per step; 0 takes what is the fastest here."""


@dataclass
class Stage2Config(StageConfig):
    """Training on the target's own text, from the best head of stage 1."""

    max_steps: NonNegativeInt = 400
    """Optimiser steps; 0 leaves this stage out."""
    learning_rate: PositiveFloat = 2e-3
    """At its peak."""
    rejected_token_weight: PositiveFloat | None = None
    """How many times a token counts where the target refused a draft while it wrote the text; default: once."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """What it trains on."""


@dataclass
class EvalConfig:
    """What is measured, while training and after it."""

    validation_rows: PositiveInt = 64
    """Rows for the loss and accuracies at each evaluation."""
    validation_prompts: PositiveInt = 16
    """Prompts decoded for the real acceptance_length at each evaluation."""
    prompt_tokens: PositiveInt = 64
    """Tokens of each prompt cut from held-out text."""
    tune_prompts: NonNegativeInt = 8
    """Of the validation prompts, those on which is tuned what the best head drafts, a chain or a tree; 0: no tuning."""
    max_prompts: PositiveInt = 32
    """Prompts of the final report."""
    max_new_tokens: int = 128
    """New tokens per prompt."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures of the final report."""


@dataclass
class RunConfig:
    """Everything that decides a run's result."""

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
    """Where everything goes."""
    overwrite_output_dir: bool = False
    """Delete what is there and start again."""
    dry_run: bool = False
    """Run both stages and the evaluation on tiny stand-ins, a step each, then say how large the real run is."""
    plan: str | None = None
    """Print what the run needs in memory, time and disk, and do nothing else; here, or on GPUs named as in 8xH100."""
    seed: int = 0
    """Of the weights, the order of the data and the sampled drafts."""
    report_to: Literal["wandb", "none"] = "wandb"
    """wandb (offline unless a key is set) or none."""


def section_names(kind: type = RunConfig, path: str = "") -> Iterator[str]:
    """The dotted names of all sections."""
    for item in fields(kind):
        section = item.default_factory
        if isinstance(section, type) and is_dataclass(section):
            yield f"{path}{item.name}"
            yield from section_names(section, f"{path}{item.name}.")


def optional_names(kind: type = RunConfig, path: str = "") -> Iterator[str]:
    """The dotted names of the settings that may be null."""
    for item in fields(kind):
        section = item.default_factory
        if isinstance(section, type) and is_dataclass(section):
            yield from optional_names(section, f"{path}{item.name}.")
        elif "None" in str(item.type):
            yield f"{path}{item.name}"


def values_of(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and value of every setting; of a list one for each item."""
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from values_of(value, f"{path}{item.name}.")
        else:
            yield from ((f"{path}{item.name}", each) for each in (value if isinstance(value, list) else [value]))
