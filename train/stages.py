"""One stage of training: from its newest whole checkpoint to its best head, or straight there if it is done."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
from accelerate import PartialState

from eval import tracking
from eval.acceptance import real_acceptance
from speculator.files import write_text
from speculator.heads import Speculator
from speculator.target import Target
from train import checkpoint
from train.config import RunConfig, StageConfig
from train.trainer import Collator, SpeculatorTrainer, arguments
from train.vocabulary import describe


def train_stage(
    name: str,
    config: RunConfig,
    target: Target,
    start: Callable[[], Speculator],
    train_rows: datasets.Dataset,
    validation_rows: datasets.Dataset,
    prompts: list[list[int]],
) -> Path:  # of the best head
    """Train the head that `start` gives; on every process of the run.

    Args:
        name: "stage1" or "stage2": the config's section and the folder under the run's.
        start: gives the head that the stage starts from, float32.
        prompts: decoded for the real tokens_per_step at each evaluation.
    """
    settings: StageConfig = getattr(config, name)
    folder = Path(config.output_dir) / name
    best_head = folder / "speculator"
    if best_head.exists():
        return best_head
    state = PartialState()
    count = min(config.eval.validation_rows, len(validation_rows))
    batch = max(1, min(settings.per_device_train_batch_size, count // state.num_processes))
    # Whole batches: a short one would be filled up with rows seen before.
    count -= count % (batch * state.num_processes)
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(StageConfig)}
    trainer = SpeculatorTrainer(
        model=start(),
        target=target,
        loss=config.loss,
        decode=lambda head: real_acceptance(target, head, prompts, seed=config.seed),
        args=arguments(
            output_dir=str(folder),
            run_name=f"{Path(config.output_dir).name} {name}",
            report_to=config.report_to,
            seed=config.seed,
            per_device_eval_batch_size=batch,
            **fields,
        ),
        data_collator=Collator(config.speculator.n_predict),
        train_dataset=train_rows,
        eval_dataset=validation_rows.select(range(count)),
    )
    resume, passed_over = checkpoint.newest(folder)
    if state.is_main_process:
        for line in passed_over:
            print(line, file=sys.stderr)
        if resume:
            print(f"going on from {resume}", file=sys.stderr)
        shape = f"{trainer.model.num_parameters() / 1e6:.1f}M parameters, {len(train_rows)} rows"
        many = f"{state.num_processes} process{'es' if state.num_processes > 1 else ''}"
        drafted = trainer.model.draft_tokens
        share = "" if drafted is None else f", drafts from {describe(drafted.cpu(), train_rows, target.vocab_size)}"
        print(f"{name}: {shape}, {many}{share}", file=sys.stderr)
    best = _best_of_finished(resume, settings.max_steps)
    if best is None:
        if state.is_main_process and config.report_to == "wandb":
            _start_tracking(config, name, folder)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if state.is_main_process:
        head = type(trainer.model).from_pretrained(best) if best else trainer.accelerator.unwrap_model(trainer.model)
        publish(head, best_head)
    state.wait_for_everyone()
    return best_head


def publish(head: Speculator, folder: Path) -> None:
    """Save a head under its name: entirely or not at all."""
    scratch = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    head.save_pretrained(scratch)
    scratch.rename(folder)


def _best_of_finished(newest: Path | None, max_steps: int) -> Path | None:
    """The best checkpoint of a stage that was cut off after its last step; None if there are steps to go."""
    if newest is None:
        return None
    state = json.loads((newest / "trainer_state.json").read_text())
    if state["global_step"] < max_steps:
        return None
    best = state["best_model_checkpoint"]  # none where the stage was too short for an evaluation
    return newest.with_name(Path(best).name) if best else newest


def _start_tracking(config: RunConfig, name: str, folder: Path) -> None:
    """One wandb run per stage, in one group, its id kept for resuming; in the run's folder, offline without a key.

    transformers' callback goes on with the run that is there. It stays on until the next stage begins, so the last
    one's has the final report as well.
    """
    tracking.stop()
    record = folder / "wandb_id"
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(record, secrets.token_hex(4))
    run = Path(config.output_dir).name
    tracking.start(
        Path(os.environ.get("WANDB_DIR", config.output_dir)),
        group=os.environ.get("WANDB_RUN_GROUP", run),
        name=f"{run} {name}",
        id=record.read_text(),
        resume="allow",
        config=dataclasses.asdict(config),
    )
