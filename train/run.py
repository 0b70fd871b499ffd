"""One run, from the config to the report: every stage picks up where a run that was cut off left it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
import yaml
from accelerate import PartialState
from transformers import set_seed
from transformers.utils import logging as transformers_logging

from data.prepare import token_rows
from eval.acceptance import real_acceptance
from eval.run import evaluate
from eval.suites import held_out
from speculator.errors import UserError
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig, load_head
from speculator.target import Target
from train import checkpoint
from train.config import ROOT, RunConfig
from train.trainer import Collator, SpeculatorTrainer, arguments

_NOT_SETTINGS = ("output_dir", "overwrite_output_dir")


def main(config: RunConfig) -> int:
    """Run; gives the exit code. Wrong input is one line on stderr and 2."""
    try:
        return _run(config)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


def _run(config: RunConfig) -> int:
    folder = Path(config.output_dir)
    report = folder / "eval" / "report.json"
    first = os.environ.get("RANK", "0") == "0"
    if first:
        _claim(folder, config)
    if report.exists():
        if first:
            print(f"{folder} is done: see {report.with_suffix('.md')} (--overwrite_output_dir starts again)")
        return 0
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    use_all_cores()
    state = PartialState(cpu=not torch.accelerator.is_available())
    set_seed(config.seed)
    target = Target.load(config.target.name_or_path, revision=config.target.revision, dtype=config.target.dtype)
    head_folder = folder / "speculator"
    if not head_folder.exists():
        train_stage1(config, target, head_folder)
    state.wait_for_everyone()
    if state.is_main_process:
        head = load_head(head_folder, target)
        suite = held_out(
            config.data.sources, target.tokenizer, config.eval.prompt_tokens, config.eval.max_prompts, split="held-out"
        )
        evaluate(
            target,
            head,
            [suite],
            folder / "eval",
            temperatures=config.eval.temperatures,
            max_new_tokens=config.eval.max_new_tokens,
            speculator_name=str(head_folder),
            seed=config.seed,
        )
        print(f"\n{(folder / 'eval' / 'report.md').read_text()}\nThe report and its plots are in {folder / 'eval'}")
    state.wait_for_everyone()
    return 0


def use_all_cores() -> None:
    """Undo the one intra-op thread that accelerate's launcher forces on a CPU run."""
    if not torch.accelerator.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _claim(folder: Path, config: RunConfig) -> None:
    """Write config.yaml, or refuse the folder of a run with other settings."""
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in _NOT_SETTINGS}
    record = folder / "config.yaml"
    if config.overwrite_output_dir:
        shutil.rmtree(folder, ignore_errors=True)
    if record.exists():
        before = yaml.safe_load(record.read_text())["settings"]
        difference = _first_difference(before, settings)
        if difference:
            raise UserError(f"{folder} holds a run with another {difference}; --overwrite_output_dir replaces it")
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no run; choose another --output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "settings": settings,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "python": sys.version.split()[0],
        "git_commit": _git_commit(),
        "argv": sys.argv,
    }
    scratch = record.with_suffix(".partial")
    scratch.write_text(yaml.safe_dump(facts, sort_keys=False))
    scratch.rename(record)


def _first_difference(before: Any, now: Any, path: str = "") -> str | None:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in before if key not in now)]:
            found = _first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return None
    return None if before == now else f"{path} ({before}, not {now})"


def _git_commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def new_head(config: RunConfig, target: Target) -> MLPSpeculator:
    """A fresh head of the configured shape: float32 master weights, whatever the target's dtype."""
    torch.manual_seed(config.seed)
    return MLPSpeculator(
        MLPSpeculatorConfig(
            vocab_size=target.vocab_size,
            emb_dim=target.hidden_size,
            base_model_name_or_path=config.target.name_or_path,
            trained_length=config.data.seq_length,
            training_data=config.data.sources,
            **dataclasses.asdict(config.speculator),
        )
    )


def rows(config: RunConfig, target: Target, split: str) -> datasets.Dataset:
    return token_rows(
        config.data.sources,
        split,
        target.tokenizer,
        config.data.seq_length,
        max_tokens=config.data.max_tokens if split == "train" else None,
        max_package_bytes=config.data.max_package_bytes,
    )


def train_stage1(config: RunConfig, target: Target, head_folder: Path) -> None:
    """Train on text; leaves the best head in `head_folder`."""
    stage = Path(config.output_dir) / "stage1"
    settings = dataclasses.asdict(config.stage1)
    _check_stage(config)
    train_rows, validation_rows = rows(config, target, "train"), rows(config, target, "validation")
    validation_rows = validation_rows.select(range(min(config.eval.validation_rows, len(validation_rows))))
    share = len(validation_rows) // PartialState().num_processes
    prompts = held_out(
        config.data.sources,
        target.tokenizer,
        config.eval.prompt_tokens,
        config.eval.validation_prompts,
        split="validation",
    ).prompts

    _set_up_tracking(config)
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
            per_device_eval_batch_size=max(1, min(config.stage1.per_device_train_batch_size, share)),
            **settings,
        ),
        data_collator=Collator(config.speculator.n_predict),
        train_dataset=train_rows,
        eval_dataset=validation_rows,
    )
    resume, passed_over = checkpoint.newest(stage)
    if trainer.is_world_process_zero():
        for line in passed_over:
            print(line, file=sys.stderr)
        if resume:
            print(f"going on from {resume}", file=sys.stderr)
        shape = f"{trainer.model.num_parameters() / 1e6:.1f}M parameters, {len(train_rows)} rows"
        count = trainer.accelerator.num_processes
        print(f"stage 1: {shape}, {count} process{'es' if count > 1 else ''}", file=sys.stderr)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if trainer.is_world_process_zero():
        scratch = head_folder.with_name("speculator.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(scratch)
        (stage / "log_history.json").write_text(json.dumps(trainer.state.log_history, indent=1))
        scratch.rename(head_folder)


def _check_stage(config: RunConfig) -> None:
    stage = config.stage1
    if stage.save_total_limit < 2:
        raise UserError("stage1.save_total_limit must be at least 2: a checkpoint is not whole while it is written")
    if stage.save_steps % stage.eval_steps:
        raise UserError(
            f"stage1.save_steps ({stage.save_steps}) must be a multiple of stage1.eval_steps ({stage.eval_steps}): "
            "the best checkpoint is chosen by its evaluation"
        )
    if config.data.seq_length < config.speculator.n_predict + 2:
        raise UserError(
            f"data.seq_length {config.data.seq_length} is too short for {config.speculator.n_predict} heads"
        )
    if not config.loss.cross_entropy and not config.loss.kl:
        raise UserError("loss.cross_entropy and loss.kl are both 0: nothing to train on")


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
