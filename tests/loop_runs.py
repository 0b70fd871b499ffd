"""Short trainings by the loop, here or as a script in one of several processes: OUTPUT, then the names of `CASES`."""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_block_head, tiny_head, tiny_model
from old_trainer import SpeculatorTrainer, arguments

from data import batches
from speculator import Target
from speculator.checkpoints.loading import bind
from train import loop
from train.batch import Collator, StageRows, StateSource
from train.checkpoint import newest
from train.config import LossConfig, StageConfig
from train.loop import Loop, Progress

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
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "accumulation": {"gradient_accumulation_steps": 2, "logging_steps": 3},
    "bf16": {"bf16": True, "head": "eagle3"},
    "muon": {"optimizer": "muon", "head": "eagle3", "lr_scheduler_type": "linear"},
    "sharded": {"sharded": True, "gradient_accumulation_steps": 3},
    "dspark": {"head": "dspark", "max_grad_norm": 0.0, "lr_scheduler_type": "constant_with_warmup"},
}
"""By name, what differs from `STAGE`; 22 rows are 11 or, on two processes, 6 micro-batches."""


def parts(case: str) -> tuple[Any, Target, list[dict], LossConfig, StageConfig, bool]:
    settings = dict(CASES[case])
    kind, sharded = settings.pop("head", "mlp"), settings.pop("sharded", False)
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
    return bind(head.float(), target), target, rows, loss, replace(STAGE, **settings), sharded


def loop_of(case: str, folder: Path) -> Loop:
    head, target, rows, loss, stage, sharded = parts(case)
    given = StageRows(rows, Collator(head.config), seed=3, validation=rows[:8], evaluation_batch=2)
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


def by_trainer(case: str, folder: Path) -> SpeculatorTrainer:
    head, target, rows, loss, stage, sharded = parts(case)
    ours = ("epochs", "base_batch_size", "base_width", "optimizer", "save_total_limit", "patience", "keep_states")
    made = SpeculatorTrainer(
        model=head,
        target=target,
        loss=loss,
        decode=lambda head: {},
        optimizer="sharded" if sharded else stage.optimizer,
        args=arguments(
            output_dir=str(folder),
            seed=3,
            report_to="none",
            per_device_eval_batch_size=2,
            **{name: value for name, value in vars(stage).items() if name not in ours},
        ),
        data_collator=Collator(head.config),
        train_dataset=rows,
        eval_dataset=rows[:8],
    )
    made.train()
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    batches.state()
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        by_trainer(name, folder / "trainer")
        by_loop(name, folder / "whole")
        for step in range(1, STAGE.max_steps):
            by_loop(name, folder / str(step), step)
        by_loop(name, folder / "each", *range(1, STAGE.max_steps))
    gc.collect()
    torch.distributed.destroy_process_group()
