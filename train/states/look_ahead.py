"""Batches whose hidden states are asked for before the head needs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import ceil

from speculator.target.remote.server_target import PendingStates, ServerTarget
from train.states.batch import DOCUMENTS, REQUEST, Batch, StateSource, TargetStates

_MOST = 8  # batches ahead: the states of each wait in this process's memory


class _Request:
    """The hidden states of one batch, which are requested from the servers when `begin` is first called."""

    def __init__(self, target: ServerTarget, batch: Batch, used: Callable[[_Request], None]):
        self._target, self.used = target, used
        self._documents, self._length = batch[DOCUMENTS].rows, batch["input_ids"].shape[1]
        self._pending: PendingStates | None = None

    def begin(self) -> PendingStates:
        """Request the states, unless they are requested already, and return them, arrived or not."""
        self._pending = self._pending or self._target.begin(self._documents, self._length)
        return self._pending

    def take(self) -> PendingStates:
        """Return the states, arrived or not, and hold them no longer: the loop keeps its batches for a whole step."""
        pending, self._pending = self.begin(), None
        return pending


class LookAhead(StateSource):
    """Requests the hidden states of the next batches while the head trains on the current one.

    As many batches are requested ahead as the head trains on while the servers answer for one: with 3 s for an answer
    and 1 s for a batch of the head, 3. The number follows the last measurement.

    Args:
        target: a target that servers run, which gives the auxiliary layers that it was connected for.

    Attributes:
        depth: number of batches ahead.
    """

    reads_documents = True
    target: ServerTarget

    def __init__(self, target: ServerTarget):
        super().__init__(target, ())
        self.depth, self._taken_at = 1, 0.0
        self._waited = self._trained = 0.0

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield copies of batches with the requests for their states, which `take` needs, at `REQUEST`."""
        source, read, unused = iter(batches), deque[Batch](), deque[_Request]()

        def read_one() -> bool:
            batch = next(source, None)
            if batch is not None:
                unused.append(_Request(self.target, batch, used))
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
