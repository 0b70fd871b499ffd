"""Timing of device work without waiting for the device."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Sums the seconds spent inside its `with` blocks, by the clock of the device.

    On an accelerator events in its stream are timed, which cost the loop nothing; `take` waits for them.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._spans: list[tuple[torch.Event, torch.Event]] = []
        self._seconds = 0.0
        self._begin: Any = 0.0

    def _now(self) -> torch.Event | float:
        """Return the present: seconds on a CPU, else an event in the device's stream."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> None:
        self._begin = self._now()

    def __exit__(self, *_: object) -> None:
        end = self._now()
        if isinstance(end, float):
            self._seconds += end - self._begin
        else:
            self._spans.append((self._begin, end))

    def take(self) -> float:
        """Return the seconds spent inside the blocks since the last call."""
        if self._spans:
            torch.accelerator.synchronize(self.device)
        seconds = self._seconds + sum(begin.elapsed_time(end) / 1000 for begin, end in self._spans)
        self._spans, self._seconds = [], 0.0
        return seconds
