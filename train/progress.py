"""Throughput of training, and the log line that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from transformers import ProgressCallback, TrainerCallback

from speculator.heads.training import IGNORE
from speculator.terminal import Progress, log
from train.checkpoint import DECODED, METRIC
from train.timing import Stopwatch

_TIMED, _LEAST_SECONDS = 3, 5.0
"""Steps and seconds after which the first estimate of the time is printed: short steps differ much."""


class Throughput(TrainerCallback):
    """Times optimiser steps (loading, forward and backward passes, and the update) and counts their tokens.

    Args:
        token_at_peak: seconds of a token's operations at the device's peak, those of the target and those of the head,
            which computes labelled tokens alone; None if unknown.
    """

    def __init__(self, device: torch.device, token_at_peak: tuple[float, float] | None = None):
        self._steps, self._target = Stopwatch(device), Stopwatch(device)
        self._token_at_peak = token_at_peak
        self._tokens, self._first, self._began = 0, 0, time.monotonic()
        self._labelled: Tensor | float = 0.0  # on the device until a log line reads it

    def begin(self) -> None:
        """Start the clock of an optimiser step, before its batches are read."""
        self._steps.__enter__()

    def of_target(self, input_ids: Tensor, labels: Tensor) -> Stopwatch:
        """Count a batch's tokens, and return a stopwatch: its `with` block is timed as the target's part of a step."""
        self._tokens += input_ids.numel()
        # Heads that draw their positions have `labels` of another shape: of these too, the share that is labelled.
        self._labelled = self._labelled + input_ids.numel() * (labels != IGNORE).float().mean()
        return self._target

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._first, self._began = state.global_step, time.monotonic()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._steps.__exit__()

    def figures(self, state: Any, processes: int) -> dict[str, float]:
        """Return figures of the optimiser steps since the last call; "seconds_left" is an estimate from the start on.

        "step_over_target": time of the steps over the target's part of it. "tokens_per_second": of all processes, with
        and without labels. "seconds_left": evaluations and checkpoints included, at their rate so far. "mfu": in 0..1,
        only if the device's peak is known.

        Args:
            state: the Trainer's.
            processes: number of processes, each with as many tokens as this one.
        """
        seconds, tokens, self._tokens = self._steps.take(), self._tokens, 0
        done = max(state.global_step - self._first, 1)
        # All the time since the start, so that evaluations and checkpoints are in it at their rate.
        left = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step)
        found = {
            "step_over_target": seconds / self._target.take(),
            "tokens_per_second": processes * tokens / seconds,
            "seconds_left": left,
        }
        if self._token_at_peak is not None:
            target, head = self._token_at_peak
            found["mfu"] = (tokens * target + float(self._labelled) * head) / seconds
        self._labelled = 0.0
        return found


class ProgressLine(ProgressCallback):
    """Shows progress bars in the main process, prints a line for each entry of the Trainer's log, and one estimate.

    The estimate is a line about the time that is left, printed once after the first few steps of a stage.

    Args:
        title: title of the bar, such as "stage 1".
        outlook: returns the line of the estimate, given the seconds of an optimiser step; None: a line about the rest
            of this stage.
    """

    training_bar: Any
    prediction_bar: Any

    def __init__(self, title: str, outlook: Callable[[float], str] | None = None):
        super().__init__()
        self.title, self.outlook = title, outlook

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.training_bar = Progress(
                title=self.title, unit="steps", total=state.max_steps, initial=state.global_step
            )
        self.current_step = self._first = state.global_step
        self._said = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        if not state.is_world_process_zero or self._said or state.max_steps - self._first < _TIMED * 10:
            return
        timed = state.global_step - self._first - 1
        if timed == 0:  # the first step compiles and warms up
            self._began = time.monotonic()
        elif timed >= _TIMED and (took := time.monotonic() - self._began) >= _LEAST_SECONDS:
            self._said, step = True, took / timed
            seconds = timedelta(seconds=round(step * (state.max_steps - state.global_step)))
            log(self.outlook(step) if self.outlook else f"{self.title}: about {seconds} to go, without evaluations")

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            if self.prediction_bar is None:
                self.prediction_bar = Progress(
                    title="evaluating", unit="batches", total=len(eval_dataloader), leave=False
                )
            self.prediction_bar.update(1)

    def close(self) -> None:
        """End the bars that an error left behind, which would go on reporting."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.prediction_bar = self.training_bar = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "train_runtime" not in logs:
            log(log_line(state.global_step, state.max_steps, logs))


def log_line(step: int, max_steps: int, logs: dict[str, float]) -> str:
    """Return a line of at most 120 characters about some optimiser steps, or an evaluation ("eval_loss" in `logs`).

    `logs` is an entry of the Trainer's log: figures by name.
    """
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
