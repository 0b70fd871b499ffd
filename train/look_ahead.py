"""Batches whose hidden states are asked for before the head needs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any

from torch import Tensor

from speculator.target.server import ServerTarget, split

_MOST = 8  # batches ahead: the states of each wait in this process's memory
DOCUMENTS, STATES = "documents", "hidden_states"
"""Keys of a batch: its `Documents`, and its `PendingStates`."""


class Documents:
    """The documents of a batch's rows, without padding, as servers read them; the Trainer moves none to a device.

    Attributes:
        rows: each row's documents, each a list of tokens.
    """

    def __init__(self, rows: list[dict[str, Any]]):
        tokens = [row["input_ids"] for row in rows]
        numbers = [row.get("document_ids") or [0] * len(row["input_ids"]) for row in rows]
        self.rows = [split(*pair) for pair in zip(tokens, numbers, strict=True)]


class LookAhead:
    """Requests the hidden states of the next batches while the head trains on the current one.

    As many batches are requested ahead as the head trains on while the servers answer for one: with 3 s for an answer
    and 1 s for a batch of the head, 3. The number follows the last measurement.

    Args:
        target: a target that servers run.
    """

    def __init__(self, target: ServerTarget):
        self.target = target
        self._depth, self._taken_at = 1, 0.0
        self._waited = self._trained = 0.0
        self._source: Iterator[Any] | None = None
        self._batches: Iterator[Any] = iter(())

    def over(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Request the states of batches ahead of their use; yield each batch with its `PendingStates` at `STATES`."""
        source, ahead = iter(batches), deque[dict[str, Any]]()
        while True:
            # One more than are ahead: the first of them is the next to be used.
            while len(ahead) <= self._depth and (batch := next(source, None)) is not None:
                pending = self.target.begin(batch[DOCUMENTS].rows, batch["input_ids"].shape[1])
                ahead.append({**batch, STATES: pending})
            if not ahead:
                return
            yield ahead.popleft()

    def continued(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Return `over(batches)`, or the iterator of the last call if `batches` is the same object.

        The Trainer fetches a few batches at a time; a new iterator would drop those requested ahead.
        """
        if batches is not self._source:
            self._source, self._batches = batches, self.over(batches)
        return self._batches

    def take(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Wait for a batch's states [B, S, D] and [B, S, nD] (`PendingStates.result`), and update the measurements."""
        pending, asked_at = batch[STATES], time.perf_counter()
        states = pending.result()
        # Between two takes the head trains; before the first one nothing is known, so one batch is ahead.
        head = asked_at - self._taken_at if self._taken_at else pending.seconds
        self._taken_at = time.perf_counter()
        # As many batches as the head trains on while one is answered.
        self._depth = min(max(1, ceil(pending.seconds / max(head, 1e-3))), _MOST)
        self._waited, self._trained = self._waited + self._taken_at - asked_at, self._trained + head
        return states

    def share_waited(self) -> float:
        """Return the share, 0 to 1, of the time since the last call in which the head waited for servers."""
        waited, trained = self._waited, self._trained
        self._waited = self._trained = 0.0
        return waited / max(waited + trained, 1e-9)


class LookAheadLoader:
    """A data loader whose batches have their `PendingStates`."""

    def __init__(self, loader: Any, look_ahead: LookAhead):
        self._loader, self._look_ahead = loader, look_ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._look_ahead.over(self._loader)
