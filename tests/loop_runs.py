"""Short trainings by the loop, here or as a script in one of several processes: OUTPUT, then the names of `CASES`."""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_block_head, tiny_head, tiny_model
from torch.nn import functional

from data import batches
from speculator import Target
from speculator.checkpoints.loading import bind
from train import loop
from train.checkpoint import newest
from train.loop import Loop, Progress
from train.options.config import LossConfig, StageConfig
from train.states.batch import Collator, StageRows, StateSource

STAGE = StageConfig(
    max_steps=7,
    learning_rate=1e-2,
    warmup_steps=0.3,
    weight_decay=0.1,
    per_device_train_batch_size=2,
    eval_steps=2,
    save_steps=4,
    logging_steps=1,
    save_total_limit=9,
)
EVERY = range(1, STAGE.max_steps)
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "accumulation": {"gradient_accumulation_steps": 2, "logging_steps": 3},
    "bf16": {"bf16": True, "head": "eagle3"},
    "muon": {"optimizer": "muon", "head": "eagle3", "lr_scheduler_type": "linear"},
    "sharded": {"sharded": True, "gradient_accumulation_steps": 3, "logging_steps": 3},
    "dropout": {"dropout": 0.2},
    "dspark": {
        "head": "dspark",
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant_with_warmup",
    },
}
"""By name, what differs from `STAGE`; 22 rows are 11 or, on two processes, 6 micro-batches."""


def loop_of(case: str, folder: Path) -> Loop:
    settings = dict(CASES[case])
    kind, sharded, dropout = settings.pop("head", "mlp"), settings.pop("sharded", False), settings.pop("dropout", 0.0)
    target = Target(tiny_model(), tokenizer=None)
    torch.manual_seed(0)
    head = (
        tiny_block_head(target, anchors=8, aux_layers=[0], num_hidden_layers=1)
        if kind == "dspark"
        else tiny_head(architecture=kind)
    )
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(32, (12 + i % 9,), generator=generator).tolist() for i in range(22)]
    rows = [
        {"input_ids": text, "loss_mask": [0] * (i % 4) + [1] * (len(text) - i % 4), "document_ids": [i] * len(text)}
        for i, text in enumerate(texts)
    ]
    for row in rows:  # two documents each
        row["document_ids"][:6] = [0] * 6
    loss = LossConfig(cross_entropy=0.1, head_decay=0.8)
    bind(head.float(), target)
    if dropout:  # as the MTP block of a family may have it
        forward = head.forward
        head.forward = lambda batch, loss: forward(
            replace(batch, states=functional.dropout(batch.states, dropout, head.training)), loss
        )
    given = StageRows(rows, Collator(head.config), seed=3, validation=rows[:8], evaluation_batch=2)
    stage = replace(STAGE, **settings)
    return Loop(head, StateSource(target, head.aux_layers), stage, loss, given, folder, sharded=sharded)


def by_loop(case: str, folder: Path, *stops: int) -> Loop:
    """Train, and be stopped by a signal after some steps, each time to resume from the newest checkpoint."""
    for stop in (*stops, STAGE.max_steps + 1):
        made = loop_of(case, folder)
        last = newest(folder)[0]
        if last:
            made.resume(last, Progress.read(last))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "stop_asked", lambda made=made, stop=stop: made.progress.global_step >= stop)
            made.run()
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    batches.state()
    for name in sys.argv[2:]:
        by_loop(name, Path(sys.argv[1]) / name / "whole")
        by_loop(name, Path(sys.argv[1]) / name / "stopped", *EVERY)
    gc.collect()
    torch.distributed.destroy_process_group()
