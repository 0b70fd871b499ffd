"""One stage of training, from its newest complete checkpoint to its best head."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from math import ceil
from pathlib import Path
from typing import Any

import datasets
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object

from eval import tracking
from eval.in_server import FORECAST_FILE
from eval.validation import NEW_TOKENS, first_look, real_acceptance
from speculator.checkpoints import load_any
from speculator.checkpoints.files import make_readable
from speculator.device import has_accelerator
from speculator.errors import UserError
from speculator.files import (
    JsonObject,
    manifest_error,
    new_folder,
    read_json,
    read_text,
    write_json,
    write_manifest,
    write_text,
)
from speculator.heads import Speculator
from speculator.kernels.linear import bfloat16_pays
from speculator.target.base import TrainingTarget
from speculator.target.in_process import InProcessTarget
from speculator.target.model import Target
from speculator.target.remote.server_target import ServerTarget
from speculator.terminal import log, working
from train import checkpoint, interrupts
from train.door import checks
from train.door.initialise import describe
from train.door.settle import Run
from train.door.sizes import longest
from train.loop import STATE, Loop, Progress
from train.losses import has_rows
from train.processes import of_first
from train.progress import Display
from train.states.batch import Collator, StageRows, StateSource
from train.states.sources import KeptStates, LookAhead
from train.text.inputs import Inputs

_FEW_LENGTHS = 128
"""Batches on a GPU have a multiple of this many tokens a row: kernels are compiled and tuned for each shape."""
_WANDB_ID = re.compile(rb"[0-9a-f]{8}")


def train_stage(
    name: str,
    target: TrainingTarget,
    start: Callable[[], Speculator],
    inputs: Inputs,
    outlook: Callable[[float], str],
) -> Path:  # of the best head
    """Train a head on all processes of the run, and return the folder of its best head.

    A stage resumes from its newest complete checkpoint; a finished one returns at once.

    Args:
        name: "stage1" or "stage2": section of the config, and folder of the stage.
        start: returns the head that the stage starts from, in float32.
        inputs: the stage's rows and prompts. The forecast of the acceptance length of its validation rows chooses the
            best checkpoint, and the prompts "validation" are decoded, if the target can.
        outlook: returns a line about the time that is left, given the seconds of an optimiser step, which is printed
            after the first steps.

    Raises:
        SystemExit: 143, after a checkpoint was saved, if SIGTERM arrived.
    """
    run, config = inputs.run, inputs.run.config
    train_rows, validation_rows = inputs.train_rows, inputs.validation_rows
    settings, suite = run.stage(name, len(train_rows)), inputs.suites["validation"]
    folder = run.folder / name
    best_head = folder / "speculator"
    if is_published(best_head):
        return best_head
    state = PartialState()
    if state.is_main_process:
        checks.warn_of_warm_up(name, settings)
    if settings.bf16 and target.device.type == "cpu" and not bfloat16_pays():
        settings = dataclasses.replace(settings, bf16=False)
        log(f"{name}.bf16: this processor multiplies float32 faster, so the head's products are computed in float32")
    # At most a process's share of the rows: `filled` fills the last batch up, and its rows cost as much as others.
    batch = min(settings.per_device_train_batch_size, ceil(len(validation_rows) / state.num_processes))
    # KV cache positions of a process that decodes its share of the prompts at once, as the plan counts them; chats may
    # be longer.
    positions = ceil(len(suite.prompts) / state.num_processes) * (config.eval.prompt_tokens + NEW_TOKENS)
    looked = name != "stage1" or not state.is_main_process

    def decode(head: Speculator) -> dict[str, float]:
        nonlocal looked
        if not isinstance(target, Target):
            return {}
        figures = real_acceptance(target, head, suite, config.seed, max_positions=positions)
        if not looked:
            log(first_look(target, head, suite))
            looked = True
        return figures

    head = start()
    passes = settings.max_steps * settings.rows_per_step * state.num_processes / len(train_rows)
    source = state_source(name, target, head, inputs, passes)
    resume, passed_over = of_first(lambda: checkpoint.newest(folder))
    if state.is_main_process:
        for line in passed_over:
            log(line)
        if resume:
            log(f"resuming from {resume}")
        drafted = head.draft_tokens
        share = "" if drafted is None else f", drafts from {describe(drafted.cpu(), train_rows, target.vocab_size)}"
        log(
            f"{name}: a head of {head.num_parameters() / 1e6:.1f} million weights, "
            f"{len(train_rows):,} rows read {passes:,.1f} times in {settings.max_steps:,} steps{share}"
        )
    progress = of_first(lambda: Progress.read(resume) if resume else Progress(settings.max_steps))
    # A stage that was killed after its last checkpoint has nothing left to train, and goes on to publish its best.
    if not progress.ends(settings):
        if progress.max_steps != settings.max_steps:  # the schedule of a stage of `epochs` is for its steps
            # More processes need fewer passes per step, and there is no fewer than one.
            keeps = settings.max_steps > progress.max_steps or settings.gradient_accumulation_steps > 1
            other_way = f", or keep the rows of a step by --{name}.gradient_accumulation_steps" if keeps else ""
            raise UserError(
                f"{name} has {settings.max_steps:,} steps on {state.num_processes} processes, and was begun with "
                f"{progress.max_steps:,}: start as many processes as before{other_way}"
            )
        recorded = dataclasses.asdict(config)
        recorded["data"]["seq_length"] = inputs.length
        folder.mkdir(parents=True, exist_ok=True)  # from here on the stage has begun, and its settings stay
        loop = Loop(
            head,
            source,
            settings,
            config.loss,
            StageRows(
                train_rows,
                Collator(
                    head.config,
                    documents=source.reads_documents,
                    multiple=1 if target.device.type == "cpu" else _FEW_LENGTHS,
                    longest=max(longest(train_rows), longest(validation_rows)),
                ),
                seed=config.seed,
                validation=filled(validation_rows, batch * state.num_processes),
                evaluation_batch=batch,
            ),
            folder,
            decode=decode,
            sharded=config.shard_optimizer,
            display=Display(
                title=name.replace("stage", "stage "),
                outlook=outlook,
                token_at_peak=inputs.plan.token_at_peak(name),
                accelerator=tracker(run, name, recorded | {name: dataclasses.asdict(settings)}),
            ),
        )
        stopped = True
        try:
            if resume:
                loop.resume(resume, progress)
            with interrupts.saving():
                progress = loop.run()
            # A signal of the last step may have reached some processes only.
            stopped = any(gather_object([interrupts.stop_asked()])) or not progress.ends(settings)
        finally:
            with suppress(Exception) if stopped else nullcontext():  # the signal may have ended a tracker's process too
                for each in loop.accelerator.trackers:
                    if each.name != "wandb":  # whose run of the last stage also gets the final report
                        each.finish()
        if stopped:
            with suppress(Exception):  # the signal may have ended wandb's own process too
                tracking.stop()
            if state.is_main_process:
                last = f"{folder}/checkpoint-{progress.global_step}"
                log(f"stopped by SIGTERM: {config.same_command} resumes from {last}")
            raise SystemExit(143)
    if state.is_main_process:
        history = progress.log_history
        best, passed_over = checkpoint.best(folder, history, settings.save_steps, progress.max_steps)
        for line in passed_over:
            log(line)
        if best is None:
            raise UserError(f"{folder}: no checkpoint is complete; the same command trains the stage again")
        step = int(best.name.removeprefix("checkpoint-"))
        logged = (entry for entry in history if entry["step"] == step and checkpoint.METRIC in entry)
        publish(load_any(best), best_head, None if isinstance(target, Target) else forecast(next(logged)))
    state.wait_for_everyone()
    return best_head


def forecast(evaluation: dict[str, float]) -> JsonObject:
    """Return the teacher-forced forecast of a head's acceptance for `FORECAST_FILE`, by an evaluation's figures."""
    name, at = "walked", "the steps of decoding validation rows"
    if "eval_position0/walked" not in evaluation:  # the head trains on some positions only, and can't walk a row
        name, at = "prefix_accuracy", "positions of validation rows; less if the text is uneven"
    depth = sum(key.startswith("eval_position") and key.endswith(f"/{name}") for key in evaluation)
    rates = [evaluation[f"eval_position{i}/{name}"] for i in range(depth)]
    return {"how": f"teacher-forced, greedy, at {at}", "acceptance_length": 1 + sum(rates), "accepted_per_draft": rates}


def state_source(name: str, target: TrainingTarget, head: Speculator, inputs: Inputs, passes: float) -> StateSource:
    """Return where a stage's states come from: servers, files, or the target in this process.

    `passes` is how often the stage reads its rows. Raises a UserError if the disk has no room for the files.
    """
    if isinstance(target, ServerTarget):
        return LookAhead(target)
    if not inputs.run.stage(name, len(inputs.train_rows)).keep_states:
        return StateSource(target, head.aux_layers)
    assert isinstance(target, InProcessTarget)  # checked with the settings
    drafts_from_some = inputs.run.config.loss.needs_target and head.draft_tokens is not None
    normalisers = drafts_from_some and has_rows(target.output_matrix, target.device)
    kept = KeptStates(target, head.aux_layers, normalisers)
    if PartialState().is_main_process:
        with working(f"{name}: looking for states"):
            tokens = min(1.0, passes) * kept.lacking(inputs.train_rows) + kept.lacking(inputs.validation_rows)
            kept.check_room(f"{name}.keep_states", tokens)
        log(f"{name}: the target's states are kept in {kept.folder}")
    return kept


def curves(run: Path) -> dict[str, dict[str, list[list[float]]]]:
    """Return the points [step, value] of each stage's curves, up to its newest readable checkpoint.

    The form is {"stage1" or "stage2": {"loss" or "acceptance length": points}}. What has no points is left out.
    """
    found = {}
    for stage in ("stage1", "stage2"):
        for folder in checkpoint.numbered(run / stage).values():
            with suppress(OSError, ValueError, KeyError):
                history = read_json(folder / STATE)["log_history"]
                names = {"loss": "loss", "acceptance length": checkpoint.DECODED}
                made = {name: [[e["step"], e[key]] for e in history if key in e] for name, key in names.items()}
                found[stage] = {name: points for name, points in made.items() if points}
                break
    return {stage: made for stage, made in found.items() if made}


def filled(rows: datasets.Dataset, size: int) -> datasets.Dataset:
    """Append rows without loss until batches of `size` are full: accelerate would repeat rows, and count them twice."""
    # -len % size is what is missing: 10 rows in batches of 4 lack 2.
    blank = [{**row, "loss_mask": [0] * len(row["input_ids"])} for row in rows.select([0] * (-len(rows) % size))]
    return datasets.concatenate_datasets([rows, datasets.Dataset.from_list(blank, rows.features)]) if blank else rows


def is_published(folder: Path) -> bool:
    """Return whether a complete head is in the folder, and print why not if it is damaged; call it on every process."""

    def look() -> bool:
        problem = manifest_error(folder) if folder.exists() else "it is not there"
        if problem and folder.exists():
            log(f"{folder}: {problem}; it is written again")
        return problem is None

    return of_first(look)


def publish(head: Speculator, folder: Path, expected: JsonObject | None = None) -> None:
    """Save a head with a manifest, atomically, over a damaged one; `expected`: its `forecast` if no target decodes."""
    shutil.rmtree(folder, ignore_errors=True)
    with new_folder(folder) as scratch:
        head.save_pretrained(scratch)
        for weights in scratch.glob("*.safetensors"):
            make_readable(weights)
        if expected is not None:
            write_json(scratch / FORECAST_FILE, expected)
        write_manifest(scratch)


def tracker(run: Run, name: str, settings: JsonObject | None = None) -> Accelerator:
    """Start a run of the run's tracker for a stage, and return what logs to it.

    wandb's is in one group with the other stage's, and offline unless WANDB_MODE is online. Its id is kept, so that a
    resumed stage continues it. It stays open until the next stage begins, so the last stage's run also gets the final
    report. The tracker records `settings`, by section; None: they have been recorded.
    """
    folder, kind, title = run.folder / name, run.config.report_to, f"{run.folder.name} {name}"
    accelerator = Accelerator(
        cpu=not has_accelerator(), log_with=None if kind == "none" else kind, project_dir=folder / "runs"
    )
    facts = {"mlflow": {"run_name": title}, "trackio": {"name": title, "resume": "allow"}}

    def begin(project: str, **wandb: Any) -> None:
        accelerator.init_trackers(project, flat if kind != "wandb" else None, facts | {"wandb": wandb})

    flat = {  # other trackers than wandb take plain values alone
        f"{section}.{name}": value
        for section, found in (settings or {}).items()
        if isinstance(found, dict)
        for name, value in found.items()
        if isinstance(value, (bool, int, float, str))
    }
    if kind != "wandb":
        begin(tracking.PROJECT)
    elif accelerator.is_main_process:
        tracking.stop()
        record = folder / "wandb_id"
        if not (record.is_file() and _WANDB_ID.fullmatch(record.read_bytes())):
            folder.mkdir(parents=True, exist_ok=True)
            write_text(record, secrets.token_hex(4))
        tracking.start(
            Path(os.environ.get("WANDB_DIR", run.folder)),
            begin,
            group=os.environ.get("WANDB_RUN_GROUP", run.folder.name),
            name=title,
            id=read_text(record),
            resume="allow",
            config=settings,
        )
    return accelerator
