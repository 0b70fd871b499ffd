"""transformers' Trainer with a speculator's loss, which measures it by the tokens per step of real decoding."""

from __future__ import annotations

import math
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
from speculator.sealed import seal
from speculator.target.model import Target
from train.checkpoint import METRIC, planned, reporting_full_disk, rotate
from train.config import LossConfig
from train.interrupts import stop_asked
from train.losses import IGNORE, Measure, align, summarise
from train.progress import Pace, ProgressLine
from train.sharded_adam import ShardedAdam

_LOADERS = 2
"""Processes that collate for a process with a GPU; a CPU has no core to spare."""


class Collator:
    """Rows into tensors, with every head's labels: `labels` [B, N, S] is also what the Trainer counts.

    Rows are {"input_ids"} and may have a "loss_mask" and "document_ids"; shorter rows are filled up on the right, where
    causal attention keeps the filling from being seen and the mask keeps it from being learnt.

    Args:
        n_predict: heads.
        rejected_token_weight: how many times tokens count that rows call "refused": in `token_weights` [B, L]; None: once.
    """

    def __init__(self, n_predict: int, rejected_token_weight: float | None = None):
        self.n_predict, self.rejected_token_weight = n_predict, rejected_token_weight

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        length = max(self.n_predict + 2, *(len(row["input_ids"]) for row in rows))

        def column(name: str, default: int) -> Tensor:  # [B, L]
            lists = [row.get(name) or [default] * len(row["input_ids"]) for row in rows]
            return torch.tensor([values + [0] * (length - len(values)) for values in lists])

        input_ids = column("input_ids", 0)
        documents = column("document_ids", 0)
        labels = align(input_ids, documents, column("loss_mask", 1), self.n_predict)
        batch = {"input_ids": input_ids, "document_ids": documents, "labels": labels}
        if self.rejected_token_weight is not None:
            batch["token_weights"] = 1 + (self.rejected_token_weight - 1) * column("refused", 0)
        return batch


class SpeculatorTrainer(Trainer):
    """Trains a head against a frozen target.

    The target is neither a parameter nor a submodule: the optimiser, the checkpoints and the data-parallel wrapper
    see the head alone. Losses and metrics are sums and counts, reduced over accumulation steps and processes before
    any division, so how a global batch is cut does not change a result.

    Args:
        target: the model to draft for.
        token_at_peak: seconds for a token's operations at the device's peak; None where that is not known.
        loss: weights of the losses.
        decode: gives the real figures of the head as it is now, from the decoding loop; called at each evaluation.
        keep: how many checkpoints, the best among them; None keeps all.
        shard_optimizer: split Adam's moments among the processes.
    """

    def __init__(
        self,
        *,
        target: Target,
        token_at_peak: float | None = None,
        loss: LossConfig,
        decode: Callable[[Speculator], dict[str, float]],
        keep: int | None = None,
        shard_optimizer: bool = False,
        **kwargs: Any,
    ):
        self.shard_optimizer = shard_optimizer
        super().__init__(**kwargs)
        self.remove_callback(ProgressCallback)
        self.add_callback(ProgressLine)
        self.target, self.loss_weights, self.decode, self.keep = target, loss, decode, keep
        self._aux_layers = kwargs["model"].aux_layers
        # compute_loss divides by the global count of labels, so the Trainer must count them and divide no more.
        self.model_accepts_loss_kwargs = True
        self._sums: dict[str, dict[str, Tensor]] = {"train": {}, "eval": {}}
        self.pace = Pace(self.args.device, token_at_peak)
        self.add_callback(self.pace)
        self.add_callback(StopWhenAsked(self))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        self.optimizer = super().create_optimizer(*args, **kwargs)
        if self.shard_optimizer and self.args.world_size > 1:
            self.optimizer = ShardedAdam(self.optimizer)
        return self.optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharded = getattr(self.optimizer, "optimizer", None)  # accelerate wraps it
        if not isinstance(sharded, ShardedAdam):
            return super()._save_optimizer_and_scheduler(output_dir)
        sharded.consolidate_state_dict()
        super()._save_optimizer_and_scheduler(output_dir)
        sharded.forget()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        input_ids, labels = inputs["input_ids"], inputs["labels"]
        length = labels.shape[-1]
        with (
            self.pace.of_target(input_ids) if model.training else nullcontext(),
            self.target.aux_layers.recorded(self._aux_layers) as states,
        ):
            hidden = self.target.hidden(input_ids, inputs["document_ids"])
        measure = Measure(
            labels,
            hidden,
            self.target.logits,
            self.loss_weights,
            vocab_size=self.target.vocab_size,
            token_weights=inputs.get("token_weights") if model.training else None,
        )
        given, loss_mask = states(hidden)[:, :length].float(), (labels != IGNORE).any(1)
        sums = model(given, input_ids[:, 1:-1], measure, inputs["document_ids"][:, :length], loss_mask)
        objective = sums.pop("objective")
        self._add("train" if model.training else "eval", sums)
        heads = labels.shape[1]
        items = (labels != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        scale = self.accelerator.num_processes if num_items_in_batch is not None else 1
        # Per position, summed over heads: all heads' labels are counted together, and they hardly differ in number.
        loss = objective * heads * scale / items.clamp_min(1)
        return (loss, sums) if return_outputs else loss

    def _refuse_unless_finite(self, what: str, value: float) -> None:
        """Called where a figure is on the host anyway: looking at each pass would keep the device waiting."""
        if not math.isfinite(value):
            raise UserError(
                f"{what} became {value} by step {self.state.global_step}; what {self.args.output_dir} holds is kept; "
                "start another run with a smaller learning_rate"
            )

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
            self._refuse_unless_finite("the loss", logs["loss"])
            logs |= self._take("train")
            logs |= self.pace.figures(self.state, self.args.world_size)
        super().log(logs, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        head = self.accelerator.unwrap_model(self.model)
        figures = self._take("eval")
        # As it is trained on, and not the library's mean of batches' means.
        decay = self.loss_weights.head_decay
        figures["loss"] = sum(decay**i * figures[f"head{i}/loss"] for i in range(head.n_predict))
        self._refuse_unless_finite("the loss", figures["loss"])
        figures |= self.decode(head)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        return output

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # Only a step that is saved, whoever stops the run, can be the best: others leave nothing to load.
        saved = planned(self.state.global_step, self.args.save_steps, self.args.max_steps)
        return saved and super()._determine_best_metric(metrics=metrics, trial=trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        stage = Path(self.args.output_dir)
        folder = stage / f"checkpoint-{self.state.global_step}"
        self._refuse_unless_finite("the loss", self._tr_loss.item())
        largest = max(weight.detach().abs().max().item() for weight in model.parameters())
        self._refuse_unless_finite("a weight", largest)
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off here
        self.accelerator.wait_for_everyone()
        try:
            with reporting_full_disk(folder):
                super()._save_checkpoint(model, trial)
                torch.save(self._since_log(), self._since_log_file(folder))
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    seal(folder)
        except Exception:
            if self.args.should_save:  # another process would take it from under the one that writes
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if self.args.should_save and self.keep:
            rotate(stage, self.keep, self.state.best_global_step, self.state.global_step)
        self.accelerator.wait_for_everyone()

    def _since_log_file(self, folder: Path) -> Path:
        return folder / f"since_log_{self.args.process_index}.pt"

    def _since_log(self) -> dict[str, Any]:
        """What the next line of the log is made of: a run that goes on has the same lines."""
        return {"loss": self._tr_loss, "step": self._globalstep_last_logged, "sums": self._sums["train"]}

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        file = resume_from_checkpoint and self._since_log_file(Path(resume_from_checkpoint))
        if file and file.exists():
            self.add_callback(GoOnLogging(self, torch.load(file, self.args.device, weights_only=True)))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)


class GoOnLogging(TrainerCallback):
    """Puts back what a checkpoint had gathered for the next line of the log."""

    def __init__(self, trainer: SpeculatorTrainer, since_log: dict[str, Any]):
        self.trainer, self.since_log = trainer, since_log

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._tr_loss += self.since_log["loss"]
        self.trainer._globalstep_last_logged = self.since_log["step"]
        self.trainer._sums["train"] = self.since_log["sums"]


class StopWhenAsked(TrainerCallback):
    """After SIGTERM: a checkpoint of the step that is done, and the end. All processes stop at the same step."""

    def __init__(self, trainer: SpeculatorTrainer):
        self.trainer = trainer
        self._votes: Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size == 1:
            stop = stop_asked()
        else:
            # The sum is read a step later, when the device has long been through with it.
            before = self._votes
            self._votes = self.trainer.accelerator.reduce(torch.tensor(float(stop_asked()), device=args.device), "sum")
            stop = before is not None and bool(before)
        if stop:
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size == 1 and stop_asked():
            control.should_save = control.should_training_stop = True


def on_one_gpu(made: TrainingArguments) -> TrainingArguments:
    """For one GPU a process: of several visible to one the Trainer would use all, by nn.DataParallel."""
    made._n_gpu = min(made.n_gpu, 1)
    return made


def arguments(**fields: Any) -> TrainingArguments:
    """TrainingArguments with what every stage shares."""
    made = TrainingArguments(
        eval_strategy="steps",
        save_strategy="steps",
        metric_for_best_model=METRIC,
        greater_is_better=True,
        remove_unused_columns=False,
        label_names=["labels"],
        use_cpu=not torch.accelerator.is_available(),
        ddp_find_unused_parameters=False,
        dataloader_num_workers=_LOADERS if torch.accelerator.is_available() else 0,
        logging_nan_inf_filter=False,  # it would wait for the device at each pass, and hide what has to end the run
        **fields,
    )
    if made.device.type == "cpu":  # not cpu:0, as accelerate calls it beside others: torch.load knows no such place
        made._setup_devices = torch.device("cpu")
    return on_one_gpu(made)
