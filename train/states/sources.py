"""States that are not computed for each batch: servers are asked for them ahead, or files keep them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from data.packing import Columns
from speculator.device import exact, has_accelerator
from speculator.errors import UserError
from speculator.files import make_cache_folder, write_bytes
from speculator.kernels.compiled import Compiled
from speculator.tables import gigabytes
from speculator.target.fingerprint import digest
from speculator.target.in_process import InProcessTarget
from speculator.target.remote.server_target import PendingStates, ServerTarget
from train.losses import chunk_tokens, compiling_pays
from train.states.batch import DOCUMENTS, REQUEST, Batch, Documents, StateSource, TargetStates

_MOST = 8  # batches ahead: the states of each wait in this process's memory
Tensors: TypeAlias = dict[str, Tensor]
"""A document's part of `TargetStates`, by name."""


class _Request:
    """What a source asks for the states of one batch, when `begin` is first called."""

    def __init__(self, ask: Callable[[], Any], used: Callable[[_Request], None]):
        self._ask, self.used, self._pending = ask, used, None

    def begin(self) -> Any:
        """Ask for the states, unless that is done already, and return what has their `result`, there or not."""
        self._pending = self._pending or self._ask()
        return self._pending

    def take(self) -> Any:
        """Return what has the states, and hold it no longer: the loop keeps its batches for a whole step."""
        pending, self._pending = self.begin(), None
        return pending


class _Ahead(StateSource):
    """Asks for the states of the next batches while the head trains on the current one.

    Attributes:
        depth: number of batches ahead.
    """

    reads_documents = True
    depth = 1

    def ask(self, batch: Batch) -> Any:
        """Begin to get the states of a batch, and return what has their `result`."""
        raise NotImplementedError

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield copies of batches with the requests for their states, which `take` needs, at `REQUEST`."""
        source, read, unused = iter(batches), deque[Batch](), deque[_Request]()

        def read_one() -> bool:
            batch = next(source, None)
            if batch is not None:
                unused.append(_Request(partial(self.ask, batch), used))
                read.append({**batch, REQUEST: unused[-1]})
            return batch is not None

        def fill() -> None:
            # The loop reads all micro-batches of a step at once: those ahead are counted from the last one that was
            # used, not from the last one that was read.
            while len(unused) <= self.depth and read_one():
                pass
            for request in islice(unused, self.depth + 1):
                request.begin()

        def used(request: _Request) -> None:
            unused.remove(request)
            fill()

        while True:
            fill()
            if not read and not read_one():
                return
            yield read.popleft()


class LookAhead(_Ahead):
    """Requests the hidden states of the next batches from servers while the head trains on the current one.

    As many batches are requested ahead as the head trains on while the servers answer for one: with 3 s for an answer
    and 1 s for a batch of the head, 3. The number follows the last measurement.

    Args:
        target: a target that servers run, which gives the auxiliary layers that it was connected for.
    """

    target: ServerTarget

    def __init__(self, target: ServerTarget):
        super().__init__(target, ())
        self.depth, self._taken_at = 1, 0.0
        self._waited = self._trained = 0.0

    def ask(self, batch: Batch) -> PendingStates:
        return self.target.begin(batch[DOCUMENTS].rows, batch["input_ids"].shape[1])

    def take(self, batch: Batch) -> TargetStates:
        """Wait for a batch's hidden states, and set `depth` by how long the servers took."""
        request = batch[REQUEST]
        pending, asked_at = request.take(), time.perf_counter()
        states = pending.result()
        # Between two takes the head trains; before the first one nothing is known, so one batch is ahead.
        head = asked_at - self._taken_at if self._taken_at else pending.seconds
        self._taken_at = time.perf_counter()
        # As many batches as the head trains on while one is answered.
        self.depth = min(max(1, ceil(pending.seconds / max(head, 1e-3))), _MOST)
        self._waited, self._trained = self._waited + self._taken_at - asked_at, self._trained + head
        request.used(request)
        return TargetStates(*states)

    def figures(self) -> dict[str, float]:
        """Return the share, 0 to 1, of the time since the last call in which the head waited for servers."""
        waited, trained = self._waited, self._trained
        self._waited = self._trained = 0.0
        return {"waiting_for_servers": waited / max(waited + trained, 1e-9)}


def normaliser(logits: Tensor) -> Tensor:  # [C, V] -> [C]
    return exact(logits).logsumexp(-1)


class KeptStates(_Ahead):
    """Computes what the target says about documents, and keeps it: one file each, in a folder of this target and head.

    No document sees another one, so other runs on the same documents read the same files, however rows are packed.
    Delete the cache's folder `states` when no run needs them.

    Args:
        target: the target, whole in this process; each process computes its own rows' states.
        normalisers: keep the `TargetStates.normalisers`. With them a head with a draft vocabulary needs no logits of
            other tokens.

    Attributes:
        folder: the files' folder in the cache, which is made.
    """

    target: InProcessTarget

    def __init__(self, target: InProcessTarget, aux_layers: Sequence[int], normalisers: bool):
        super().__init__(target, aux_layers)
        self.normalisers = normalisers
        identity = json.dumps([digest(target.model), str(target.dtype), self.aux_layers, normalisers])
        self.folder = make_cache_folder(f"states/{hashlib.sha256(identity.encode()).hexdigest()[:16]}")
        # Compiled, it is one pass over the logits in place of three: six times as fast on a core with AVX-512.
        pays = compiling_pays(target.device, target.vocab_size)
        self.normaliser = Compiled(normaliser, "the normalisers") if pays else normaliser

    def ask(self, batch: Batch) -> Future[tuple[TargetStates | None, dict[Path, Tensors]]]:
        return self.files.read(partial(self._read, batch))

    def take(self, batch: Batch) -> TargetStates:
        """Return the states of a batch; what has no readable file is computed, and written by the thread."""
        request = batch[REQUEST]
        states, found = request.take().result()
        if states is None:
            self.files.wait()  # for texts that the batches before have too
            states, found = self._read(batch)
        if states is None:
            states = self._joined(batch, found | self._compute(batch, found), self.target.device)
        request.used(request)
        return TargetStates._make(x if x is None else x.to(self.target.device, non_blocking=True) for x in states)

    def _documents(self, batch: Batch) -> Iterator[tuple[Path, tuple[int, slice]]]:
        """Yield the file and the place, row and tokens, of each document of a batch; their content names the files."""
        for i, row in enumerate(batch[DOCUMENTS].rows):
            end = 0
            for tokens in row:
                start, end = end, end + len(tokens)
                yield self._file(tokens), (i, slice(start, end))

    def _file(self, tokens: Sequence[int]) -> Path:
        return self.folder / f"{hashlib.sha256(array('q', tokens).tobytes()).hexdigest()[:32]}.safetensors"

    def _read(self, batch: Batch) -> tuple[TargetStates | None, dict[Path, Tensors]]:
        """Return a batch's states in pinned memory, or None, if not all are in readable files, and what was found."""
        found, files = dict[Path, Tensors](), {file for file, _ in self._documents(batch)}
        for file in files:
            with suppress(FileNotFoundError, SafetensorError):
                found[file] = load_file(file)
        return self._joined(batch, found, torch.device("cpu")) if found.keys() == files else None, found

    def _joined(self, batch: Batch, found: dict[Path, Tensors], device: torch.device) -> TargetStates:
        """Return the states of a batch, of those of all its documents."""
        documents = list(self._documents(batch))

        def joined(name: str) -> Tensor:  # [B, L, ...]
            like = found[documents[0][0]][name]
            shape = *batch["input_ids"].shape, *like.shape[1:]
            pinned = device.type == "cpu" and has_accelerator()
            made = torch.zeros(shape, dtype=like.dtype, device=device, pin_memory=pinned)
            for file, place in documents:
                made[place] = found[file][name]
            return made

        hidden = joined("hidden")
        states = joined("states") if self.aux_layers else hidden
        return TargetStates(hidden, states, joined("normalisers") if self.normalisers else None)

    def _compute(self, batch: Batch, found: dict[Path, Tensors]) -> dict[Path, Tensors]:
        """Compute the documents of a batch that were not found, and let the thread write them."""
        # The whole batch, even if a kill left files of some of it: a state's last bits depend on the batch.
        hidden, states = self.target.training_states(batch["input_ids"], batch["document_ids"], self.aux_layers)
        made: dict[Path, Tensors] = {}
        for file, place in self._documents(batch):
            if file not in found and file not in made:
                made[file] = {"hidden": hidden[place]}
                if self.aux_layers:
                    made[file]["states"] = states[place]
                if self.normalisers:
                    made[file]["normalisers"] = self._normalisers(hidden[place])
        on_host = {file: {name: x.cpu().contiguous() for name, x in tensors.items()} for file, tensors in made.items()}

        def write() -> None:
            for file, tensors in on_host.items():
                if tensors["hidden"].isfinite().all():  # else the run ends, and another one computes them again
                    write_bytes(file, save(tensors))

        self.files.write(write)
        return made

    @torch.no_grad()
    def _normalisers(self, hidden: Tensor) -> Tensor:  # [S, D] -> [S]
        chunks = hidden.split(chunk_tokens(hidden.device.type, self.target.vocab_size))
        return torch.cat([self.normaliser(self.target.logits(chunk)) for chunk in chunks])

    def lacking(self, rows: Iterable[Columns]) -> int:
        """Return the number of tokens in the documents of some rows that have no file."""
        texts = (tokens for row in rows for tokens in Documents([row]).rows[0])
        return sum({file: len(tokens) for tokens in texts if not (file := self._file(tokens)).exists()}.values())

    def check_room(self, setting: str, tokens: float) -> None:
        """Raise a UserError, which names `setting`, if the disk has no room for so many tokens."""
        per_token = bytes_per_token(self.target.hidden_size, self.aux_layers, self.target.dtype, self.normalisers)
        need, free = per_token * tokens, shutil.disk_usage(self.folder).free
        if need > free:
            raise UserError(
                f"{setting} needs {gigabytes(need)} GB in {self.folder}, whose disk has {gigabytes(free)} free; set "
                "SPECULATOR_CACHE to a folder with more room, or leave the setting out"
            )


def bytes_per_token(hidden_size: int, aux_layers: Sequence[int], dtype: torch.dtype, normalisers: bool) -> int:
    """Return the bytes of a token's states in their file."""
    return (1 + len(aux_layers)) * hidden_size * dtype.itemsize + 4 * normalisers
