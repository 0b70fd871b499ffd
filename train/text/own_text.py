"""Text that the target writes in a run: the source `self`, written once into the cache, and the rows of stage 2."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import datasets
from accelerate import PartialState

from data.batches import warn_of_cut_answers
from data.magpie import self_rows, summary
from data.mixture import SELF, Mixture, Source, SourceError
from data.packing import COLUMNS, pack
from data.sources import token_documents
from data.tally import Tally
from data.writers import writer_of
from speculator.device import dtype_name
from speculator.files import cache_folder, locked, make_cache_folder
from speculator.prompts import Conversation
from speculator.target.base import TrainingTarget
from speculator.terminal import log
from train.checkpoint import reporting_full_disk
from train.door.settle import Run
from train.door.sizes import longest

_STREAMS = 1 << 32  # between the seeds of the chats for stage 1 and those for stage 2


def with_self_written(run: Run, target: TrainingTarget) -> Mixture:
    """Return the sources with `self` replaced by the folder of the target's chats; every process of the run calls this.

    Missing chats are written first, after a check that the other sources can be read. Raises a UserError if one can't,
    if another run is writing these chats, or if no user turn can be used.
    """
    mixture = run.mixture
    if not mixture.names_self:
        return mixture
    folder = folder_of(run, target)
    for source in mixture.sources:
        if source.location != SELF:  # empty, or can't be read: known before the target writes for hours
            tally = Tally(run.config.data.max_bad_rows)
            if next(token_documents(Mixture((source,)), "train", target.tokenizer, tally=tally), None) is None:
                raise SourceError(f"the train split of {source.location} holds nothing to train on")
    own, main = run.config.data.self_source, PartialState().is_main_process
    with reporting_full_disk(cache_folder()), ExitStack() as stack:
        if main and not (folder / "manifest.json").exists():
            make_cache_folder()
            busy = f"{folder}: another run is writing these chats; start again when it has"
            stack.enter_context(locked(Path(f"{folder}.lock"), busy))
            log(f"{SELF}: {target.name} writes {own.max_rows:,} chats into {folder}")
        PartialState().wait_for_everyone()
        self_rows(target, writer_of(target, own.batch_size), folder, run.asking, run.self_writing)
    log(f"{SELF}: {summary(folder)}")
    warn_of_cut_answers(folder, "data.self_source.max_new_tokens")
    read = [Source(str(folder), each.weight) if each.location == SELF else each for each in mixture.sources]
    return Mixture(tuple(read))


def folder_of(run: Run, target: TrainingTarget) -> Path:
    """Return the cache folder of the chats that the source `self` stands for; it may not exist yet.

    Its name is a hash of all that the chats depend on: runs with the same target, settings and `data.seed` share them.
    """
    who = [target.name, target.fingerprint, dtype_name(target.dtype), target.tokenizer.chat_template]
    if target.digest:  # a fine-tune has the fingerprint of its original
        who.append(target.digest)
    key = json.dumps([*who, dataclasses.asdict(run.config.data.self_source), run.config.data.seed])
    return cache_folder() / f"{SELF}-{hashlib.sha256(key.encode()).hexdigest()[:20]}"


def generate_own_text(
    run: Run, target: TrainingTarget, head_folder: Path, own_prompts: list[Conversation] | None, longest_prompt: int
) -> datasets.Dataset:
    """Return rows that the target writes for stage 2, into the run's folder "generated", with stage 1's head drafting.

    A target in servers writes without the head. `own_prompts` are prompts to continue, and chats to answer; None: the
    target writes the user turns as well. A chat ends at more than `longest_prompt` tokens before an answer.
    """
    settings, folder, writing = run.config.stage2.generate, run.folder / "generated", run.own_writing
    writer = writer_of(
        target,
        settings.batch_size,
        folder=head_folder,
        num_speculative_tokens=settings.num_speculative_tokens,
        temperatures=[each.temperature for each in writing.samplings],
    )
    if own_prompts is not None:
        return writer.write(own_prompts, folder, writing, max_prompt_tokens=longest_prompt)
    asking, writing = replace(run.asking, rows=settings.max_rows), replace(writing, seed=writing.seed + _STREAMS)
    # Near-duplicates of stage 1's chats are dropped.
    rows = self_rows(target, writer, folder, asking, writing, previous=folder_of(run, target))
    log(f"{SELF}: {summary(folder)}")
    return rows


def packed(run: Run, rows: datasets.Dataset, length: int) -> datasets.Dataset:
    """Return the rows of `generate_own_text` packed like those of stage 1; every process of the run calls this.

    Rows have `length` tokens, as in stage 1, or those of the longest text. Too few for a batch stay as they are.
    """
    stage, work = run.config.stage2, run.folder / "generated" / "packed"
    length = max(length, longest(rows))
    features = datasets.Features({column: datasets.List(datasets.Value("int32")) for column in COLUMNS})
    state = PartialState()
    with state.main_process_first():  # the others read what it wrote
        if state.is_main_process:
            shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
        made = datasets.Dataset.from_generator(
            lambda: pack(rows, length), features=features, cache_dir=str(work), fingerprint=f"rows-of-{length}"
        )
    batch = stage.rows_per_step * run.processes
    return made if stage.epochs or len(made) >= batch else rows


def held_out(run: Run, rows: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Split a twentieth off the rows of stage 2, to choose its checkpoint by text that the target wrote.

    Returns the rows to train on and, evenly spread among them, at most `eval.validation_rows` validation rows. These
    are None if the others would not fill a batch, or if they are fewer than the processes.
    """
    stage, processes = run.config.stage2, run.processes
    batch = stage.per_device_train_batch_size * (1 if stage.epochs else stage.gradient_accumulation_steps) * processes
    count = min(run.config.eval.validation_rows, len(rows) // 20)
    if len(rows) - count < batch or count < processes:
        return rows, None
    # Rows are in the order of their sources: of 100 rows and 4 these are 24, 49, 74 and 99.
    held = [len(rows) * (i + 1) // count - 1 for i in range(count)]
    return rows.select(sorted({*range(len(rows))} - {*held})), rows.select(held)
