"""Batches whose hidden states are asked for before the head needs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from math import ceil
from typing import Any, Final, TypedDict

from torch import Tensor

from data.packing import Columns
from speculator.target.remote.server_target import PendingStates, ServerTarget, split

_MOST = 8  # batches ahead: the states of each wait in this process's memory
DOCUMENTS: Final = "documents"
STATES: Final = "hidden_states"


class Batch(TypedDict, total=False):
    """A batch of B rows, padded to L tokens, and the head's training targets: further tensors, which the head names.

    Attributes:
        documents: the rows without padding, if servers run the target or its states are kept.
        hidden_states: the request for the batch's hidden states, which `LookAhead.take` reads.
    """

    input_ids: Tensor  # [B, L]
    document_ids: Tensor  # [B, L]
    documents: Documents
    hidden_states: _Request


class Documents:
    """The documents of a batch's rows, without padding; the Trainer moves none to a device.

    Attributes:
        rows: each row's documents, each a list of tokens.
    """

    def __init__(self, rows: list[Columns]):
        tokens = [row["input_ids"] for row in rows]
        numbers = [row.get("document_ids") or [0] * len(row["input_ids"]) for row in rows]
        self.rows = [split(*pair) for pair in zip(tokens, numbers, strict=True)]


class _Line:
    """The batches of a loader in order; the hidden states of the next few to be used are requested.

    The Trainer reads all micro-batches of a step at once. So the batches ahead are counted from the last one that was
    used, not from the last one that was read.
    """

    def __init__(self, look_ahead: LookAhead, batches: Iterable[Batch]):
        self._look_ahead, self._source = look_ahead, iter(batches)
        self._read = deque[Batch]()  # and not handed out
        self._unused = deque[_Request]()

    def fill(self) -> None:
        """Request the states of the next batch to be used and of those ahead of it."""
        wanted = self._look_ahead.depth + 1
        while len(self._unused) < wanted and self._read_one():
            pass
        for request in islice(self._unused, wanted):
            request.begin()

    def _read_one(self) -> bool:
        """Read a batch from the loader and add its request, not begun; return False if there is none."""
        batch = next(self._source, None)
        if batch is not None:
            request = _Request(self._look_ahead.target, self, batch)
            self._unused.append(request)
            batch = batch.copy()
            batch[STATES] = request
            self._read.append(batch)
        return batch is not None

    def used(self, request: _Request) -> None:
        """Note that the states of a batch were taken, and request those of the next one."""
        self._unused.remove(request)
        self.fill()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.fill()
            if not self._read and not self._read_one():
                return
            yield self._read.popleft()


class _Request:
    """The hidden states of one batch, which are requested from the servers when `begin` is first called."""

    def __init__(self, target: ServerTarget, line: _Line, batch: Batch):
        self._target, self.line = target, line
        self._documents, self._length = batch[DOCUMENTS].rows, batch["input_ids"].shape[1]
        self._pending: PendingStates | None = None

    def begin(self) -> PendingStates:
        """Request the states, unless they are requested already, and return them, arrived or not."""
        self._pending = self._pending or self._target.begin(self._documents, self._length)
        return self._pending

    def take(self) -> PendingStates:
        """Return the states, which may not have arrived yet, and hold them no longer.

        The Trainer keeps the batch, and with it this request, until the end of its step.
        """
        pending, self._pending = self.begin(), None
        return pending


class LookAhead:
    """Requests the hidden states of the next batches while the head trains on the current one.

    As many batches are requested ahead as the head trains on while the servers answer for one: with 3 s for an answer
    and 1 s for a batch of the head, 3. The number follows the last measurement.

    Args:
        target: a target that servers run.

    Attributes:
        depth: number of batches ahead.
    """

    def __init__(self, target: ServerTarget):
        self.target = target
        self.depth, self._taken_at = 1, 0.0
        self._waited = self._trained = 0.0
        self._source: Iterator[Batch] | None = None
        self._batches: Iterator[Batch] = iter(())

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield copies of batches with the requests for their states, which `take` needs, at `STATES`."""
        return iter(_Line(self, batches))

    def continued(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return `over(batches)`, or the iterator of the last call if `batches` is the same object.

        The Trainer fetches a few batches at a time; a new iterator would drop those requested ahead.
        """
        if batches is not self._source:
            self._source, self._batches = batches, self.over(batches)
        return self._batches

    def take(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Wait for a batch's hidden states, and set `depth` by how long the servers took.

        Returns the final ones [B, L, D] and those of the n auxiliary layers, concatenated, [B, L, nD].
        """
        request = batch[STATES]
        pending, asked_at = request.take(), time.perf_counter()
        states = pending.result()
        # Between two takes the head trains; before the first one nothing is known, so one batch is ahead.
        head = asked_at - self._taken_at if self._taken_at else pending.seconds
        self._taken_at = time.perf_counter()
        # As many batches as the head trains on while one is answered.
        self.depth = min(max(1, ceil(pending.seconds / max(head, 1e-3))), _MOST)
        self._waited, self._trained = self._waited + self._taken_at - asked_at, self._trained + head
        request.line.used(request)
        return states

    def share_waited(self) -> float:
        """Return the share, 0 to 1, of the time since the last call in which the head waited for servers."""
        waited, trained = self._waited, self._trained
        self._waited = self._trained = 0.0
        return waited / max(waited + trained, 1e-9)


class LookAheadLoader:
    """A data loader that yields another's batches, each with its request of hidden states for `LookAhead.take`.

    Iterating it also sends the requests of the next batches, see `LookAhead`; for all else it is the other loader.
    """

    def __init__(self, loader: Any, look_ahead: LookAhead):
        self._loader, self._look_ahead = loader, look_ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return self._look_ahead.over(self._loader)
