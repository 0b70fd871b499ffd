"""Work in fixed batches, one file per finished batch, so that a killed run loses only the batches in progress."""

from __future__ import annotations

import json
import os
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from accelerate import PartialState
from datasets import Dataset, Features, Sequence, Value
from filelock import FileLock

from data.documents import Columns
from data.tally import CUT_SHARE, cut_answers
from speculator.device import has_accelerator
from speculator.errors import UserError, first_line
from speculator.files import (
    JsonObject,
    acquire,
    make_folder,
    manifest_error,
    new_folder,
    read_json,
    write_manifest,
    write_text,
)
from speculator.terminal import Progress, log, working

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FEATURES = {
    "input_ids": Sequence(Value("int32")),
    "loss_mask": Sequence(Value("int8")),
    "source_ids": Sequence(Value("int32")),
}
POLL_SECONDS = 0.2


class Notes(TypedDict, total=False):
    """What a folder was begun with and a resumed run keeps: rows answered together, and costs of an engine's steps."""

    batch_size: int
    costs: list[JsonObject]


class BatchFacts(TypedDict, total=False):
    """Statistics of a finished batch, which are stored with its rows and summed up in the manifest.

    Attributes:
        speculative, plain: [tokens, seconds] of decoding some rows with drafts and without, if they were timed.
        steps: [number of decoding steps, number of tokens that the steps gave].
        cut: number of answers that reached their limit, see `Answering`.
        servers: number of answers by the URL of the server.
        models: names of the models that the servers were asked for.
    """

    speculative: list[float]
    plain: list[float]
    steps: list[int]
    seconds: float
    answers: int
    cut: int
    servers: dict[str, int]
    models: list[str]


def state(**settings: Any) -> PartialState:
    """Return accelerate's state of this process: `process_index`, `num_processes`; 0 and 1 without a launcher.

    The first call, which takes the `settings` of `PartialState`, waits for the other processes.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        with working(f"waiting for {count} processes") if count > 1 else nullcontext():
            return PartialState(cpu=not has_accelerator(), **settings)
    except ValueError as error:
        raise UserError(
            f"WORLD_SIZE is {count}, but {first_line(error)}; unset RANK and WORLD_SIZE if no launcher has set them"
        ) from None


def stored_record(folder: Path) -> JsonObject | None:
    """Return the settings with which a folder of generated rows was begun, or None if the folder is new or empty.

    In a finished folder, its statistics are among them. Raises a UserError if the folder holds other files.
    """
    manifest, work = folder / "manifest.json", folder / "batches"
    for file in (manifest, work / "record.json", manifest):  # another process may finish the work meanwhile
        if file.exists():
            try:
                return read_json(file)
            except UserError:
                if file == manifest or not manifest.exists():
                    raise
    if folder.exists() and any(folder.iterdir()) and not work.exists():
        raise UserError(f"{folder} holds other files: choose another folder")
    return None


class Batches:
    """The output folder of generated rows, shared by all processes.

        FOLDER/batches/         unfinished work: record.json and one JSON file per finished batch
        FOLDER/rows/            finished rows, a `datasets` folder with checksums.json
        FOLDER/manifest.json    written last: the settings and statistics

    Process k of n makes every n-th batch. The processes learn of each other's batches from the files alone: they wait
    for a slow process outside of any collective, so nothing times out. They synchronize once, at the end. A process
    that dies is noticed by the launcher, which ends the others.

    Args:
        folder: created with the first batch, so that an earlier failure leaves nothing behind.
        record: settings that the rows depend on. The same settings resume the work, others raise an error.
        rows: for each batch, the numbers of its prompts; []: the caller writes all rows at once, by `conclude`.
        title: title of a progress bar over the main process's batches.
        notes: for record.json and manifest.json; they need not be the same when the work is resumed.
        may_be_empty: work that gives no row is finished too; else it is an error.

    Raises:
        UserError: the folder holds something else, was made with other settings, or is damaged.
    """

    def __init__(
        self,
        folder: Path,
        record: JsonObject,
        rows: list[list[int]],
        title: str = "generating",
        notes: Notes | None = None,
        may_be_empty: bool = False,
    ):
        self.folder, self.record, self.rows, self._notes = folder, record, rows, notes or {}
        self._may_be_empty = may_be_empty
        self._work, self._manifest = folder / "batches", folder / "manifest.json"
        self._record = self._work / "record.json"
        self._lock = FileLock(self._work / "lock")
        finished, stored = self.finished, stored_record(folder)
        if stored is not None:
            for name, value in record.items():
                if stored.get(name) != value:
                    raise UserError(
                        f"{folder} was made with {name} {json.dumps(stored.get(name))}, not {json.dumps(value)}: "
                        "choose another folder, or remove that one"
                    )
            if finished and (problem := manifest_error(folder / "rows")):
                raise UserError(f"{folder}/rows: {problem}: remove {folder}")
        hidden = not rows or not state().is_main_process or self.finished
        self._bar = Progress(title=title, unit="rows", disable=hidden)
        self._tokens, self._start = 0, time.monotonic()

    @property
    def finished(self) -> bool:
        return self._manifest.exists()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        mine = self._lock.is_locked
        self._lock.release()
        # An error before the first batch leaves nothing behind.
        if mine and {path.name for path in self._work.glob("*")} <= {"record.json", "lock"}:
            shutil.rmtree(self._work)
            with suppress(OSError):  # rows of a save that was killed may be left
                self.folder.rmdir()

    def todo(self) -> list[int]:
        """Return the numbers of this process's unfinished batches, and show the finished ones in the progress bar."""
        # Process k of n has the batches k, k + n, k + 2n, ...
        assigned = range(state().process_index, len(self.rows), state().num_processes)
        # A file is written under another name and then renamed, so a batch either exists as a whole or not at all.
        left = [] if self.finished else [batch for batch in assigned if not self._file(batch).exists()]
        total = sum(len(self.rows[batch]) for batch in assigned)
        self._bar.reset(total)
        self._bar.update(total - sum(len(self.rows[batch]) for batch in left))
        return left

    def write(self, batch: int, rows: list[list[Columns]], **facts: Unpack[BatchFacts]) -> None:
        """Store a finished batch: for each prompt the rows that it gave, as columns by name, and facts for `finish`."""
        self.begin()
        write_text(self._file(batch), json.dumps({"rows": rows, **facts}, separators=(",", ":")))
        self._tokens += sum(sum(row["loss_mask"]) for made in rows for row in made)
        speed = self._tokens / max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(f"{self._tokens:,} tokens, {speed:.0f} tokens/s", refresh=False)
        self._bar.update(len(rows))

    def begin(self) -> Path:
        """Create the folder and lock it in the main process; return the subfolder for unfinished work.

        Raises a UserError if another run has locked it.
        """
        if not self._record.exists():
            make_folder(self._work)
            write_text(self._record, json.dumps({**self.record, **self._notes}, sort_keys=True))
        if state().is_main_process and not self._lock.is_locked:
            acquire(self._lock, f"{self.folder}: another run is writing it")
        return self._work

    def finish(self) -> Dataset:
        """Wait for all batches, write the rows in the order of the prompts and the manifest, and return the rows.

        The manifest adds "tokens" (new ones), "answers", "cut" (answers of chats that reached `max_new_tokens`),
        "skipped" (prompts whose first answer failed), "acceptance_length", "tokens_per_second" ("speculative" and
        "plain", without prefill, timed one after the other on the same few rows), "seconds" (all rows and processes,
        with prefill), and of servers "servers" (answers of each) and "models". An engine's adaptive drafter adds
        "costs", see `decoding.json`.
        """
        return self.conclude(self._assemble)

    def conclude(self, assemble: Callable[[], tuple[Iterable[Columns], JsonObject]]) -> Dataset:
        """Write the rows and the manifest unless they exist, remove the unfinished work, and return the rows.

        Only the main process calls `assemble`, which returns the rows, and facts for the manifest.
        """
        self._bar.close()
        if state().is_main_process and not self.finished:
            self.begin()
            self._save(*assemble())
        _wait_for(self._manifest)
        rows = Dataset.load_from_disk(str((self.folder / "rows").resolve()))  # datasets would expand "~"
        state().wait_for_everyone()  # other processes may still read the batches
        if state().is_main_process:
            shutil.rmtree(self._work, ignore_errors=True)
            self._lock.release()
        return rows

    def _assemble(self) -> tuple[Iterable[Columns], JsonObject]:
        """Wait for all batches; return their rows in the order of the prompts, and the facts for the manifest."""
        made: dict[int, list[dict[str, array]]] = {}
        batches: list[BatchFacts] = []
        tokens = skipped = 0
        for batch, prompts in enumerate(self.rows):
            _wait_for(self._file(batch))
            content: Any = read_json(self._file(batch))
            for prompt, rows in zip(prompts, content.pop("rows"), strict=True):
                # Four bytes a token, while all rows are in memory: lists of integers would take several times that.
                made[prompt] = [{name: array("i", column) for name, column in row.items()} for row in rows]
                tokens += sum(sum(row["loss_mask"]) for row in rows)
                skipped += not rows
            batches.append(content)
        ordered = (row for prompt in sorted(made) for row in made[prompt])
        rows_of_lists = ({name: column.tolist() for name, column in row.items()} for row in ordered)

        def ratio(name: Literal["steps", "speculative", "plain"], of: int, per: int) -> float | None:
            sums = [sum(column) for column in zip(*filter(None, (each.get(name) for each in batches)), strict=True)]
            return sums[of] / sums[per] if sums and sums[per] else None

        facts: JsonObject = {
            "tokens": tokens,
            "cut": sum(each["cut"] for each in batches),
            "skipped": skipped,
            "acceptance_length": ratio("steps", 1, 0),
            "tokens_per_second": {"speculative": ratio("speculative", 0, 1), "plain": ratio("plain", 0, 1)},
            "seconds": sum(each["seconds"] for each in batches),
            "answers": sum(each["answers"] for each in batches),
        }
        if any("servers" in each for each in batches):
            facts["servers"] = dict(sum((Counter(each["servers"]) for each in batches), Counter()))
            facts["models"] = sorted({model for each in batches for model in each["models"]})
        return rows_of_lists, facts

    def _save(self, rows: Iterable[Columns], facts: JsonObject) -> None:
        """Write the rows, and then the manifest; raise a UserError if there is no row and none is not allowed."""
        rows = iter(rows)
        first = next(rows, None)  # it tells the columns; some may be missing
        if first is None and not self._may_be_empty:
            raise UserError(f"{self.folder}: no prompt was answered; remove it before you start again")
        features = Features({name: _FEATURES[name] for name in first or _FEATURES})
        cache, final = self._work / "cache", self.folder / "rows"
        # From a process that was killed here: without a manifest they may be incomplete.
        for leftover in (cache, final):
            shutil.rmtree(leftover, ignore_errors=True)
        with new_folder(final) as scratch:
            table = Dataset.from_dict({name: [] for name in features}, features)  # which `from_generator` refuses
            if first is not None:
                table = Dataset.from_generator(
                    lambda: chain([first], rows), features=features, cache_dir=str(cache), fingerprint="generated"
                )
            # An empty table too has a file: `load_from_disk` needs one.
            table.save_to_disk(str(scratch), num_shards=None if first else 1)
            write_manifest(scratch)
        # Last of all: a folder with a manifest is finished, whatever happened to the process afterwards.
        write_text(self._manifest, json.dumps({**self.record, **self._notes, **facts}, indent=2))

    def _file(self, batch: int) -> Path:
        return self._work / f"{batch:06d}.json"


def warn_of_cut_answers(folder: Path, setting: str) -> None:
    """Print a warning if more than `CUT_SHARE` of the answers in a finished folder reached their limit."""
    if cut := cut_answers(read_json(folder / "manifest.json"), setting, CUT_SHARE):
        log(f"warning: {cut}: a head that trains on them learns how answers begin; raise the limit")


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(POLL_SECONDS)
