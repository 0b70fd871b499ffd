"""Ten training steps, with a target here or in servers."""

from pathlib import Path

import torch
from transformers import TrainerCallback

from speculator import Target
from speculator.heads import Speculator
from speculator.target.remote.server_target import ServerTarget
from train.config import LossConfig
from train.trainer import Collator, SpeculatorTrainer, arguments

STEPS = 10


class Noting(TrainerCallback):
    """Keeps the gradients of every step, and calls `at` a step."""

    def __init__(self, head, at):
        self.head, self.at, self.gradients = head, at, []

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.head.parameters() if p.grad is not None]))

    def on_step_end(self, args, state, *rest, **kwargs):
        self.at.get(state.global_step, lambda: None)()


def trained(
    target: Target, head: Speculator, rows: list[dict], folder: Path, at: dict | None = None
) -> tuple[list[float], list[torch.Tensor], list[dict]]:
    """Losses of ten steps and of an evaluation, the gradients of each step, and the log; `at` maps steps to calls."""
    trainer = SpeculatorTrainer(
        model=head,
        target=target,
        loss=LossConfig(cross_entropy=0.1),
        decode=lambda head: {},
        args=arguments(
            output_dir=str(folder),
            max_steps=STEPS,
            learning_rate=1e-3,
            logging_steps=1,
            eval_steps=STEPS,
            save_steps=STEPS,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=2,
            report_to="none",
        ),
        data_collator=Collator(head.config, documents=isinstance(target, ServerTarget)),
        train_dataset=rows,
        eval_dataset=rows[:4],
    )
    noting = Noting(head, at or {})
    trainer.add_callback(noting)
    trainer.train()
    log = trainer.state.log_history
    evaluated = next(entry["eval_loss"] for entry in log if "eval_loss" in entry)
    return [*(entry["loss"] for entry in log if "loss" in entry), evaluated], noting.gradients, log


def apart(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest relative distance of the gradients of a step."""
    pairs = zip(gradients, expected, strict=True)
    return max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)
