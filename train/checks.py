"""What can be wrong with a run's input, looked at before its folder is taken: one line each."""

from __future__ import annotations

import os
from dataclasses import replace

import datasets
import torch
from pyarrow import compute

from data.magpie import SELF, names_self, only_self, prompt_sampling_of
from data.sources import parse
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError
from speculator.target.model import Target
from train.config import GenerateConfig, RunConfig, StageConfig
from train.initialise import check_options, head_config, parameters


def settings(config: RunConfig) -> None:
    """What is wrong with the settings by themselves."""
    head, generate = config.speculator, config.stage2.generate
    _positive("speculator", head, "n_predict")
    checked = check_options(head)
    _stage("stage1", config.stage1)
    if config.stage2.max_steps:
        _stage("stage2", config.stage2)
        weight = config.stage2.rejected_token_weight
        if weight is not None and weight <= 0:
            raise UserError(f"stage2.rejected_token_weight {weight:g} is not above 0")
        _positive("stage2.generate", generate, "max_rows", "prompt_tokens", "max_new_tokens", "batch_size")
        if generate.num_speculative_tokens < 0:
            raise UserError(
                f"stage2.generate.num_speculative_tokens {generate.num_speculative_tokens} is not at least 0"
            )
        deepest = checked.max_speculative_tokens
        if deepest is not None and generate.num_speculative_tokens > deepest:
            raise UserError(f"stage2.generate.num_speculative_tokens must be in 0..{deepest}, what the head can draft")
        if generate.prompt_tokens + generate.max_new_tokens < head.n_predict + 2:
            raise UserError(f"stage2.generate: its rows are too short for {head.n_predict} heads")
    _positive("data", config.data, "seq_length", "max_package_bytes")
    if config.data.max_tokens is not None:
        _positive("data", config.data, "max_tokens")
    if config.data.num_proc is not None and config.data.num_proc < 1:
        raise UserError("data.num_proc must be at least 1")
    if not 0 <= config.data.max_bad_rows <= 1:
        raise UserError(f"data.max_bad_rows {config.data.max_bad_rows} is not a share in 0..1")
    own_source(config)
    _positive("eval", config.eval, "validation_rows", "validation_prompts", "prompt_tokens", "max_prompts")
    if head.warm_start and head.initialise != "random":
        raise UserError("speculator.warm_start and speculator.initialise target are two beginnings: choose one")
    if config.data.seq_length < head.n_predict + 2:
        raise UserError(f"data.seq_length {config.data.seq_length} is too short for {head.n_predict} heads")
    losses = ("cross_entropy", "kl", "total_variation", "lk")
    if any(getattr(config.loss, name) < 0 for name in losses) or not any(getattr(config.loss, n) for n in losses):
        raise UserError(f"loss: {', '.join(losses)} must not be negative, nor all 0: nothing to train on")
    if config.loss.kl_temperature <= 0 or config.loss.head_decay <= 0:
        raise UserError("loss.kl_temperature and loss.head_decay must be above 0")
    if not config.eval.temperatures:
        raise UserError("eval.temperatures is empty: name one at least")
    for temperature in config.eval.temperatures:
        Sampling(temperature)
        if config.eval.temperatures.count(temperature) > 1:
            raise UserError(f"eval.temperatures: {temperature} is given twice")
    if not 0 <= config.seed < 2**32:
        raise UserError("seed must be in 0..4294967295")
    if head.inner_dim < 0:
        raise UserError("speculator.inner_dim must not be negative; 0 takes the target's size")
    if head.draft_vocab_size < 0:
        raise UserError("speculator.draft_vocab_size must not be negative; 0 drafts from all tokens")
    if config.loss.lk_eta < 0:
        raise UserError("loss.lk_eta must not be negative")
    if config.eval.max_new_tokens < 2:
        raise UserError("eval.max_new_tokens must be at least 2: the first new token is the prefill's")
    if config.eval.tune_prompts < 0:
        raise UserError("eval.tune_prompts must not be negative")
    if config.eval.tune_prompts and config.eval.max_new_tokens < head.n_predict + 2:
        raise UserError(
            f"eval.max_new_tokens must be at least {head.n_predict + 2}, so that a whole step can be tuned, or "
            "eval.tune_prompts 0"
        )


def own_source(config: RunConfig) -> None:
    """What is wrong with the settings of the source self, named or not."""
    own = config.data.self_source
    if [source.location for source in parse(config.data.sources)].count(SELF) > 1:
        raise UserError(f"data.sources names {SELF} twice")
    _positive("data.self_source", own, "max_rows", "turns", "max_prompt_tokens", "max_new_tokens", "batch_size")
    if not own.temperatures:
        raise UserError("data.self_source.temperatures is empty: name one at least")
    for temperature in own.temperatures:
        Sampling(temperature)
    prompt_sampling_of(own.prompt_temperature, own.prompt_top_p, "data.self_source.")


def _stage(name: str, stage: StageConfig) -> None:
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps")
    _positive(name, stage, "max_steps", "logging_steps", "eval_steps", "save_steps", *batch)
    for value in ("warmup_steps", "weight_decay", "max_grad_norm"):
        if not getattr(stage, value) >= 0:
            raise UserError(f"{name}.{value} must not be negative")
    if not stage.learning_rate > 0:
        raise UserError(f"{name}.learning_rate must be above 0")
    if not 0 <= stage.adam_beta2 < 1:
        raise UserError(f"{name}.adam_beta2 must be at least 0 and below 1")
    if stage.save_total_limit < 2:
        raise UserError(f"{name}.save_total_limit must be at least 2: a checkpoint is not whole while it is written")
    if stage.save_steps % stage.eval_steps:
        raise UserError(
            f"{name}.save_steps ({stage.save_steps}) must be a multiple of {name}.eval_steps ({stage.eval_steps}): "
            "the best checkpoint is chosen by its evaluation"
        )


def _positive(section: str, values: object, *names: str) -> None:
    for name in names:
        if getattr(values, name) < 1:
            raise UserError(f"{section}.{name} must be at least 1")


def fits_target(config: RunConfig, target: Target) -> None:
    """What does not fit the target."""
    head = config.speculator
    head_config(replace(head, draft_vocab_size=0), target.config).starts_from_target(head.initialise == "target")
    drafted, least = config.speculator.draft_vocab_size, max(1, len(target.eos_token_ids))
    if drafted and not least <= drafted <= target.vocab_size:
        raise UserError(
            f"speculator.draft_vocab_size {drafted} is neither 0 nor in {least}..{target.vocab_size}: no fewer than "
            f"the tokens that end a text, no more than {target.name} has"
        )
    _fits_memory(config, target)
    longest = {
        "data.seq_length": config.data.seq_length,
        "eval.prompt_tokens + eval.max_new_tokens": config.eval.prompt_tokens + config.eval.max_new_tokens,
    }
    if names_self(config.data.sources):
        own = config.data.self_source
        longest["data.self_source.max_prompt_tokens + data.self_source.max_new_tokens"] = (
            own.max_prompt_tokens + own.max_new_tokens
        )
    if config.stage2.max_steps:
        generate = config.stage2.generate
        own_sampling(generate)
        name, length = "stage2.generate.prompt_tokens", generate.prompt_tokens
        if only_self(config.data.sources):
            name, length = "data.self_source.max_prompt_tokens", config.data.self_source.max_prompt_tokens
        longest[f"{name} + stage2.generate.max_new_tokens"] = length + generate.max_new_tokens
    for name, length in longest.items():
        if length > target.context_length:
            raise UserError(f"{name} is {length}, but {target.name} has a context of {target.context_length}")


def _fits_memory(config: RunConfig, target: Target) -> None:
    """A head alone that can't be trained: float32 weights, their gradients and two moments of Adam."""
    weights = parameters(config.speculator, target.config)
    if target.device.type == "cuda":
        where, memory = "this GPU", torch.cuda.get_device_properties(target.device).total_memory
    else:
        where, memory = "this machine", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 16 * weights > memory:
        raise UserError(
            f"speculator: a head of {weights:,} weights needs {16 * weights / 1e9:,.0f} GB to train, and {where} has "
            f"{memory / 1e9:,.0f}; take a smaller inner_dim or n_predict, or tie_weights"
        )


def own_sampling(generate: GenerateConfig) -> list[Sampling]:
    """The distributions that the target's own text is drawn from: the prompts take them in turn."""
    if not generate.temperatures:
        raise UserError("stage2.generate.temperatures is empty: name one at least")
    return [Sampling(t, generate.top_k, generate.top_p, generate.min_p) for t in generate.temperatures]


def rows(
    config: RunConfig,
    target: Target,
    train_rows: datasets.Dataset,
    validation_rows: datasets.Dataset,
    processes: int,
    prompts: int | None = None,
) -> None:
    """What there is too little of, or what the target can't read."""
    for made in (train_rows, validation_rows):
        tables = made.with_format("arrow").iter(batch_size=1000)
        highest = max(compute.max(table["input_ids"].combine_chunks().flatten()).as_py() for table in tables)
        if highest >= target.vocab_size:
            raise UserError(
                f"the rows hold token {highest}, but {target.name} has only 0..{target.vocab_size - 1}: "
                "its tokenizer has tokens that it does not"
            )
    for name, have in (
        ("stage1", len(train_rows)),
        ("stage2", config.stage2.generate.max_rows if prompts is None else prompts),
    ):
        batch(name, getattr(config, name), have, processes)
    if len(validation_rows) < processes:
        raise UserError(f"{len(validation_rows)} validation rows are too few for {processes} processes")


def batch(name: str, stage: StageConfig, have: int, processes: int) -> None:
    """Too few rows for one step of a stage."""
    need = stage.per_device_train_batch_size * stage.gradient_accumulation_steps * processes
    if stage.max_steps and have < need:
        raise UserError(
            f"{have} rows to train on in {name} are less than one batch of {need}; take more or a smaller batch"
        )
