"""Steps of a training recipe on a target of random weights: memory and time with those of `train.py --plan`.

Nothing is downloaded: rows are packed random documents. Each step is one micro-batch, so that a few minutes are enough.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from speculator.target.model import Target
from train.door.gpus import place_of
from train.door.initialise import new_head
from train.door.plan import Plan
from train.door.settle import Run
from train.loop import Loop
from train.options.config import HERE, RunConfig
from train.progress import Display
from train.states.batch import Collator, StageRows, StateSource

_DOCUMENT = 512  # mean tokens of a document
_LOGGED = 5  # steps of a line; compilation falls into the first one


def documents(rows: int, length: int, vocab_size: int) -> Dataset:
    """Return rows of random tokens, packed from documents of unequal length."""
    draw, made = random.Random(0), []
    for _ in range(rows):
        numbers: list[int] = []
        while len(numbers) < length:
            numbers += [len(numbers)] * int(1 + draw.expovariate(1 / _DOCUMENT))
        tokens = [draw.randrange(vocab_size) for _ in range(length)]
        made.append({"input_ids": tokens, "loss_mask": [1] * length, "document_ids": numbers[:length]})
    return Dataset.from_list(made)


def measure(config: RunConfig, target: Target, steps: int) -> dict[str, Any]:
    """Train for some micro-batches of stage 1; return tokens/s, MFU, and peak memory, measured and planned."""
    stage = config.stage1
    run = Run.of(config, target.config, place_of(HERE, 1))
    length = run.config.data.seq_length
    rows = documents(2 * stage.per_device_train_batch_size, length, target.vocab_size)
    head = new_head(run, target, rows, length)
    plan = Plan(run)
    source, stage = StateSource(target, head.aux_layers), replace(stage, max_steps=steps, logging_steps=_LOGGED)
    given, display = StageRows(rows, Collator(head.config)), Display(token_at_peak=plan.token_at_peak("stage1"))
    loop = Loop(head, source, stage, config.loss, given, Path(), display=display)
    last = [line for line in loop.run().log_history if "tokens_per_second" in line][-1]
    measured = torch.cuda.max_memory_allocated(target.device) if target.device.type == "cuda" else None
    return {
        "tokens_per_second": last["tokens_per_second"],
        "mfu": last.get("mfu"),
        "step_over_target": last["step_over_target"],
        "peak_bytes": measured,
        "planned_bytes": sum(plan.memory()["stage1"].values()),
        "document_attention": str(target.document_attention and target.document_attention[0]),
        "loop": loop,
    }
