"""Work done in fixed batches, each finished one a file of its own: a kill loses the batches in progress, no more."""

from __future__ import annotations

import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, Features, Sequence, Value
from torch import accelerator
from tqdm import tqdm

from speculator.errors import UserError

_FEATURES = Features({"input_ids": Sequence(Value("int32")), "loss_mask": Sequence(Value("int8"))})
_POLL_SECONDS = 0.2


def state() -> PartialState:
    """This process among those of the run; alone where no launcher started it."""
    return PartialState(cpu=not accelerator.is_available())


class Batches:
    """The folder where the continuations of some prompts come together.

        FOLDER/batches/         while it is made: record.json, and a file for each finished batch
        FOLDER/rows/            in the end: the rows, as `datasets` saves them
        FOLDER/manifest.json    written last: a folder that has one is finished

    Of several processes the k-th of n works on every n-th batch. They share the folder, on one machine or over a
    network, and find out about each other by its files alone: waiting for a slow process takes part in no collective,
    so it can't run into a time-out. A process that dies takes the others with it by way of the launcher.

    Args:
        folder: made if need be.
        record: what the rows depend on, as JSON takes it: the same work goes on, other work is refused.
        rows: the prompts' indices, batch by batch.
        progress: show a bar over this process's share, if it is the main one.

    Raises:
        UserError: the folder holds something else, or was made with another record.
    """

    def __init__(self, folder: Path, record: dict[str, Any], rows: list[list[int]], progress: bool = True):
        self.folder, self.record, self.rows = folder, record, rows
        self._work, self._manifest = folder / "batches", folder / "manifest.json"
        began = self._work / "record.json"
        made = next((file for file in (self._manifest, began) if file.exists()), None)
        if made:
            known = json.loads(made.read_text())
            for name, value in record.items():
                if known.get(name) != value:
                    raise UserError(
                        f"{folder} was made with {name} {json.dumps(known.get(name))}, not {json.dumps(value)}: "
                        "take another folder, or remove that one"
                    )
        elif folder.exists() and any(folder.iterdir()) and not self._work.exists():
            raise UserError(f"{folder} holds other files: take another folder")
        else:
            self._work.mkdir(parents=True, exist_ok=True)
            _write(began, record)
        hidden = not progress or not state().is_main_process or self._manifest.exists()
        self._bar = tqdm(desc="generating", unit="row", disable=hidden)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def todo(self) -> list[int]:
        """The unfinished batches of this process."""
        share = range(state().process_index, len(self.rows), state().num_processes)
        left = [batch for batch in share if not (self._manifest.exists() or self._file(batch).exists())]
        total = sum(len(self.rows[batch]) for batch in share)
        self._bar.reset(total)
        self._bar.update(total - sum(len(self.rows[batch]) for batch in left))
        return left

    def write(self, batch: int, continuations: list[list[int]], **facts: Any) -> None:
        """Keep what a batch gave: new tokens, in the order of its rows, and some facts for the manifest."""
        _write(self._file(batch), {"continuations": continuations, **facts})
        self._bar.update(len(continuations))

    def finish(self, prompts: list[list[int]], summary: Callable[[list[dict]], dict[str, Any]]) -> Dataset:
        """Wait for every batch, put the rows together in the order of the prompts, and write the manifest.

        Args:
            prompts: of all rows.
            summary: what the manifest says beside the record, from what was written of each batch.

        Returns:
            Rows {"input_ids": prompt and continuation, "loss_mask": 0 on the prompt, 1 on the continuation}.
        """
        self._bar.close()
        if state().is_main_process:
            if not self._manifest.exists():
                _wait_for(*map(self._file, range(len(self.rows))))
                self._assemble(prompts, summary)
            shutil.rmtree(self._work, ignore_errors=True)
        _wait_for(self._manifest)
        return Dataset.load_from_disk(str(self.folder / "rows"))

    def _assemble(self, prompts: list[list[int]], summary: Callable[[list[dict]], dict[str, Any]]) -> None:
        made: dict[int, array] = {}
        facts = []
        for batch, rows in enumerate(self.rows):
            written = json.loads(self._file(batch).read_text())
            made |= zip(rows, (array("i", tokens) for tokens in written.pop("continuations")), strict=True)
            facts.append(written)

        def rows_in_order() -> Iterator[dict]:
            for row, prompt in enumerate(prompts):
                mask = [0] * len(prompt) + [1] * len(made[row])
                yield {"input_ids": [*prompt, *made[row]], "loss_mask": mask}

        cache, scratch, final = self._work / "cache", self._work / "rows", self.folder / "rows"
        for leftover in (cache, scratch, final):
            shutil.rmtree(leftover, ignore_errors=True)
        rows = Dataset.from_generator(rows_in_order, features=_FEATURES, cache_dir=str(cache), fingerprint="generated")
        rows.save_to_disk(str(scratch))
        scratch.rename(final)
        tokens = sum(map(len, made.values()))
        _write(self._manifest, {**self.record, "tokens": tokens, **summary(facts)}, indent=2)

    def _file(self, batch: int) -> Path:
        return self._work / f"{batch:06d}.json"


def _wait_for(*files: Path) -> None:
    for file in files:
        while not file.exists():
            time.sleep(_POLL_SECONDS)


def _write(file: Path, content: dict[str, Any], indent: int | None = None) -> None:
    """Aside, then renamed: a file that is there is whole. Processes that write the same one don't meet."""
    scratch = file.with_name(f"{file.name}.{os.getpid()}")
    with scratch.open("w") as stream:
        json.dump(content, stream, indent=indent)
        stream.flush()
        os.fsync(stream.fileno())
    scratch.rename(file)
