"""Text that the target writes in a run: the source `self`, written once into the cache, and the rows of stage 2."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
from accelerate import PartialState
from filelock import FileLock

from data.conversations import Conversation
from data.magpie import Asking, prompt_sampling_of, self_rows, summary
from data.mixture import SELF, Mixture, Source, SourceError
from data.onpolicy import generate_rows
from data.packing import COLUMNS, pack
from data.sources import token_documents
from data.tally import Tally
from data.writing import Writing
from speculator import HeadDrafter
from speculator.checkpoints.loading import load_drafter, load_head
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name
from speculator.drafters import Drafter
from speculator.files import acquire, cache_folder, make_folder
from speculator.target.model import Target
from speculator.target.server import ServerTarget
from speculator.target.training import TrainingTarget
from speculator.terminal import log
from train import checks
from train.checkpoint import reporting_full_disk
from train.config import RunConfig
from train.sizes import longest

_STREAMS = 1 << 60  # between the seeds of the chats for stage 1 and those for stage 2


def with_self_written(config: RunConfig, target: TrainingTarget) -> RunConfig:
    """Return the config with `self` replaced by the folder of the target's chats; every process of the run calls this.

    Missing chats are written first, after a check that the other sources can be read.

    Raises:
        UserError: another source can't be read; another run is writing these chats; or as `self_rows`.
    """
    mixture = config.data.mixture
    if not mixture.names_self:
        return config
    folder = folder_of(config, target)
    for source in mixture.sources:
        if source.location != SELF:
            _look_at(source, config, target)
    with reporting_full_disk(cache_folder()):
        _write(config, target, folder)
    read = [Source(str(folder), each.weight) if each.location == SELF else each for each in mixture.sources]
    return replace(config, data=replace(config.data, sources=[*map(str, read)]))


def folder_of(config: RunConfig, target: TrainingTarget) -> Path:
    """Return the cache folder of the chats that the source `self` stands for; it may not exist yet.

    Its name is a hash of all that the chats depend on, so runs with the same target, settings and seed share them.
    """
    who = [target.name, target.fingerprint, dtype_name(target.dtype), target.tokenizer.chat_template]
    key = json.dumps([*who, dataclasses.asdict(config.data.self_source), config.seed])
    return cache_folder() / f"{SELF}-{hashlib.sha256(key.encode()).hexdigest()[:20]}"


def fresh_rows(config: RunConfig, target: TrainingTarget, drafter: Drafter | None, folder: Path) -> datasets.Dataset:
    """Write chats for stage 2 by the settings of `stage2.generate`, different from those of stage 1."""
    settings = config.stage2.generate
    made = self_rows(
        target,
        drafter,
        folder,
        _asking(config, settings.max_rows),
        replace(_own_writing(config), seed=config.seed + _STREAMS),
        batch_size=settings.batch_size,
        previous=folder_of(config, target),
    )
    log(f"{SELF}: {summary(folder)}")
    return made


def _asking(config: RunConfig, rows: int) -> Asking:
    own = config.data.self_source
    sampling = prompt_sampling_of(own.prompt_temperature, own.prompt_top_p, "data.self_source.")
    return Asking(rows=rows, turns=own.turns, sampling=sampling, max_prompt_tokens=own.max_prompt_tokens)


def _own_writing(config: RunConfig) -> Writing:
    """Return how the target writes the text of stage 2."""
    return Writing(
        samplings=tuple(checks.own_sampling(config.stage2.generate)),
        max_new_tokens=config.stage2.generate.max_new_tokens,
        seed=config.seed,
        mark_rejected=config.stage2.rejected_token_weight is not None,
    )


def _look_at(source: Source, config: RunConfig, target: TrainingTarget) -> None:
    """Raise a SourceError if a source is empty or can't be read, before the target writes for hours."""
    tally = Tally(config.data.max_bad_rows)
    found = token_documents(Mixture((source,)), "train", target.tokenizer, tally=tally)
    if next(found, None) is None:
        raise SourceError(f"the train split of {source.location} holds nothing to train on")


def _write(config: RunConfig, target: TrainingTarget, folder: Path) -> None:
    own, main = config.data.self_source, PartialState().is_main_process
    samplings = tuple(map(Sampling, own.temperatures))
    writing = Writing(samplings=samplings, max_new_tokens=own.max_new_tokens, seed=config.seed)
    lock = FileLock(f"{folder}.lock")
    if main and not (folder / "manifest.json").exists():
        make_folder(folder.parent)
        acquire(lock, f"{folder}: another run is writing these chats; start again when it has")
        log(f"{SELF}: {target.name} writes {own.max_rows:,} chats into {folder}")
    PartialState().wait_for_everyone()
    try:
        self_rows(target, None, folder, _asking(config, own.max_rows), writing, batch_size=own.batch_size)
    finally:
        lock.release()
    log(f"{SELF}: {summary(folder)}")


def generate_own_text(
    config: RunConfig, target: TrainingTarget, head_folder: Path, own_prompts: list[Conversation] | None
) -> datasets.Dataset:
    """Return rows that the target writes with the head drafting: it continues prompts from the training text.

    Without prompts the target writes the prompts as well.
    """
    settings, folder = config.stage2.generate, Path(config.output_dir) / "generated"
    if isinstance(target, ServerTarget):
        return _text_by_servers(config, target, own_prompts, folder)
    assert isinstance(target, Target)  # see `checks.check_writes_no_text`
    fixed, writing = settings.num_speculative_tokens, _own_writing(config)
    drafter = (
        HeadDrafter(load_head(head_folder, target), fixed)
        if fixed
        else load_drafter(
            head_folder,
            target,
            temperatures=[each.temperature for each in writing.samplings],
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
        writing,
        max_prompt_tokens=config.data.seq_length,
        batch_size=settings.batch_size,
    )


def packed(config: RunConfig, rows: datasets.Dataset) -> datasets.Dataset:
    """Return the rows of `generate_own_text` packed like those of stage 1; every process of the run calls this.

    Rows are as long as those of stage 1, or as the longest text. Too few of them for a batch stay as they are.
    """
    stage, work = config.stage2, Path(config.output_dir) / "generated" / "packed"
    length = max(config.data.seq_length, longest(rows))
    features = datasets.Features({column: datasets.List(datasets.Value("int32")) for column in COLUMNS})
    state = PartialState()
    with state.main_process_first():  # the others read what it wrote
        if state.is_main_process:
            shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
        made = datasets.Dataset.from_generator(
            lambda: pack(rows, length), features=features, cache_dir=str(work), fingerprint=f"rows-of-{length}"
        )
    batch = stage.per_device_train_batch_size * stage.gradient_accumulation_steps * state.num_processes
    return made if stage.epochs or len(made) >= batch else rows


def held_out(config: RunConfig, rows: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Split a twentieth off the rows of stage 2, to choose its checkpoint by text that the target wrote.

    The last rows are held out, at most `eval.validation_rows`; None if the others would not fill a batch.
    """
    stage, processes = config.stage2, PartialState().num_processes
    batch = stage.per_device_train_batch_size * (1 if stage.epochs else stage.gradient_accumulation_steps) * processes
    left = len(rows) - min(config.eval.validation_rows, len(rows) // 20)
    if left < batch or len(rows) - left < processes:
        return rows, None
    return rows.select(range(left)), rows.select(range(left, len(rows)))


def _text_by_servers(
    config: RunConfig, target: ServerTarget, own_prompts: list[Conversation] | None, folder: Path
) -> datasets.Dataset:
    from data.client import fetch_rows  # imports openai, for a second

    if own_prompts is None:
        return fresh_rows(config, target, None, folder)
    return fetch_rows(
        target.urls,
        target.name,
        target.tokenizer,
        own_prompts,
        folder,
        _own_writing(config),
        max_prompt_tokens=config.data.seq_length,
    )
