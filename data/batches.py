"""Work done in fixed batches, each finished one a file of its own: a kill loses the batches in progress, no more."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, Features, Sequence, Value
from filelock import FileLock
from torch import accelerator
from tqdm import tqdm

from speculator.errors import UserError
from speculator.files import acquire, make_folder, new_folder, read_json, sha256, write_text
from speculator.target.sharding import Group, share

_FEATURES = {
    "input_ids": Sequence(Value("int32")),
    "loss_mask": Sequence(Value("int8")),
    "refused": Sequence(Value("int8")),
}
_POLL_SECONDS = 0.2


def state() -> PartialState:
    """This process among those of the run; alone where no launcher started it."""
    return PartialState(cpu=not accelerator.is_available())


def begun(folder: Path) -> dict[str, Any] | None:
    """What the record of the work in a folder says, finished or not; None where none is begun.

    Raises:
        UserError: the folder holds something else, or the record is damaged.
    """
    manifest, work = folder / "manifest.json", folder / "batches"
    for file in (manifest, work / "record.json", manifest):  # another process may be finishing it just now
        if file.exists():
            try:
                return read_json(file)
            except UserError as error:
                if file == manifest or not manifest.exists():
                    raise UserError(f"{error}: damaged; remove {folder}, and it is made anew") from None
    if folder.exists() and any(folder.iterdir()) and not work.exists():
        raise UserError(f"{folder} holds other files: take another folder")
    return None


def awaited(folder: Path, group: Group | None) -> dict[str, Any] | None:
    """`begun(folder)`; processes other than the first, or the first group, wait until the work has begun."""
    known = begun(folder)
    if share(group, state().process_index, state().num_processes)[0] == 0:
        return known if group is None else group.broadcast_object(known)
    while known is None:
        time.sleep(_POLL_SECONDS)
        known = begun(folder)
    return known


class Batches:
    """The folder where the continuations of some prompts come together.

        FOLDER/batches/         while it is made: record.json, and a file for each finished batch
        FOLDER/rows/            in the end: the rows, as `datasets` saves them
        FOLDER/manifest.json    written last: a folder that has one is finished

    Of several processes the k-th of n works on every n-th batch. They share the folder, on one machine or over a
    network, and find out about each other by its files alone: waiting for a slow process takes part in no collective,
    so it can't run into a time-out. Only when all is written do they wait for each other, before what is no longer
    needed is removed. A process that dies takes the others with it by way of the launcher.

    All files have checksums. A damaged batch is made anew; a finished folder that is damaged is refused.

    Args:
        folder: made if need be, with the first batch: what fails before leaves nothing.
        record: what the rows depend on, as JSON takes it: the same work goes on, other work is refused.
        rows: the prompts' indices, batch by batch.
        progress: show a bar over this process's share, if it is the main one.
        title: of the bar.
        group: processes that make the same batches, because they hold one target; its first one writes.
        notes: what record and manifest say besides, of how the work was begun.

    Raises:
        UserError: the folder holds something else, was made with another record, or is damaged or can't be written.
    """

    def __init__(
        self,
        folder: Path,
        record: dict[str, Any],
        rows: list[list[int]],
        progress: bool = True,
        title: str = "generating",
        group: Group | None = None,
        notes: dict[str, Any] | None = None,
    ):
        self._group, self._notes = group, notes or {}
        self.folder, self.record, self.rows = folder, record, rows
        self._work, self._manifest = folder / "batches", folder / "manifest.json"
        self._record = self._work / "record.json"
        self._lock = FileLock(self._work / "lock")
        self._seal = json.dumps(record, sort_keys=True)
        finished, known = self.finished, begun(folder)
        if known is not None:
            for name, value in record.items():
                if known.get(name) != value:
                    raise UserError(
                        f"{folder} was made with {name} {json.dumps(known.get(name))}, not {json.dumps(value)}: "
                        "take another folder, or remove that one"
                    )
            if finished:
                self._check_finished(known)
        hidden = not progress or not state().is_main_process or self._manifest.exists()
        self._bar = tqdm(desc=title, unit="row", disable=hidden)
        self._tokens, self._began = 0, time.monotonic()

    @property
    def finished(self) -> bool:
        return self._manifest.exists()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        self._lock.release()

    def todo(self) -> list[int]:
        """The unfinished batches of this process."""
        group = self._group
        first, step = share(group, state().process_index, state().num_processes)
        own = range(first, len(self.rows), step)
        left: list[int] = []
        if (group is None or group.leads) and not self._manifest.exists():
            left = [batch for batch in own if not self._is_kept(batch)]
        if group is not None:
            left = group.broadcast_object(left)
        total = sum(len(self.rows[batch]) for batch in own)
        self._bar.reset(total)
        self._bar.update(total - sum(len(self.rows[batch]) for batch in left))
        return left

    def write(self, batch: int, continuations: list[list[int]], **facts: Any) -> None:
        """Keep what a batch gave: new tokens, in the order of its rows, and some facts for the manifest.

        The fact `refused`, of every new token 1 where it took a refused draft's place, becomes a column of the rows.
        """
        if self._group is not None and not self._group.leads:
            return
        self.begin()
        content = {"continuations": continuations, **facts}
        write_text(self._file(batch), json.dumps({**content, "sha256": self._sum(content)}))
        self._tokens += sum(map(len, continuations))
        speed = self._tokens / max(time.monotonic() - self._began, 1e-9)
        self._bar.set_postfix_str(f"{self._tokens:,} tokens, {speed:.0f} tokens/s", refresh=False)
        self._bar.update(len(continuations))

    def begin(self) -> Path:
        """Take the folder; gives where work in progress lies, which goes when the rows are finished.

        Raises:
            UserError: another run has taken it.
        """
        if not self._record.exists():
            make_folder(self._work)
            write_text(self._record, json.dumps({**self.record, **self._notes}, sort_keys=True))
        if state().is_main_process and not self._lock.is_locked:
            acquire(self._lock, f"{self.folder}: another run is writing it")
        return self._work

    def finish(self, prompts: list[list[int]], summary: Callable[[list[dict]], dict[str, Any]]) -> Dataset:
        """Wait for every batch, put the rows together in the order of the prompts, and write the manifest.

        Args:
            prompts: of all rows.
            summary: what the manifest says beside the record, from what was written of each batch.

        Returns:
            Rows {"input_ids": prompt and continuation, "loss_mask": 0 on the prompt, 1 on the continuation}, and where
            it was written "refused", 0 on the prompt.
        """
        return self.conclude(lambda: self._assemble(prompts, summary))

    def conclude(self, assemble: Callable[[], tuple[Iterable[dict], dict[str, Any]]]) -> Dataset:
        """Save the rows and the manifest, unless a finished folder has them; removes the work in progress.

        Args:
            assemble: gives the rows, and what the manifest says beside the record. On the main process.
        """
        self._bar.close()
        if state().is_main_process and not self._manifest.exists():
            self.begin()
            self._save(*assemble())
        _wait_for(self._manifest)
        made = Dataset.load_from_disk(str((self.folder / "rows").resolve()))  # datasets reads "~" as a shell does
        state().wait_for_everyone()  # others may still read what lies there; all come here at about the same time
        if state().is_main_process:
            shutil.rmtree(self._work, ignore_errors=True)
            self._lock.release()
        return made

    def _assemble(
        self, prompts: list[list[int]], summary: Callable[[list[dict]], dict[str, Any]]
    ) -> tuple[Iterable[dict], dict[str, Any]]:
        made: dict[int, array] = {}
        refused: dict[int, array] = {}
        facts = []
        for batch, rows in enumerate(self.rows):
            written = self._wait_for(batch)
            made |= zip(rows, (array("i", tokens) for tokens in written.pop("continuations")), strict=True)
            refused |= zip(rows, (array("b", marks) for marks in written.pop("refused", [])), strict=False)
            facts.append(written)

        def rows_in_order() -> Iterator[dict]:
            for row, prompt in enumerate(prompts):
                mask = [0] * len(prompt) + [1] * len(made[row])
                columns = {"input_ids": [*prompt, *made[row]], "loss_mask": mask}
                yield columns | ({"refused": [0] * len(prompt) + list(refused[row])} if refused else {})

        return rows_in_order(), {"tokens": sum(map(len, made.values())), **summary(facts)}

    def _save(self, rows: Iterable[dict], facts: dict[str, Any]) -> None:
        rows = iter(rows)
        first = next(rows)
        features = Features({name: _FEATURES[name] for name in first})
        cache, final = self._work / "cache", self.folder / "rows"
        for leftover in (cache, final):
            shutil.rmtree(leftover, ignore_errors=True)
        with new_folder(final) as scratch:
            table = Dataset.from_generator(
                lambda: chain([first], rows), features=features, cache_dir=str(cache), fingerprint="generated"
            )
            table.save_to_disk(str(scratch))
        manifest = {**self.record, **self._notes, **facts, "files": _sums(final)}
        write_text(self._manifest, json.dumps({**manifest, "sha256": self._sum(manifest)}, indent=2))

    def _check_finished(self, manifest: dict[str, Any]) -> None:
        """Refuse a finished folder whose files are not what was written."""
        found = {"manifest.json": manifest.pop("sha256", None) == self._sum(manifest)}
        if found["manifest.json"]:
            now = _sums(self.folder / "rows")
            names = sorted({*now, *manifest["files"]})
            found |= {f"rows/{name}": now.get(name) == manifest["files"].get(name) for name in names}
        for name, whole in found.items():
            if not whole:
                raise UserError(f"{self.folder}/{name} is damaged: remove {self.folder}, and it is made anew")

    def _sum(self, content: dict[str, Any]) -> str:
        """A checksum of what is written, and of what it was made for."""
        return hashlib.sha256((self._seal + json.dumps(content, sort_keys=True)).encode()).hexdigest()

    def _kept(self, batch: int) -> dict[str, Any] | None:
        """What a batch's file says; None if it is damaged."""
        try:
            content = read_json(self._file(batch))
        except UserError:
            return None
        return content if content.pop("sha256", None) == self._sum(content) else None

    def _is_kept(self, batch: int) -> bool:
        """Whether a batch is there and whole; if it is damaged, it goes."""
        file = self._file(batch)
        if not file.exists():
            return False
        if self._kept(batch) is None:
            print(f"{file}: damaged, so this batch is made anew", file=sys.stderr)
            file.unlink()
            return False
        return True

    def _wait_for(self, batch: int) -> dict[str, Any]:
        """What a batch's file says, once it is there; a damaged one is another process's to replace."""
        while True:
            _wait_for(self._file(batch))
            content = self._kept(batch)
            if content is not None:
                return content
            if state().num_processes == 1:
                raise UserError(f"{self._file(batch)} was damaged meanwhile: run the same again")
            time.sleep(_POLL_SECONDS)

    def _file(self, batch: int) -> Path:
        return self._work / f"{batch:06d}.json"


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(_POLL_SECONDS)


def _sums(folder: Path) -> dict[str, str]:
    """The checksums of a folder's files, by their names."""
    return {str(file.relative_to(folder)): sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}
