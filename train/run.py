"""One run from config to report; every stage resumes where a killed run stopped.

`main` is what the command calls, `run` is the run, and `_train` its stages.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import set_seed

from data.batches import warn_of_cut_answers
from eval import tracking
from eval.in_server import FORECAST_FILE
from speculator.checkpoints import load_any
from speculator.checkpoints.card import NAME as CARD
from speculator.checkpoints.card import write_card
from speculator.device import is_out_of_memory
from speculator.errors import UserError, line_of, run_command
from speculator.files import make_cache_folder, read_json
from speculator.heads import Speculator
from speculator.report import read_report
from speculator.target.base import TrainingTarget
from speculator.target.model import Target
from speculator.terminal import log, phase, quiet_libraries, working
from train import interrupts, processes
from train.checkpoint import reporting_full_disk
from train.door.dry_run import run_on_stand_ins
from train.door.gpus import place_of, timed
from train.door.initialise import for_rows, new_head
from train.door.plan import Plan
from train.door.settle import settle
from train.finish import is_finished, measure, summary
from train.folder import check_same_run, locked, write_record
from train.options.config import RunConfig
from train.stages import is_published, publish, tracker, train_stage
from train.text.inputs import Inputs, check_batch, load_target, log_sizes, read_inputs, sizes_of
from train.text.own_text import generate_own_text, held_out, packed

_POLL_SECONDS = 1.0
_LOAD, _PREPARE, _STAGE1, _GENERATE, _STAGE2, _MEASURE = PHASES = (
    "loading the target",
    "preparing data",
    "training, stage 1",
    "generating the target's own text for stage 2",
    "training, stage 2",
    "tuning the head and measuring it",
)


def announce(config: RunConfig, name: str, where: str = "") -> None:
    """Print the header of one of the run's `PHASES`, with its number; `where` follows its name."""
    phases = [each for each in PHASES if config.stage2.max_steps or each not in (_GENERATE, _STAGE2)]
    phase(phases.index(name) + 1, len(phases), name + where)


def main(config: RunConfig) -> int:
    """Plan, dry-run or run a config, and return the exit code. Wrong input is one line on stderr and code 2."""

    def work() -> None:
        state = processes.join()
        with _naming(config), processes.one_process_reports(), reporting_full_disk(Path(config.output_dir)):
            if config.plan:
                place = timed(place_of(config.plan, state.num_processes))
                planned = Plan(settle(config, state.num_processes, place=place))
                if state.is_main_process:
                    print(planned)
                state.wait_for_everyone()
            elif config.dry_run:
                run_on_stand_ins(settle(config, state.num_processes, local_only=True), run)
            else:
                interrupts.print_when_interrupted(f"{config.same_command} resumes the run in {config.output_dir}")
                run(config)

    try:
        with working("train.py"):
            code = run_command("train.py", work)
    except SystemExit as stop:  # by SIGTERM, all processes at the same step
        processes.leave()
        return int(stop.code or 0)
    if not code:
        processes.leave()
    return code


@contextmanager
def _naming(config: RunConfig) -> Iterator[None]:
    """Let errors that name "the same command" name the one that resumes this run."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("the same command", config.same_command)) from None


@contextmanager
def _fitting(setting: str, config: RunConfig) -> Iterator[None]:
    """Let an error of too little memory in the block name the setting that needs less."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        value = reduce(getattr, setting.split("."), config)
        stage = setting.partition(".")[0]
        more = f" ({stage}.gradient_accumulation_steps makes up for it)" * ("train" in setting)
        raise UserError(f"{line_of(error)}; lower {setting}, which is {value}{more}") from None


def run(asked: RunConfig) -> None:
    """Check a run's settings and inputs, then train, tune and measure its head; a finished run prints its summary.

    Every process of a launch calls it. Raises a UserError for wrong input, almost always before the run's folder is
    created; SystemExit 143, after a checkpoint was saved, if SIGTERM arrived.
    """
    state = processes.join()
    # Everything that can be refused is, from cheap to dear, before the folder is created.
    done = processes.of_first(lambda: is_finished(asked)) and not asked.overwrite_output_dir
    settled = settle(asked, state.num_processes, local_only=done)
    config, folder = settled.config, settled.folder
    tracking.check(config.report_to)
    if state.is_main_process:
        check_same_run(folder, config, state.num_processes)
    state.wait_for_everyone()
    if done:
        if state.is_main_process and not (settled.head_folder / CARD).exists():
            write_card(settled.head_folder)  # the run was killed just before
        another = "another --output_dir starts another run, --overwrite_output_dir replaces this one"
        state.print(f"{folder} is done; {another}")
        state.print(summary(config))
        return
    if config.target.parallel != "device_map":
        processes.log_unused_gpus(state)
    quiet_libraries()
    processes.use_all_cores()
    set_seed(config.seed)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it in its first product
        torch.use_deterministic_algorithms(True, warn_only=True)
    plan = Plan(settled)
    plan.refuse_too_large()
    make_cache_folder()  # a machine without one is refused before the target is loaded
    # A launcher may start fewer processes than it was asked for.
    announce(config, _LOAD, f" on {state.num_processes} process{'es' if state.num_processes > 1 else ''}")
    target = load_target(settled)
    with closing(target):
        announce(config, _PREPARE)
        inputs = read_inputs(plan, target)
        if state.is_main_process:
            log_sizes(settled, "stage1", inputs.train_rows, inputs.length)
        # Stage 1 pops the head, so that it does not outlive the stage.
        heads = [new_head(settled, target, inputs.train_rows, inputs.length)]
        with locked(folder) if state.is_main_process else nullcontext():
            if state.is_main_process:
                write_record(folder, config, state.num_processes, inputs.fingerprints(target))
            state.wait_for_everyone()
            _train(inputs, target, heads)


def _train(inputs: Inputs, target: TrainingTarget, heads: list[Speculator]) -> None:
    """Run the remaining stages, publish the head and write its report.

    `heads` holds the head to start from. Stage 1 pops it, so that it can be freed after the stage.
    """
    state, run, config = PartialState(), inputs.run, inputs.run.config
    folder, head_folder = run.folder, run.head_folder
    if not is_published(head_folder):
        announce(config, _STAGE1)
        # A stage that is finished returns its head at once, so a resumed run comes to where it was killed by the same
        # path.
        with _fitting("stage1.per_device_train_batch_size", config):
            prompt = inputs.suites["validation"].prompts[0]
            best = train_stage(
                "stage1", target, heads.pop, inputs, partial(inputs.plan.outlook, target, prompt, "stage1")
            )
        gc.collect()  # so that the head of stage 1 is freed, if what trained it holds itself in a circle
        if config.stage2.max_steps:
            announce(config, _GENERATE)
            with _fitting("stage2.generate.batch_size", config):
                own_text = generate_own_text(run, target, best, inputs.own_prompts, inputs.length)
            warn_of_cut_answers(folder / "generated", "stage2.generate.max_new_tokens")
            rows, held = held_out(run, packed(run, own_text, inputs.length))
            if state.is_main_process:
                log_sizes(run, "stage2", rows, config.data.seq_length)
            check_batch(run, "stage2", len(rows))
            announce(config, _STAGE2)
            prompts = sizes_of(inputs.own_prompts)
            plan = inputs.plan.knowing(inputs.length, prompts, stage1=len(inputs.train_rows), stage2=len(rows))
            inputs = replace(inputs, train_rows=rows, validation_rows=held or inputs.validation_rows, plan=plan)
            outlook = partial(plan.outlook, target, inputs.suites["validation"].prompts[0], "stage2")
            with _fitting("stage2.per_device_train_batch_size", config):
                best = train_stage(
                    "stage2", target, lambda: for_rows(load_any(best), target, own_text), inputs, outlook
                )
        if state.is_main_process:
            expected = best / FORECAST_FILE
            publish(load_any(best), head_folder, read_json(expected) if expected.exists() else None)
    state.wait_for_everyone()
    announce(config, _MEASURE)
    if not state.is_main_process:
        while not (head_folder / CARD).exists():  # not in a collective, which would time out
            time.sleep(_POLL_SECONDS)
        return
    if config.report_to == "wandb" and not tracking.is_on():  # this run was cut off after its last stage
        tracker(run, "stage2" if config.stage2.max_steps else "stage1")
    if isinstance(target, Target):
        measure(config, target, inputs.suites)
        if config.report_to != "wandb":  # its run is open and has got the report
            tracking.send(read_report(folder / "eval" / "report.json"), folder / "eval", config.report_to)
    else:
        log(f"{target.name} only trains, so the head is not tuned and not measured")
    tracking.stop()
    write_card(head_folder)
    print(summary(config))
