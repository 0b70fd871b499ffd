"""Ten training steps, with a target here or in servers."""

from pathlib import Path

import torch

from speculator import Target
from speculator.heads import Speculator
from speculator.target.remote.server_target import ServerTarget
from train.loop import Loop
from train.options.config import LossConfig, StageConfig
from train.states.batch import Collator, StageRows, StateSource
from train.states.sources import LookAhead

STEPS = 10


def trained(
    target: Target, head: Speculator, rows: list[dict], folder: Path, at: dict | None = None
) -> tuple[list[float], list[torch.Tensor], list[dict]]:
    """Losses of ten steps and of an evaluation, the gradients of each step, and the log; `at` maps steps to calls."""
    source = LookAhead(target) if isinstance(target, ServerTarget) else StateSource(target, head.aux_layers)
    stage = StageConfig(
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=0,
        logging_steps=1,
        eval_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    collate = Collator(head.config, documents=source.reads_documents)
    rows = StageRows(rows, collate, validation=rows[:4], evaluation_batch=2)
    loop = Loop(head, source, stage, LossConfig(cross_entropy=0.1), rows, folder)
    gradients, after = [], loop.after

    def note(*_) -> None:
        gradients.append(torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None]))

    def called() -> bool:
        (at or {}).get(loop.progress.global_step, lambda: None)()
        return after()

    loop.optimizer.register_step_pre_hook(note)
    loop.after = called
    log = loop.run().log_history
    evaluated = next(entry["eval_loss"] for entry in log if "eval_loss" in entry)
    return [*(entry["loss"] for entry in log if "loss" in entry), evaluated], gradients, log


def apart(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest relative distance of the gradients of a step."""
    pairs = zip(gradients, expected, strict=True)
    return max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)
