"""How long a run takes on this machine, by part: what its first steps took, times the work that its config asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from math import ceil

from eval.timing import step_seconds
from eval.tune import LONGEST, ROWS
from eval.validation import NEW_TOKENS
from speculator.target.base import TrainingTarget
from speculator.target.model import Target
from train.config import StageConfig
from train.inputs import Inputs, sizes_of
from train.plan import GeneratedText, generated_texts

_FORWARD = 1 / 3
"""Share of a training step that an evaluation of the same rows takes: no backward pass."""
_DECODERS = 5
"""Ways to decode in a run's report: plainly, with the head, adaptively, by n-gram lookup, by transformers."""
_TUNING = 250
"""Plain steps that measuring costs takes at each number of rows: two temperatures, five rounds, some ten drafts."""
_PROMPT = 16
_FLAGS = {
    "stage 1": "--stage1.max_steps",
    "text for stage 2": "--stage2.generate.max_rows",
    "stage 2": "--stage2.max_steps",
    "tuning and measuring": "--eval.max_prompts",
}


def expected_parts(
    inputs: Inputs,
    text: GeneratedText | None,
    step: float,
    decode: Callable[[int], float],
) -> dict[str, float]:
    """Return the seconds of each part of a run, evaluations included.

    The parts are "stage 1", "text for stage 2", "stage 2" and "tuning and measuring". Texts are counted as if no answer
    ended early and no draft was accepted, so the parts that decode may take less.

    Args:
        text: what the target generates for stage 2; None: there is no stage 2.
        step: seconds of an optimiser step of stage 1.
        decode: returns the seconds of a plain decoding step, given the number of rows.
    """
    run, processes, settings = inputs.run, inputs.run.processes, inputs.run.config.eval
    stage1 = run.stage("stage1", len(inputs.train_rows))
    warm = len(settings.temperatures)
    row = step / stage1.rows_per_step
    prompts = ceil(len(inputs.suites["validation"].prompts) / processes)
    check = ceil(len(inputs.validation_rows) / processes) * row * _FORWARD + 2 * NEW_TOKENS * decode(prompts)

    def training(stage: StageConfig) -> float:
        return stage.max_steps * row * stage.rows_per_step + stage.max_steps // stage.eval_steps * check

    parts = {"stage 1": training(stage1)}
    if text is not None:
        batches = ceil(text.rows / text.batch_size / processes)
        parts["text for stage 2"] = batches * text.new * text.answers * decode(min(text.batch_size, text.rows))
        parts["stage 2"] = training(run.stage("stage2", text.packed_rows(inputs.length)))
    report = warm * len(inputs.suites["held-out"].prompts) * _DECODERS * settings.max_new_tokens * decode(1)
    tuning = min(LONGEST, sum(_TUNING * decode(rows) for rows in ROWS))
    tuning += 2 * settings.tune_prompts * settings.max_new_tokens * decode(1)
    parts["tuning and measuring"] = report + (tuning if settings.tune_prompts else 0)
    return parts


def line(inputs: Inputs, target: TrainingTarget, step: float) -> str:
    """Return a log line with the time of each part of a run, and the flag that shortens the longest part.

    On a GPU decoding is neither timed nor in the line: its graphs take longer to capture than the text to write.

    Args:
        step: seconds of an optimiser step of stage 1.
    """
    timed: dict[int, float] = {}
    decoder = target if isinstance(target, Target) and target.device.type == "cpu" else None

    def decode(rows: int) -> float:
        if decoder and rows not in timed:
            timed[rows] = step_seconds(decoder, inputs.suites["validation"].prompts[0][:_PROMPT], rows)
        return timed.get(rows, 0.0)

    prompts = sizes_of(inputs.own_prompts)
    text = generated_texts(inputs.run, inputs.length, prompts).get("generating")
    if text is not None and prompts:
        text = replace(text, rows=len(prompts))
    parts = expected_parts(inputs, text, step, decode)
    if decoder is None:
        parts = {name: seconds for name, seconds in parts.items() if name.startswith("stage")}
    longest = max(parts, key=lambda name: parts[name])
    shown = ", ".join(f"{name} {_time(seconds)}" for name, seconds in parts.items())
    whole = "this run" if decoder else "training, without decoding,"
    kept = any(stage.keep_states for stage in (inputs.run.config.stage1, inputs.run.config.stage2))
    # The timed steps may have read an earlier run's files, so with kept states the time is no bound.
    bound, rest = ("", "; steps that read kept states are the faster ones") if kept else ("at most ", "")
    return (
        f"{whole} takes {bound}about {_time(sum(parts.values()))} here: {shown} ({_FLAGS[longest]} shortens it{rest})"
    )


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
