"""transformers' Trainer, told how a speculator's loss is made and what a good speculator is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from speculator.errors import UserError
from speculator.heads import Speculator
from speculator.target import Target
from train.checkpoint import seal
from train.config import LossConfig
from train.losses import IGNORE, Measure, align, summarise
from train.timing import Stopwatch


class Collator:
    """Rows into tensors, with every head's labels: `labels` [B, N, S] is also what the Trainer counts.

    Rows are {"input_ids"} and may have a "loss_mask" and "document_ids"; shorter rows are filled up on the right, where
    causal attention keeps the filling from being seen and the mask keeps it from being learnt.
    """

    def __init__(self, n_predict: int):
        self.n_predict = n_predict

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        length = max(self.n_predict + 2, *(len(row["input_ids"]) for row in rows))

        def column(name: str, default: int) -> Tensor:  # [B, L]
            lists = [row.get(name) or [default] * len(row["input_ids"]) for row in rows]
            return torch.tensor([values + [0] * (length - len(values)) for values in lists])

        input_ids = column("input_ids", 0)
        documents = column("document_ids", 0)
        labels = align(input_ids, documents, column("loss_mask", 1), self.n_predict)
        return {"input_ids": input_ids, "document_ids": documents, "labels": labels}


class SpeculatorTrainer(Trainer):
    """Trains a head against a frozen target.

    The target is neither a parameter nor a submodule: the optimiser, the checkpoints and the data-parallel wrapper
    see the head alone. Losses and metrics are sums and counts, reduced over accumulation steps and processes before
    any division, so how a global batch is cut does not change a result.

    Args:
        target: the model to draft for.
        loss: weights of the losses.
        decode: gives the real figures of the head as it is now, from the decoding loop; called at each evaluation.
    """

    def __init__(
        self,
        *,
        target: Target,
        loss: LossConfig,
        decode: Callable[[Speculator], dict[str, float]],
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.remove_callback(ProgressCallback)
        self.add_callback(ProgressLine)
        self.target, self.loss_weights, self.decode = target, loss, decode
        # compute_loss divides by the global count of labels, so the Trainer must count them and divide no more.
        self.model_accepts_loss_kwargs = True
        self._sums: dict[str, dict[str, Tensor]] = {"train": {}, "eval": {}}
        self._step_time, self._target_time = Stopwatch(self.args.device), Stopwatch(self.args.device)
        self.add_callback(StepTime(self._step_time))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        input_ids, labels = inputs["input_ids"], inputs["labels"]
        length = labels.shape[-1]
        with self._target_time if model.training else nullcontext():
            hidden = self.target.hidden(input_ids, inputs["document_ids"])
        measure = Measure(labels, hidden, self.target.logits, self.loss_weights, vocab_size=self.target.vocab_size)
        sums = model(hidden[:, :length].float(), input_ids[:, 1:-1], measure)
        objective = sums.pop("objective")
        self._add("train" if model.training else "eval", sums)
        heads = labels.shape[1]
        items = (labels != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        scale = self.accelerator.num_processes if num_items_in_batch is not None else 1
        # Per position, summed over heads: all heads' labels are counted together, and they hardly differ in number.
        loss = objective * heads * scale / items.clamp_min(1)
        if not torch.isfinite(loss):
            raise UserError(
                f"the loss became {loss.item()} at step {self.state.global_step}; what {self.args.output_dir} holds is "
                "kept; start another run with a smaller learning_rate"
            )
        return (loss, sums) if return_outputs else loss

    def _add(self, phase: str, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            value = value.detach().double()
            self._sums[phase][name] = self._sums[phase].get(name, torch.zeros_like(value)) + value

    def _take(self, phase: str) -> dict[str, float]:
        """The figures of a phase since they were last taken, over all processes."""
        sums = self.accelerator.reduce(self._sums[phase], "sum")
        self._sums[phase] = {}
        return summarise(sums) if sums else {}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and "learning_rate" in logs:
            logs |= self._take("train")
            logs["step_over_target"] = self._step_time.take() / self._target_time.take()
        super().log(logs, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        head = self.accelerator.unwrap_model(self.model)
        figures = self._take("eval") | self.decode(head)
        # Not the library's mean of batches' means.
        figures["loss"] = sum(value for name, value in figures.items() if name.endswith("/loss"))
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        return output

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # Only a step that is saved can be the best: an evaluation between checkpoints leaves nothing to load.
        return self.control.should_save and super()._determine_best_metric(metrics=metrics, trial=trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off here
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(folder)
        self.accelerator.wait_for_everyone()


class StepTime(TrainerCallback):
    """Times optimiser steps: all forward and backward passes of one, and the update."""

    def __init__(self, stopwatch: Stopwatch):
        self.stopwatch = stopwatch

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.stopwatch.__enter__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.stopwatch.__exit__()


class ProgressLine(ProgressCallback):
    """The progress bar, and one line per log that says what matters."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self.training_bar is None or not logs or "train_runtime" in logs:
            return
        prefix = "eval_" if "eval_loss" in logs else ""
        heads = [f"{v:.2f}" for k, v in logs.items() if k.startswith(f"{prefix}head") and k.endswith("/accuracy")]
        parts = [
            f"{'eval' if prefix else 'step'} {state.global_step:>5}/{state.max_steps}",
            f"loss {logs[f'{prefix}loss']:.3f}",
            f"head accuracy {' '.join(heads)}",
            f"simulated tokens/step {logs[f'{prefix}simulated_tokens_per_step']:.2f}",
        ]
        if prefix:
            real, sampled = logs["eval_tokens_per_step"], logs["eval_tokens_per_step_sampled"]
            parts.append(f"real tokens/step {real:.2f} greedy, {sampled:.2f} at temperature 1")
        else:
            parts.append(f"lr {logs['learning_rate']:.1e} | step/target {logs['step_over_target']:.1f}")
        self.training_bar.write(" | ".join(parts))


def arguments(**fields: Any) -> TrainingArguments:
    """TrainingArguments with what every stage shares."""
    return TrainingArguments(
        eval_strategy="steps",
        save_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="tokens_per_step",
        greater_is_better=True,
        remove_unused_columns=False,
        label_names=["labels"],
        use_cpu=not torch.accelerator.is_available(),
        ddp_find_unused_parameters=False,
        **fields,
    )
