"""One run from config to report; every stage resumes where a killed run stopped."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shlex
import shutil
import time
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState
from transformers import set_seed

from data.conversations import Conversation
from data.magpie import only_self
from data.onpolicy import generate_rows
from data.prepare import token_rows
from data.prompts import Room, conversations
from data.tally import Tally
from eval import tracking
from eval.run import evaluate, render
from eval.serving import FORECAST, commands_for_server
from eval.suites import Suite, from_text
from eval.tune import write_tuning
from speculator import HeadDrafter
from speculator.chat import set_template_variables
from speculator.checkpoints import load_any
from speculator.checkpoints.card import NAME as CARD
from speculator.checkpoints.card import write_card
from speculator.checkpoints.loading import load_drafter, load_head
from speculator.device import cores
from speculator.drafters.tuning import TUNED
from speculator.errors import UserError, run_command
from speculator.files import cache_folder, read_json
from speculator.heads import Speculator
from speculator.target.in_process import InProcessTarget
from speculator.target.model import Target
from speculator.target.server import ServerTarget
from speculator.target.sharding import SHARDED
from speculator.target.training import TrainingTarget
from speculator.terminal import loading, log, phase, quiet_libraries, working
from speculator.verdict import headlines
from train import checks, interrupts
from train.checkpoint import reporting_full_disk
from train.config import RunConfig
from train.dry_run import known_config, rehearse
from train.folder import claim, held, prompts_fingerprint, refuse_foreign, rows_fingerprint
from train.initialise import for_rows, new_head
from train.plan import plan, refuse_too_large
from train.processes import join, one_speaks
from train.self_source import fresh_rows, with_self_written
from train.server_command import needed_of_server
from train.sizes import with_shorter_rows, with_sizes_of_target, with_steps
from train.stages import curves, is_published, publish, start_tracking, train_stage

_PROMPTS_PER_TEXT = 4
_POLL_SECONDS = 1.0
_LOAD, _PREPARE, _STAGE1, _WRITE, _STAGE2, _MEASURE = PHASES = (
    "loading the target",
    "preparing data",
    "training, stage 1",
    "generating the target's own text for stage 2",
    "training, stage 2",
    "tuning the head and measuring it",
)


def announce(config: RunConfig, name: str) -> None:
    """Print the header of one of the run's phases."""
    phases = [each for each in PHASES if config.stage2.max_steps or each not in (_WRITE, _STAGE2)]
    phase(phases.index(name) + 1, len(phases), name)


def main(config: RunConfig) -> int:
    """Run and return the exit code; wrong input is one line on stderr and code 2."""

    def work() -> None:
        settled = config
        if not config.data.seq_length or config.speculator.draft_vocab_size:
            settled = with_sizes_of_target(config, known_config(config, local_files_only=config.dry_run))
        if config.plan:
            state = join()
            checks.settings(settled)
            if state.is_main_process:
                print(plan(settled, state.num_processes))
            state.wait_for_everyone()
            return
        with one_speaks(), reporting_full_disk(Path(config.output_dir)):
            if config.dry_run:
                rehearse(settled, _run)
            else:
                interrupts.say_when_interrupted(f"the same command resumes the run in {config.output_dir}")
                _run(settled, shorten=not config.data.seq_length)

    try:
        with working("train.py"):
            code = run_command("train.py", work)
    except SystemExit as stop:  # by SIGTERM, all processes at the same step
        _leave_group()
        return int(stop.code or 0)
    if not code:
        _leave_group()
    return code


def _leave_group() -> None:
    """Destroy the process group, whose threads would abort the interpreter if they outlived it."""
    if torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()


def _run(config: RunConfig, shorten: bool = False) -> None:
    """Run everything.

    Args:
        shorten: the row length is the target's, so little text may have shorter rows.
    """
    folder = Path(config.output_dir)
    state = join()
    checks.settings(config)
    tracking.check(config.report_to)
    if state.is_main_process:
        for line in checks.warnings(config):
            log(f"warning: {line}")
        refuse_foreign(folder, config, state.num_processes)
    state.wait_for_everyone()
    report = folder / "eval" / "report.json"
    card = folder / "speculator" / CARD
    measured = report.exists() and report.with_suffix(".md").exists()
    if (measured or (config.target.server and card.exists())) and not config.overwrite_output_dir:
        if state.is_main_process and not card.exists():
            write_card(folder / "speculator")  # the run was killed just before
        state.print(
            f"{folder} is done; another --output_dir starts another run, --overwrite_output_dir replaces this one"
        )
        state.print(summary(config))
        return
    if config.target.parallel != "device_map":
        say_what_is_idle(state)
    quiet_libraries()
    use_all_cores()
    set_seed(config.seed)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it in its first product
        torch.use_deterministic_algorithms(True, warn_only=True)
    refuse_too_large(config, state.num_processes)
    announce(config, _LOAD)
    target = load_target(config)
    with closing(target) if isinstance(target, ServerTarget) else nullcontext():
        _run_with(target, config, shorten)


def _run_with(target: TrainingTarget, config: RunConfig, shorten: bool) -> None:
    """Run everything with a loaded target."""
    state, folder = PartialState(), Path(config.output_dir)
    announce(config, _PREPARE)
    checks.fits_target(config, target)
    if isinstance(target, ServerTarget):
        target.check(*needed_of_server(config, target.config, target.context_length), state.num_processes)
    asked, read = config, with_self_written(config, target)
    if shorten:
        read = with_shorter_rows(read, count_of_tokens(rows(read, target, "train")))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_length=read.data.seq_length))
    train_rows, validation_rows = rows(read, target, "train"), rows(read, target, "validation")
    suites = {
        "validation": prompts_of(read, target, "validation", config.eval.validation_prompts),
        "held-out": prompts_of(read, target, "held-out", config.eval.max_prompts),
    }
    continues = config.stage2.max_steps and not only_self(config.data.sources)
    own_prompts = own_prompts_of(read, target) if continues else None
    count = None if own_prompts is None else len(own_prompts)
    steps = partial(with_steps, processes=state.num_processes)
    config = dataclasses.replace(config, stage1=steps(config.stage1, len(train_rows)))
    stage2 = steps(config.stage2, config.stage2.generate.max_rows if count is None else count)
    checks.rows(
        dataclasses.replace(config, stage2=stage2), target, train_rows, validation_rows, state.num_processes, count
    )
    if state.is_main_process:
        say_sizes(asked, config, len(train_rows), count_of_tokens(train_rows))
    heads = [new_head(config, target, train_rows)]  # stage 1 pops it, so that it does not outlive the stage

    # The input has been checked: the folder is created now.
    with held(folder) if state.is_main_process else nullcontext():
        if state.is_main_process:
            claim(folder, asked, state.num_processes, fingerprints(target, train_rows, validation_rows, suites))
        state.wait_for_everyone()
        _train(config, target, heads, train_rows, validation_rows, suites, own_prompts)


def _train(
    config: RunConfig,
    target: TrainingTarget,
    heads: list[Speculator],
    train_rows: datasets.Dataset,
    validation_rows: datasets.Dataset,
    suites: dict[str, Suite],
    own_prompts: list[Conversation] | None,
) -> None:
    """Run the remaining stages, publish the head and write its report.

    Args:
        heads: holds the head to start from.
        own_prompts: prompts that the target continues for stage 2; None: it writes the prompts as well.
    """
    state, folder = PartialState(), Path(config.output_dir)
    head_folder = folder / "speculator"
    if not is_published(head_folder):
        measured_on = (validation_rows, suites["validation"])
        announce(config, _STAGE1)
        # A stage that is finished returns its head at once, so a resumed run comes to where it was killed by the same
        # path.
        best = train_stage("stage1", config, target, heads.pop, train_rows, *measured_on)
        gc.collect()  # a trainer and its callbacks hold each other
        if config.stage2.max_steps:
            announce(config, _WRITE)
            own_text = generate_own_text(config, target, best, own_prompts)
            stage2 = with_steps(config.stage2, len(own_text), state.num_processes)
            config = dataclasses.replace(config, stage2=stage2)
            checks.batch("stage2", config.stage2, len(own_text), state.num_processes)
            announce(config, _STAGE2)
            best = train_stage(
                "stage2", config, target, lambda: for_rows(load_any(best), target, own_text), own_text, *measured_on
            )
        if state.is_main_process:
            publish(load_any(best), head_folder)
            if (best / FORECAST).exists():
                shutil.copyfile(best / FORECAST, head_folder / FORECAST)
    state.wait_for_everyone()
    announce(config, _MEASURE)
    if state.is_main_process:
        if config.report_to == "wandb" and not tracking.is_on():  # this run was cut off after its last stage
            start_tracking(config, "stage2" if config.stage2.max_steps else "stage1")
        if isinstance(target, Target):
            _measure(config, target, suites)
            if config.report_to != "wandb":  # its run is open and has got the report
                tracking.send(read_json(folder / "eval" / "report.json"), folder / "eval", config.report_to)
        else:
            log(f"{target.name} only trains, so the head is not tuned and not measured")
        tracking.stop()
        write_card(head_folder)
        print(summary(config))
        return
    while not (head_folder / CARD).exists():  # not in a collective, which would time out
        time.sleep(_POLL_SECONDS)


def summary(config: RunConfig) -> str:
    """Lines about a finished run: what the head gains, where it is, and the commands that use it."""
    folder = Path(config.output_dir)
    how = f"--target {shlex.quote(config.target.name_or_path)} --speculator {shlex.quote(str(folder / 'speculator'))}"
    for flag in ("revision", "adapter"):
        how += f" --{flag} {shlex.quote(value)}" if (value := getattr(config.target, flag)) else ""
    how += " --trust_remote_code" if config.target.trust_remote_code else ""
    if variables := config.target.chat_template_kwargs:
        how += f" --chat_template_kwargs {shlex.quote(json.dumps(variables))}"
    if not (folder / "eval" / "report.json").exists():  # the target only trains
        return "\n".join(commands_for_server(folder / "speculator", config.target.name_or_path))
    report = json.loads((folder / "eval" / "report.json").read_text())
    trial = "--chat" if any(row.get("chat") for row in report["suites"]) else '--prompt "..."'
    lines = [
        *headlines(report),
        f"head:   {folder / 'speculator'}",
        f"report: {folder / 'eval' / 'report.html'}",
        f"try:    speculator generate {how} {trial}",
        f"serve:  speculator serve {how}",
    ]
    return "\n".join(lines)


def _measure(config: RunConfig, target: Target, suites: dict[str, Suite]) -> None:
    """Tune the published head and write the report."""
    folder = Path(config.output_dir)
    head_folder, report = folder / "speculator", folder / "eval"
    head = load_head(head_folder, target)
    how: dict[str, Any] = {
        "temperatures": config.eval.temperatures,
        "max_new_tokens": config.eval.max_new_tokens,
        "seed": config.seed,
    }
    if config.eval.tune_prompts and not (head_folder / TUNED).exists():
        suite = dataclasses.replace(suites["validation"].first(config.eval.tune_prompts), name="validation")
        write_tuning(target, head, suite, head_folder / TUNED, config.eval.max_new_tokens, config.seed)
    if (report / "report.json").exists():  # the run was killed between report.json and report.md
        render(json.loads((report / "report.json").read_text()), [], report)
        return
    how |= {"tuned_in": head_folder, "speculator_name": str(head_folder), "training": curves(Path(config.output_dir))}
    evaluate(target, head, [suites["held-out"]], report, **how)


def load_target(config: RunConfig) -> TrainingTarget:
    """Load the configured target: a `Target`, its training half if it can't be decoded, or one that servers run."""
    given = dataclasses.asdict(config.target)
    variables, urls, name = given.pop("chat_template_kwargs"), given.pop("server"), given.pop("name_or_path")
    target: ServerTarget | InProcessTarget
    if urls:
        own = {key: given[key] for key in ("revision", "dtype", "trust_remote_code")}
        target = ServerTarget.connect(name, urls, **own)
    else:
        with loading(name):
            target = InProcessTarget.load(name, **given)
    set_template_variables(target.tokenizer, variables)
    if config.data.raw:
        target.tokenizer.chat_template = None
    if isinstance(target, ServerTarget) or config.target.parallel in SHARDED:
        return target
    try:
        return Target.of(target)
    except UserError as error:
        checks.writes_nothing(config, str(error))
        log(f"{error}; the run trains without decoding, and a forecast selects the best checkpoint")
        return target


def fingerprints(
    target: TrainingTarget, train_rows: datasets.Dataset, validation_rows: datasets.Dataset, suites: dict[str, Suite]
) -> dict[str, str]:
    """Fingerprints of a run's inputs; a resumed run must have the same."""
    rows = {"training": train_rows, "validation": validation_rows}
    made = {"target": target.fingerprint} | {f"{name} rows": rows_fingerprint(each) for name, each in rows.items()}
    return made | {f"{name} prompts": prompts_fingerprint(suite.prompts) for name, suite in suites.items()}


def count_of_tokens(packed: datasets.Dataset) -> int:
    """Count the tokens of packed rows, which are all of one length."""
    return len(packed) * len(packed[0]["input_ids"])


def say_sizes(asked: RunConfig, config: RunConfig, rows: int, tokens: int) -> None:
    """Print the size of stage 1, and what was adapted to it."""
    stage, before = config.stage1, asked.stage1
    batch = stage.per_device_train_batch_size * stage.gradient_accumulation_steps
    was = before.per_device_train_batch_size * before.gradient_accumulation_steps
    notes = [f"rows of {config.data.seq_length} tokens"] * (config.data.seq_length != asked.data.seq_length)
    notes += [f"batches of {batch}, not {was}"] * (batch != was)
    little = f"; this is little text, so {' and '.join(notes)}" if notes else ""
    log(f"stage 1 trains on {tokens:,} tokens in {rows:,} rows, for {stage.max_steps:,} steps{little}")


def say_what_is_idle(state: PartialState) -> None:
    """Print how to use all GPUs if one process sees several."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if state.num_processes == 1 and count > 1:
        log(
            f"{count} GPUs are visible, one process uses one; "
            f"`accelerate launch --multi_gpu --num_processes {count} train.py` uses all"
        )


def use_all_cores() -> None:
    """Undo the one intra-op thread that accelerate's launcher forces on a CPU run."""
    if not torch.accelerator.is_available():
        torch.set_num_threads(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def rows(config: RunConfig, target: TrainingTarget, split: str) -> datasets.Dataset:
    """Return the packed rows of one split; of the validation split only as many as an evaluation uses."""
    with reporting_full_disk(cache_folder()):
        return token_rows(
            config.data.sources,
            split,
            target.tokenizer,
            config.data.seq_length,
            max_tokens=config.data.max_tokens if split == "train" else None,
            max_package_bytes=config.data.max_package_bytes,
            max_bad_rows=config.data.max_bad_rows,
            first_rows=config.eval.validation_rows if split == "validation" else None,
            num_proc=config.data.num_proc,
        )


def prompts_of(config: RunConfig, target: TrainingTarget, split: str, count: int) -> Suite:
    """Return up to `count` prompts of one split: the first tokens of texts, and chats up to the user's last message."""
    # Bad rows were reported when the split was prepared.
    tally = Tally(max_share=1.0 if config.data.max_bad_rows else 0.0)
    suite = from_text(
        config.data.sources,
        target.tokenizer,
        config.eval.prompt_tokens,
        count,
        split=split,
        room=Room(target.name, target.context_length, config.eval.max_new_tokens),
        max_package_bytes=config.data.max_package_bytes,
        tally=tally,
    )
    if split == "held-out":
        tally.warn(f"the {split} split of {', '.join(config.data.sources)}")
    return suite


def own_prompts_of(config: RunConfig, target: TrainingTarget) -> list[Conversation]:
    """Return the prompts and chats of the training split that the target answers for stage 2."""
    settings = config.stage2.generate
    return conversations(
        config.data.sources,
        "train",
        target.tokenizer,
        settings.prompt_tokens,
        settings.max_rows,
        turns=None if settings.turns == "all" else settings.turns,
        per_text=_PROMPTS_PER_TEXT,
        room=Room(target.name, target.context_length, settings.max_new_tokens, config.data.seq_length),
        max_package_bytes=config.data.max_package_bytes,
        tally=Tally(max_share=1.0 if config.data.max_bad_rows else 0.0),
    )


def _text_by_servers(
    config: RunConfig, target: ServerTarget, own_prompts: list[Conversation] | None, folder: Path
) -> datasets.Dataset:
    from data.client import fetch_rows  # imports openai, for a second

    if own_prompts is None:
        return fresh_rows(config, target, None, folder)
    settings = config.stage2.generate
    return fetch_rows(
        target.urls,
        target.name,
        target.tokenizer,
        own_prompts,
        folder,
        sampling=checks.own_sampling(settings),
        max_new_tokens=settings.max_new_tokens,
        max_prompt_tokens=config.data.seq_length,
        seed=config.seed,
    )


def generate_own_text(
    config: RunConfig, target: TrainingTarget, head_folder: Path, own_prompts: list[Conversation] | None
) -> datasets.Dataset:
    """Let the target continue prompts from the training text, with the head drafting.

    Without prompts the target writes the prompts as well.
    """
    settings, folder = config.stage2.generate, Path(config.output_dir) / "generated"
    if isinstance(target, ServerTarget):
        return _text_by_servers(config, target, own_prompts, folder)
    assert isinstance(target, Target)  # see `checks.writes_nothing`
    fixed, sampling = settings.num_speculative_tokens, checks.own_sampling(settings)
    drafter = (
        HeadDrafter(load_head(head_folder, target), fixed)
        if fixed
        else load_drafter(
            head_folder,
            target,
            temperatures=[each.temperature for each in sampling],
            batch_size=settings.batch_size,
        )
    )
    if own_prompts is None:
        return fresh_rows(config, target, drafter, folder)
    return generate_rows(
        target,
        drafter,
        own_prompts,
        folder,
        sampling=sampling,
        max_new_tokens=settings.max_new_tokens,
        max_prompt_tokens=config.data.seq_length,
        batch_size=settings.batch_size,
        seed=config.seed,
        mark_rejected=config.stage2.rejected_token_weight is not None,
    )
