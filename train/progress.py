"""Pace of training, and the log line that shows it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from transformers import ProgressCallback, TrainerCallback

from train.timing import Stopwatch


class Pace(TrainerCallback):
    """Times optimiser steps (forward and backward passes, and the update) and counts their tokens.

    Args:
        token_at_peak: seconds for a token's operations at the device's peak; None if unknown.
    """

    def __init__(self, device: torch.device, token_at_peak: float | None = None):
        self._steps, self._target = Stopwatch(device), Stopwatch(device)
        self._token_at_peak = token_at_peak
        self._tokens, self._first, self._began = 0, 0, time.monotonic()

    def of_target(self, input_ids: Tensor) -> Stopwatch:
        """Count a batch, and time the `with` block as the target's part of the step."""
        self._tokens += input_ids.numel()
        return self._target

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._first, self._began = state.global_step, time.monotonic()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._steps.__enter__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._steps.__exit__()

    def figures(self, state: Any, processes: int) -> dict[str, float]:
        """Figures of the steps since the last call. The remaining time includes evaluations at their rate so far."""
        seconds, tokens, self._tokens = self._steps.take(), self._tokens, 0
        done = max(state.global_step - self._first, 1)
        left = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step)
        found = {
            "step_over_target": seconds / self._target.take(),
            "tokens_per_second": processes * tokens / seconds,
            "seconds_left": left,
        }
        if self._token_at_peak is not None:
            found["mfu"] = tokens * self._token_at_peak / seconds
        return found


class ProgressLine(ProgressCallback):
    """Progress bar with one line per log entry."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self.training_bar is None or not logs or "train_runtime" in logs:
            return
        prefix = "eval_" if "eval_loss" in logs else ""
        heads = [f"{v:.2f}" for k, v in logs.items() if k.startswith(f"{prefix}head") and k.endswith("/accuracy")]
        parts = [
            f"{'eval' if prefix else 'step'} {state.global_step:>5}/{state.max_steps}",
            f"loss {logs[f'{prefix}loss']:.3f}",
            f"head accuracy {' '.join(heads)}",
            f"teacher-forced acceptance length {logs[f'{prefix}teacher_forced_acceptance_length']:.2f}",
        ]
        if prefix:
            real, sampled = logs["eval_acceptance_length"], logs["eval_acceptance_length_sampled"]
            parts.append(f"acceptance length {real:.2f} greedy, {sampled:.2f} at temperature 1")
        else:
            parts.append(f"lr {logs['learning_rate']:.1e} | step/target {logs['step_over_target']:.1f}")
            parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
            if "mfu" in logs:
                parts.append(f"MFU {logs['mfu']:.1%}")
            parts.append(f"{timedelta(seconds=round(logs['seconds_left']))} left")
        self.training_bar.write(" | ".join(parts))
