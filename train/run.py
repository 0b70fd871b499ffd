"""One run, from the config to the report: every stage picks up where a run that was cut off left it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import datasets
import torch
from accelerate import PartialState
from transformers import AutoModel, set_seed
from transformers.utils import logging as transformers_logging

from data.prepare import token_rows
from eval.acceptance import real_acceptance
from eval.run import evaluate
from eval.suites import Suite, from_text
from speculator.errors import UserError, run_command
from speculator.export.card import write_card
from speculator.heads import ARCHITECTURES, Speculator, load_head
from speculator.target import Target
from train import checkpoint
from train.config import RunConfig
from train.folder import claim, refuse_foreign
from train.initialise import from_target
from train.trainer import Collator, SpeculatorTrainer, arguments


def main(config: RunConfig) -> int:
    """Run; gives the exit code. Wrong input is one line on stderr and 2."""
    return run_command("train.py", lambda: _run(config))


def _run(config: RunConfig) -> None:
    folder = Path(config.output_dir)
    state = PartialState(cpu=not torch.accelerator.is_available())
    _check_settings(config)
    if state.is_main_process:
        refuse_foreign(folder, config)
    state.wait_for_everyone()
    report = folder / "eval" / "report.json"
    if report.exists() and not config.overwrite_output_dir:
        state.print(f"{folder} is done: see {report.with_suffix('.md')} (--overwrite_output_dir starts again)")
        return
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    use_all_cores()
    set_seed(config.seed)
    target = Target.load(config.target.name_or_path, revision=config.target.revision, dtype=config.target.dtype)
    _check_target(config, target)
    train_rows, validation_rows = rows(config, target, "train"), rows(config, target, "validation")
    prompts = {
        "validation": prompts_of(config, target, "validation", config.eval.validation_prompts),
        "held-out": prompts_of(config, target, "held-out", config.eval.max_prompts),
    }
    _check_rows(config, train_rows, validation_rows, state.num_processes)

    # Everything that can be wrong with the input has been looked at: the folder is taken now.
    if state.is_main_process:
        claim(folder, config, state.num_processes)
    state.wait_for_everyone()
    head_folder = folder / "speculator"
    if not head_folder.exists():
        train_stage1(config, target, train_rows, validation_rows, prompts["validation"].prompts, head_folder)
    state.wait_for_everyone()
    if state.is_main_process:
        evaluate(
            target,
            load_head(head_folder, target),
            [prompts["held-out"]],
            folder / "eval",
            temperatures=config.eval.temperatures,
            max_new_tokens=config.eval.max_new_tokens,
            speculator_name=str(head_folder),
            seed=config.seed,
        )
        write_card(head_folder)
        print(f"\n{(folder / 'eval' / 'report.md').read_text()}\nThe report and its plots are in {folder / 'eval'}")


def use_all_cores() -> None:
    """Undo the one intra-op thread that accelerate's launcher forces on a CPU run."""
    if not torch.accelerator.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def new_head(config: RunConfig, target: Target) -> Speculator:
    """A fresh head of the configured shape: float32 master weights, whatever the target's dtype."""
    torch.manual_seed(config.seed)
    shape = dataclasses.asdict(config.speculator)
    initialise = shape.pop("initialise")
    config_class, head_class = ARCHITECTURES[shape.pop("architecture")]
    head = head_class(
        config_class(
            vocab_size=target.vocab_size,
            emb_dim=target.hidden_size,
            base_model_name_or_path=config.target.name_or_path,
            trained_length=config.data.seq_length,
            training_data=config.data.sources,
            **shape,
        )
    )
    if initialise == "target":
        from_target(head, target)
    return head


def rows(config: RunConfig, target: Target, split: str) -> datasets.Dataset:
    """The packed rows of one split."""
    return token_rows(
        config.data.sources,
        split,
        target.tokenizer,
        config.data.seq_length,
        max_tokens=config.data.max_tokens if split == "train" else None,
        max_package_bytes=config.data.max_package_bytes,
    )


def prompts_of(config: RunConfig, target: Target, split: str, count: int) -> Suite:
    """Prompts cut from one split."""
    return from_text(
        config.data.sources,
        target.tokenizer,
        config.eval.prompt_tokens,
        count,
        split=split,
        max_package_bytes=config.data.max_package_bytes,
    )


def train_stage1(
    config: RunConfig,
    target: Target,
    train_rows: datasets.Dataset,
    validation_rows: datasets.Dataset,
    prompts: list[list[int]],
    head_folder: Path,
) -> None:
    """Train on text; leaves the best head in `head_folder`."""
    stage = Path(config.output_dir) / "stage1"
    _set_up_tracking(config)
    processes = PartialState().num_processes
    count = min(config.eval.validation_rows, len(validation_rows))
    batch = max(1, min(config.stage1.per_device_train_batch_size, count // processes))
    count -= count % (batch * processes)  # whole batches: a short one would be filled up with rows seen before
    trainer = SpeculatorTrainer(
        model=new_head(config, target),
        target=target,
        loss=config.loss,
        decode=lambda head: real_acceptance(target, head, prompts, seed=config.seed),
        args=arguments(
            output_dir=str(stage),
            run_name=Path(config.output_dir).name,
            report_to=config.report_to,
            seed=config.seed,
            per_device_eval_batch_size=batch,
            **dataclasses.asdict(config.stage1),
        ),
        data_collator=Collator(config.speculator.n_predict),
        train_dataset=train_rows,
        eval_dataset=validation_rows.select(range(count)),
    )
    resume, passed_over = checkpoint.newest(stage)
    if trainer.is_world_process_zero():
        for line in passed_over:
            print(line, file=sys.stderr)
        if resume:
            print(f"going on from {resume}", file=sys.stderr)
        shape = f"{trainer.model.num_parameters() / 1e6:.1f}M parameters, {len(train_rows)} rows"
        print(f"stage 1: {shape}, {processes} process{'es' if processes > 1 else ''}", file=sys.stderr)
    best = _best_of_finished(resume, config.stage1.max_steps)
    if best is None:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if trainer.is_world_process_zero():
        head = AutoModel.from_pretrained(best) if best else trainer.accelerator.unwrap_model(trainer.model)
        scratch = head_folder.with_name("speculator.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        head.save_pretrained(scratch)
        scratch.rename(head_folder)


def _best_of_finished(newest: Path | None, max_steps: int) -> Path | None:
    """The best checkpoint of a stage that was cut off after its last step; None if there are steps to go."""
    if newest is None:
        return None
    state = json.loads((newest / "trainer_state.json").read_text())
    if state["global_step"] < max_steps:
        return None
    best = state["best_model_checkpoint"]  # none where the stage was too short for an evaluation
    return newest.with_name(Path(best).name) if best else newest


def _check_settings(config: RunConfig) -> None:
    """What is wrong with the settings by themselves."""
    stage, head = config.stage1, config.speculator
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps")
    positive = {
        "stage1": ("max_steps", "logging_steps", "eval_steps", "save_steps", *batch),
        "eval": ("validation_rows", "validation_prompts", "prompt_tokens", "max_prompts"),
        "speculator": ("n_predict",),
    }
    for section, names in positive.items():
        for name in names:
            if getattr(getattr(config, section), name) < 1:
                raise UserError(f"{section}.{name} must be at least 1")
    if stage.save_total_limit < 2:
        raise UserError("stage1.save_total_limit must be at least 2: a checkpoint is not whole while it is written")
    if stage.save_steps % stage.eval_steps:
        raise UserError(
            f"stage1.save_steps ({stage.save_steps}) must be a multiple of stage1.eval_steps ({stage.eval_steps}): "
            "the best checkpoint is chosen by its evaluation"
        )
    if head.tie_weights and head.n_predict == 1:
        raise UserError("speculator.tie_weights needs speculator.n_predict of at least 2: there is nothing to tie")
    if head.architecture == "lstm" and not head.tie_weights:
        raise UserError("speculator.tie_weights must be true: there is no untied LSTM head")
    if config.data.seq_length < head.n_predict + 2:
        raise UserError(f"data.seq_length {config.data.seq_length} is too short for {head.n_predict} heads")
    if not config.loss.cross_entropy and not config.loss.kl:
        raise UserError("loss.cross_entropy and loss.kl are both 0: nothing to train on")
    if config.eval.max_new_tokens < 2:
        raise UserError("eval.max_new_tokens must be at least 2: the first new token is the prefill's")


def _check_target(config: RunConfig, target: Target) -> None:
    """What does not fit the target."""
    if config.speculator.initialise == "target" and config.speculator.inner_dim not in (0, target.hidden_size):
        raise UserError("speculator.initialise target needs speculator.inner_dim 0, which takes the target's size")
    longest = {
        "data.seq_length": config.data.seq_length,
        "eval.prompt_tokens + eval.max_new_tokens": config.eval.prompt_tokens + config.eval.max_new_tokens,
    }
    for name, length in longest.items():
        if length > target.context_length:
            raise UserError(f"{name} is {length}, but {target.name} has a context of {target.context_length}")


def _check_rows(
    config: RunConfig, train_rows: datasets.Dataset, validation_rows: datasets.Dataset, processes: int
) -> None:
    """What there is too little of."""
    stage = config.stage1
    batch = stage.per_device_train_batch_size * stage.gradient_accumulation_steps * processes
    if len(train_rows) < batch:
        raise UserError(
            f"{len(train_rows)} rows to train on are less than one batch of {batch}; take more text or a smaller batch"
        )
    if min(config.eval.validation_rows, len(validation_rows)) < processes:
        raise UserError(f"{len(validation_rows)} validation rows are too few for {processes} processes")


def _set_up_tracking(config: RunConfig) -> None:
    """wandb writes into the run's folder, and offline unless there is a key."""
    if config.report_to == "wandb":
        os.environ.setdefault("WANDB_DIR", config.output_dir)
        os.environ.setdefault("WANDB_PROJECT", "speculator")
        has_key = "WANDB_API_KEY" in os.environ or "api.wandb.ai" in _read(Path.home() / ".netrc")
        os.environ.setdefault("WANDB_MODE", "online" if has_key else "offline")
        os.environ.setdefault("WANDB_SILENT", "true")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
