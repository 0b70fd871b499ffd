"""Throughput of training, and the lines and bars that show how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from speculator.heads.training import IGNORE
from speculator.terminal import is_first, log
from train.checkpoint import DECODED, METRIC
from train.states.batch import Batch

_TIMED, _LEAST_SECONDS = 3, 5.0
"""Steps and seconds after which the first estimate of the time is printed: short steps differ much."""


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
        """Return the time: seconds on a CPU, else an event in the device's stream."""
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


@dataclass(frozen=True)
class Display:
    """How a training shows itself.

    Attributes:
        title: title of its bar, such as "stage 1".
        outlook: returns a line about the time that is left, given the seconds of an optimiser step; None: no line.
        token_at_peak: seconds of a token's operations at the device's peak, those of the target and those of the head,
            which computes labelled tokens alone; None if unknown.
        accelerator: the processes of the training, and the trackers that were begun; None: one of its own, without any.
    """

    title: str = "training"
    outlook: Callable[[float], str] | None = None
    token_at_peak: tuple[float, float] | None = None
    accelerator: Accelerator | None = None


class Clock:
    """Times optimiser steps (loading, forward and backward passes, and the update) and counts their tokens.

    Attributes:
        steps, target: the stopwatches of optimiser steps, and of the target's part of them.
    """

    def __init__(self, device: torch.device, display: Display):
        self.steps, self.target = Stopwatch(device), Stopwatch(device)
        self._token_at_peak, self._outlook = display.token_at_peak, display.outlook
        self._tokens = 0
        self._labelled: Tensor | float = 0.0  # on the device until a log line reads it

    def begin(self, step: int, max_steps: int) -> None:
        """Note that training starts at this step now."""
        self._marks, self._max_steps = [(step, time.monotonic())], max_steps
        if max_steps - step < 10 * _TIMED or not is_first():
            self._outlook = None

    def passed(self, step: int) -> None:
        """Note that a step was taken now; after a few of them the time that is left is printed, once."""
        now = time.monotonic()
        if len(self._marks) == 1:  # the first step compiles and warms up
            self._marks.append((step, now))
        first, began = self._marks[1]
        if self._outlook and step - first >= _TIMED and now - began >= _LEAST_SECONDS:
            log(self._outlook(self._rate(step)))
            self._outlook = None

    def _rate(self, step: int) -> float:
        """Return the seconds of a step so far, with evaluations and checkpoints at their rate."""
        first, began = next(mark for mark in reversed(self._marks) if mark[0] < step)
        return (time.monotonic() - began) / (step - first)

    def count(self, batch: Batch) -> None:
        tokens = batch["input_ids"].numel()
        self._tokens += tokens
        # Heads that draw their positions have `labels` of another shape: of these too, the share that is labelled.
        self._labelled = self._labelled + tokens * (batch["labels"] != IGNORE).float().mean()

    def figures(self, step: int, processes: int) -> dict[str, float]:
        """Return figures of the optimiser steps since the last call; "seconds_left" is an estimate from the start on.

        "step_over_target": time of the steps over the target's part of it. "tokens_per_second": of all `processes`,
        each with as many tokens as this one, with and without labels. "seconds_left": evaluations and checkpoints
        included, at their rate so far. "mfu": in 0..1, only if the device's peak is known.
        """
        seconds, tokens, self._tokens = self.steps.take(), self._tokens, 0
        found = {
            "step_over_target": seconds / self.target.take(),
            "tokens_per_second": processes * tokens / seconds,
            "seconds_left": self._rate(step) * (self._max_steps - step),
        }
        if self._token_at_peak is not None:
            target, head = self._token_at_peak
            found["mfu"] = (tokens * target + float(self._labelled) * head) / seconds
        self._labelled = 0.0
        return found


def log_line(step: int, max_steps: int, logs: dict[str, float]) -> str:
    """Return a line (at most 120 characters) about figures by name, of some steps or of an evaluation ("eval_loss")."""
    if "eval_loss" in logs:
        error = f" ± {logs['eval_forecast_error']:.2f}" if "eval_forecast_error" in logs else ""
        forecast = f"{logs[METRIC]:.2f}{error}"
        if DECODED in logs:
            decoded = f"{logs[DECODED]:.2f} greedy, {logs[f'{DECODED}_sampled']:.2f} sampled"
            lengths = f"forecast {forecast}, acceptance length {decoded}"
        else:
            lengths = f"forecast of the acceptance length {forecast} (plain decoding: 1)"
        loss = _with_plain(logs["eval_loss"], logs["eval_plain_loss"])
        return f"evaluation at step {step}: loss {loss}, {lengths}"
    first = next(value for name, value in logs.items() if name.endswith("/accuracy"))
    parts = [
        f"step {step}/{max_steps}: loss {_with_plain(logs['loss'], logs['plain_loss'])}",
        f"first right {first:.0%}",
        f"lr {logs['learning_rate']:.1e}",
        f"{logs['tokens_per_second']:,.0f} tokens/s",
        *([f"MFU {logs['mfu']:.0%}"] if "mfu" in logs else []),
        *([f"{logs['waiting_for_servers']:.0%} waiting"] if "waiting_for_servers" in logs else []),
        f"{timedelta(seconds=round(logs['seconds_left']))} left",
    ]
    return ", ".join(parts)


def _with_plain(loss: float, plain: float) -> str:
    """Return a loss as text, then the unweighted one if it differs; D-PACE's weights grow as the head learns."""
    shown, unweighted = f"{loss:.2f}", f"{plain:.2f}"
    return shown if shown == unweighted else f"{shown}, plain {unweighted}"
