"""Checks of a run's input, before its folder is created."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from pyarrow import compute
from transformers import PreTrainedConfig

from data.cli.flags import THINKING_TOKENS
from data.mixture import SELF
from speculator.chat import thinks
from speculator.checkpoints import head_folder, load_any, shipped
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError, refuse
from speculator.target.base import TrainingTarget
from speculator.target.probe import usable_context
from speculator.target.sharding import SHARDED
from speculator.terminal import log
from train.config import RunConfig, StageConfig
from train.initialise import parameters, start_of, without_memory
from train.muon import bytes_of_moments

if TYPE_CHECKING:
    from train.settle import Run

_THOUGHTS = 1024  # tokens; few thoughts are shorter
_LEAST_DRAFTED = 16  # tokens of a draft vocabulary: several children of a token have to be among them


def settings(run: Run) -> None:
    """Raise a UserError for settings that are out of range or contradict each other, before the target is loaded.

    The head of a warm start is loaded, since its files may be damaged.
    """
    config = run.config
    head, generate = config.speculator, config.stage2.generate
    if head.warm_start:
        # What is wrong with its weights is found before hours of preparation.
        load_any(head_folder(head.warm_start, head.warm_start_revision))
    if head.warm_start_revision and not head.warm_start:
        raise UserError("speculator.warm_start_revision needs speculator.warm_start")
    if head.warm_start and head.initialise != "random":
        raise UserError("speculator.warm_start and speculator.initialise target are mutually exclusive")
    if 0 < head.draft_vocab_size < _LEAST_DRAFTED:
        raise UserError(f"speculator.draft_vocab_size must be 0 (all tokens) or at least {_LEAST_DRAFTED}")
    _stage("stage1", config.stage1)
    if not config.stage1.max_steps:
        raise UserError("stage1.max_steps must be at least 1")
    if config.stage2.max_steps:
        _stage("stage2", config.stage2)
        deepest = run.head.max_speculative_tokens
        if deepest is not None and generate.num_speculative_tokens > deepest:
            raise UserError(f"stage2.generate.num_speculative_tokens must be in 0..{deepest}, what the head can draft")
        if generate.prompt_tokens + generate.max_new_tokens < head.n_predict + 2:
            raise UserError(f"stage2.generate: prompt_tokens + max_new_tokens must be at least {head.n_predict + 2}")
    stages = {"stage1": config.stage1, "stage2": config.stage2}
    where = "server" if config.target.server else "parallel" if config.target.parallel in SHARDED else ""
    for name, stage in ((name, stage) for name, stage in stages.items() if stage.max_steps):
        refuse(
            (
                stage.keep_states and where,
                f"{name}.keep_states needs a target that is whole in each process, not target.{where}",
            ),
            (
                config.shard_optimizer and stage.optimizer == "muon",
                f"shard_optimizer splits AdamW's moments; it needs --{name}.optimizer adamw, at half the rate of a "
                "recipe with Muon",
            ),
        )
    if 0 < config.data.seq_length < head.n_predict + 2:
        raise UserError(f"data.seq_length must be at least {head.n_predict + 2} for n_predict {head.n_predict}")
    if run.mixture.locations.count(SELF) > 1:
        raise UserError(f"data.sources names {SELF} twice")
    refuse(
        (
            config.target.parallel == "device_map" and run.processes > 1,
            f"target.parallel device_map spreads the target over all GPUs of one process, and this run has "
            f"{run.processes}: start it without accelerate launch, or shard the target by tp or fsdp",
        )
    )
    if config.target.server:
        _server(config)
    elif config.target.parallel in SHARDED:
        check_writes_no_text(run, f"target.parallel {config.target.parallel}", ", or take --target.parallel device_map")
    losses = ("cross_entropy", "kl", "total_variation", "lk")
    if not any(getattr(config.loss, name) for name in losses):
        raise UserError(f"loss: at least one of {', '.join(losses)} must be above 0")
    for section, temperatures in (
        ("eval", config.eval.temperatures),
        ("data.self_source", config.data.self_source.temperatures),
        ("stage2.generate", generate.temperatures),
    ):
        if not temperatures or len(set(temperatures)) < len(temperatures):
            raise UserError(f"{section}.temperatures must be distinct, and at least one")
    samplings("eval", config.eval.temperatures)
    if not 0 <= config.seed < 2**32:
        raise UserError("seed must be in 0..4294967295")
    if config.eval.max_new_tokens < 2:
        raise UserError("eval.max_new_tokens must be at least 2: the first new token comes from the prefill")


def samplings(section: str, temperatures: list[float], **filters: Any) -> tuple[Sampling, ...]:
    """Return a `Sampling` for each temperature of a section, with `filters` such as top_p.

    A UserError about a value names the section.
    """
    try:
        return tuple(Sampling(temperature, **filters) for temperature in temperatures)
    except UserError as error:
        raise UserError(f"{section}.{error}") from None


def _server(config: RunConfig) -> None:
    """Raise a UserError for settings that a target on servers can't have."""
    target = config.target
    refuse(
        (target.parallel != "none", "target.server and target.parallel are mutually exclusive"),
        (target.parallel_size, "target.parallel_size needs parallel tp or fsdp, which target.server excludes"),
        (target.adapter, "target.server: servers run merged weights; merge the adapter"),
    )


def check_writes_no_text(run: Run, why: str, instead: str = "") -> None:
    """Raise a UserError if a run needs text of a target that can't be decoded here.

    Args:
        why: the reason, which begins the message.
        instead: further advice, which ends it.
    """
    wanted = (f"the source {SELF}", run.mixture.names_self), ("stage 2", bool(run.config.stage2.max_steps))
    for what in (name for name, asked in wanted if asked):
        raise UserError(
            f"{why}: the target trains and writes no text, so there is no {what}; let a server that runs it, such as "
            "vLLM, write the text beforehand (speculator data generate --server URL --max_new_tokens N, which has room "
            f"for its thoughts), name its folder in data.sources, and set --stage2.max_steps 0{instead}"
        )


def warn_of_warm_up(name: str, stage: StageConfig) -> None:
    """Print a warning if a stage whose steps are known ends before its warm-up."""
    if 0 < stage.max_steps < stage.warmup_steps:
        log(
            f"warning: {name}.warmup_steps ({stage.warmup_steps}) exceeds the {stage.max_steps} steps of {name}: "
            "the learning rate never reaches its peak"
        )


def _stage(name: str, stage: StageConfig) -> None:
    """Raise a UserError for settings of the stage `name` that are out of range or contradict each other."""
    if stage.save_total_limit < 2:
        raise UserError(f"{name}.save_total_limit must be at least 2: a checkpoint is incomplete while it is written")
    if stage.save_steps % stage.eval_steps:
        raise UserError(
            f"{name}.save_steps ({stage.save_steps}) must be a multiple of {name}.eval_steps ({stage.eval_steps}): "
            "the best checkpoint is chosen by its evaluation"
        )


def check_is_decoder(name: str, target: PreTrainedConfig) -> None:
    """Raise a UserError for an encoder-decoder model."""
    if target.is_encoder_decoder:
        raise UserError(
            f"{name} is an encoder-decoder model, for which no head is trained: n-gram lookup and draft models draft "
            "for it"
        )


def fits_config(run: Run) -> None:
    """Raise a UserError if a configured length exceeds the context in the target's config, if that states one."""
    context = usable_context(run.text)
    if context:
        # see `ServerTarget.context_length`
        _fits_context(run, run.config.target.name_or_path, context - bool(run.config.target.server))


def fits_target(run: Run, target: TrainingTarget) -> None:
    """Raise a UserError if the head or a length does not fit the target, or the head the memory."""
    config, head = run.config, run.config.speculator
    run.head.starts_from_target(head.initialise == "target")
    start = start_of(config)
    if start is not None and not head.warm_start:
        shipped(Path(start))
    drafted, least = config.speculator.draft_vocab_size, len(target.eos_token_ids)
    if 0 < drafted < least:  # one as large as the target's vocabulary was left out
        raise UserError(
            f"speculator.draft_vocab_size {drafted} is neither 0 nor in {least}..{target.vocab_size}: no fewer than "
            f"the tokens that end a text, no more than {target.name} has"
        )
    _warn_of_thoughts(run, target)
    _fits_memory(run, target)
    _fits_context(run, target.name, target.context_length)


def _warn_of_thoughts(run: Run, target: TrainingTarget) -> None:
    """Print a warning for each limit of generated answers that most thoughts would reach."""
    written = {
        "data.self_source": run.mixture.names_self and run.config.data.self_source.max_new_tokens,
        "stage2.generate": run.config.stage2.max_steps and run.config.stage2.generate.max_new_tokens,
    }
    low = [f"{name}.max_new_tokens {limit}" for name, limit in written.items() if 0 < limit < _THOUGHTS]
    if low and thinks(target.tokenizer):
        log(
            f"warning: {target.name} may think before it answers, and {' and '.join(low)} cuts its thoughts: take "
            f"{THINKING_TOKENS}, or set target.chat_template_kwargs so that it does not think"
        )


def _fits_context(run: Run, target: str, context: int) -> None:
    """Raise a UserError if a configured length exceeds `context` tokens; `target` is the name in the message."""
    config = run.config
    longest = {
        "data.seq_length": config.data.seq_length,
        "eval.prompt_tokens + eval.max_new_tokens": config.eval.prompt_tokens + config.eval.max_new_tokens,
    }
    if run.mixture.names_self:
        own = config.data.self_source
        longest["data.self_source.max_prompt_tokens + data.self_source.max_new_tokens"] = (
            own.max_prompt_tokens + own.max_new_tokens
        )
    if config.stage2.max_steps:
        generate = config.stage2.generate
        name, length = "stage2.generate.prompt_tokens", generate.prompt_tokens
        if run.mixture.is_self:
            name, length = "data.self_source.max_prompt_tokens", config.data.self_source.max_prompt_tokens
        longest[f"{name} + stage2.generate.max_new_tokens"] = length + generate.max_new_tokens
    for name, length in longest.items():
        if length > context:
            room = f"servers read texts of at most {context} tokens" if config.target.server else ""
            raise UserError(f"{name} is {length}, but {room or f'{target} has a context of {context}'}")


def _fits_memory(run: Run, target: TrainingTarget) -> None:
    """Raise a UserError if training the head, even without the target, exceeds the memory of the target's device.

    It takes weights, gradients and moments. A GPU has its own memory, any other device this machine's.
    """
    need = _bytes_to_train(run)
    if target.device.type == "cuda":
        where, memory = "this GPU", torch.cuda.get_device_properties(target.device).total_memory
    else:
        where, memory = "this machine", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > memory:
        raise UserError(
            f"speculator: a head of {parameters(run):,} weights needs {need / 1e9:,.0f} GB to train, and {where} has "
            f"{memory / 1e9:,.0f}; take a smaller speculator.inner_dim or speculator.n_predict, or "
            "speculator.options.tie_weights, or split the moments over more GPUs by shard_optimizer"
        )


def _bytes_to_train(run: Run) -> int:
    """Return the bytes of the head's weights, gradients and moments in one process, as `Plan.memory` counts them.

    With two stages, it is the larger one's.
    """
    head, shared = without_memory(run), run.processes if run.config.shard_optimizer else 1
    count = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    stages = [stage for stage in (run.config.stage1, run.config.stage2) if stage.max_steps]
    return max(8 * count + bytes_of_moments(head, stage.optimizer, shared) for stage in stages)


def rows(
    run: Run,
    target: TrainingTarget,
    train_rows: datasets.Dataset,
    validation_rows: datasets.Dataset,
    prompts: int | None = None,
) -> None:
    """Raise a UserError if rows hold a token that the target does not have, or are too few.

    Training rows have to fill an optimiser step of stage 1, and prompts one of stage 2. Each process needs a validation
    row.

    Args:
        prompts: number of prompts that stage 2 answers; None: `stage2.generate.max_rows`.
    """
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
        ("stage2", run.config.stage2.generate.max_rows if prompts is None else prompts),
    ):
        batch(run, name, have)
    if len(validation_rows) < run.processes:
        raise UserError(f"{len(validation_rows)} validation rows are too few for {run.processes} processes")


def batch(run: Run, name: str, have: int) -> None:
    """Raise a UserError if `have` rows don't fill one step of "stage1" or "stage2" (`name`) on all processes."""
    stage = run.stage(name, have)
    need = stage.rows_per_step * run.processes
    if stage.max_steps and have < need:
        raise UserError(
            f"{have} rows to train on in {name} are less than one batch of {need}; take more or a smaller batch, or "
            f"set --{name}.epochs, which fits the batch to the rows"
        )
