"""Records answers as rows of token ids to train on."""

from __future__ import annotations

import gzip
import json
import logging
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from speculator.decoding.request import Request
from speculator.errors import UserError
from speculator.files import acquire, is_partial, make_folder, read_json, write_bytes, write_text
from speculator.target.model import Target
from speculator.target.text import source_of

SHARD_ROWS = 256
_SHARD_SECONDS = 60
_log = logging.getLogger(__name__)


class Recorder:
    """Writes a share of the answers to a folder that is a data source of `train.py`.

        FOLDER/manifest.json          the target
        FOLDER/rows/NUMBER.jsonl.gz   shards, the newest with the highest number: 256 rows, or a minute's

    A row has the columns of `speculator data generate`: "input_ids" (prompt and completion) and "loss_mask" (1 on the
    completion); with an encoder, "source_ids" are the prompt. Nothing else is kept. A shard appears with its last row,
    so a kill loses only the rows since the last shard.

    Args:
        folder: created if it does not exist. Only one server at a time records to it.
        share: probability of recording a request, in (0, 1].
        max_bytes: largest total size of the shards; the oldest are deleted when they exceed it.

    Raises:
        UserError: the folder holds something else or answers of another target, or another server records to it.
    """

    def __init__(self, folder: Path, target: Target, share: float, max_bytes: float):
        self._rows_folder, self._share, self._max_bytes = folder / "rows", share, max_bytes
        manifest = folder / "manifest.json"
        facts = {"recorded": True, "target": target.name, "fingerprint": target.fingerprint}
        if not manifest.exists():
            if folder.exists() and not all(map(is_partial, folder.iterdir())):
                raise UserError(f"--record {folder} holds other files: choose another folder")
            make_folder(folder)
            folder.chmod(0o700)  # people's prompts are not for every user of the machine
            write_text(manifest, json.dumps(facts))
        # The same weights may lie in another folder by now: the fingerprint counts, not the name.
        elif {**facts, "target": ""} != {**read_json(manifest), "target": ""}:
            raise UserError(f"--record {folder} was not recorded with {target.name}: choose another folder")
        make_folder(self._rows_folder)
        self._lock = FileLock(folder / "lock")
        acquire(self._lock, f"--record {folder}: another server records to it")
        self._sizes: dict[Path, int] = {}
        # A killed server may have left half a shard, which no reader looks at.
        for file in sorted(self._rows_folder.iterdir()):
            if is_partial(file):
                file.unlink()
            elif re.fullmatch(r"\d+\.jsonl\.gz", file.name):
                self._sizes[file] = file.stat().st_size
        self._rows: list[Request] = []
        self._written = time.monotonic()
        self._writer = ThreadPoolExecutor(1)  # compression and the disk must not hold up the event loop

    def chooses(self) -> bool:
        """Draw at random whether to record a request."""
        return random.random() < self._share

    def add(self, requests: Sequence[Request]) -> None:
        """Add finished or cancelled requests; the row of each is written with its shard."""
        self._rows += requests
        self.write_due()

    def write_due(self) -> None:
        """Write the rows since the last shard as a new one if there are 256, or that shard is a minute old."""
        if len(self._rows) >= SHARD_ROWS or time.monotonic() - self._written > _SHARD_SECONDS:
            self._flush()

    def close(self) -> None:
        """Write the last shard, wait until it is on the disk, and release the folder."""
        self._flush()
        self._writer.shutdown()
        self._lock.release()

    def _flush(self) -> None:
        rows, self._rows, self._written = self._rows, [], time.monotonic()
        if rows:
            self._writer.submit(self._write, rows)

    def _write(self, requests: list[Request]) -> None:
        """Write a shard and delete the oldest ones, in the writer's thread."""
        # Names are numbers of eight digits, so the largest name is the newest and the smallest the oldest.
        last = max(self._sizes, default=None)
        file = self._rows_folder / f"{int(last.name.partition('.')[0]) + 1 if last else 0:08d}.jsonl.gz"
        try:
            lines = "".join(f"{json.dumps(_row(request))}\n" for request in requests)
            write_bytes(file, gzip.compress(lines.encode()))
            self._sizes[file] = file.stat().st_size
            while sum(self._sizes.values()) > self._max_bytes:
                oldest = min(self._sizes)
                oldest.unlink(missing_ok=True)
                del self._sizes[oldest]
        except Exception as error:  # answers matter more than their record
            _log.warning(f"{len(requests)} answers are not recorded: {error}")


def _row(request: Request) -> dict[str, Sequence[int]]:
    # The engine may have been appending a step when the request was cancelled: the prefill's token and those of
    # the steps are complete.
    prompt, new = len(request.prompt), request.tokens[: 1 + sum(step.emitted for step in request.steps)]
    return {
        "input_ids": [*request.prompt, *new],
        "loss_mask": [0] * prompt + [1] * len(new),
        **({"source_ids": source} if (source := source_of(request.prompt)) else {}),
    }
