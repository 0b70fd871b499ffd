"""The trainer before `train.loop`, with which its results are compared."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.serialization import config as serialization
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from eval import tracking
from speculator.device import has_accelerator
from speculator.errors import UserError
from speculator.files import write_manifest
from speculator.heads import Speculator
from speculator.heads.training import IGNORE, Metric, TrainingBatch
from speculator.kernels.linear import pack_linears
from speculator.target.base import TrainingTarget
from speculator.target.probe import not_finite
from speculator.terminal import Progress, log
from train import interrupts
from train.batch import Batch
from train.checkpoint import METRIC, planned, reporting_full_disk, rotate
from train.config import LossConfig
from train.interrupts import stop_asked
from train.kept_states import KeptStates
from train.losses import ChunkedLoss, compiling_pays, summarise
from train.muon import MuonAndAdamW
from train.progress import Stopwatch, log_line
from train.sharded_adam import ShardedAdam

_LOADERS = 2
_SINCE_LOG = "since_log.pt"
_ROW_COLUMNS = ("input_ids", "document_ids")
_TIMED, _LEAST_SECONDS = 3, 5.0
"""Columns of a batch that are not the head's training targets."""


class SinceLog(TypedDict):
    """The state of the next log line: the Trainer's summed loss, the last line's step, and each `Metric` by name."""

    loss: Tensor
    step: int
    sums: dict[str, Metric]


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


class Sharded(ShardedAdam):
    def state_dict(self):
        return super().state_dict() if self._all_state_dicts else torch.optim.Optimizer.state_dict(self)


class SpeculatorTrainer(Trainer):
    """Trains a head against a frozen target.

    The target is not a submodule: the optimiser, the checkpoints and the data-parallel wrapper see the head alone.
    Metrics are (sum, count) pairs, reduced over accumulation steps and processes before the division, so results do not
    depend on how a global batch is split.

    Args:
        target: the model to draft for.
        token_at_peak: as `Throughput` takes it.
        loss: weights of the losses.
        decode: decodes with the current head and returns figures by name; called at each evaluation.
        keep: number of checkpoints to keep, the best among them; None keeps all.
        patience: number of checkpoints in a row without a better one after which training ends; None: it never does.
        optimizer: "adamw"; "sharded", AdamW whose moments are split among the processes; or "muon" for the matrices
            inside the head, see `MuonAndAdamW`.
        kept_states: keeps the target's states in files; None: each pass computes them.
        progress: callback that shows the progress bar and prints the log (default: one with the title "training").
    """

    def __init__(
        self,
        *,
        target: TrainingTarget,
        token_at_peak: tuple[float, float] | None = None,
        loss: LossConfig,
        decode: Callable[[Speculator], dict[str, float]],
        keep: int | None = None,
        patience: int | None = None,
        optimizer: Literal["adamw", "sharded", "muon"] = "adamw",
        kept_states: KeptStates | None = None,
        progress: ProgressLine | None = None,
        **kwargs: Any,
    ):
        self.optimizer_kind = optimizer
        super().__init__(**kwargs)
        if self.accelerator.ddp_handler is not None:  # gradients lie in the buckets that are reduced, not beside them
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        for callback in (ProgressCallback, PrinterCallback):  # the Trainer adds one of them
            self.remove_callback(callback)
        self.progress = progress or ProgressLine("training")
        self.add_callback(self.progress)
        self.target, self.decode, self.keep = target, decode, keep
        self.look_ahead = None
        self.kept_states = kept_states
        self.patience = patience
        compiled = compiling_pays(target.device, target.vocab_size)
        self.token_loss = ChunkedLoss(
            target.logits, loss, target.vocab_size, compiled=compiled, output_matrix=target.output_matrix
        )
        self._aux_layers, self._positions = kwargs["model"].aux_layers, kwargs["model"].n_predict
        self._target_is_finite = torch.tensor(True, device=target.device)
        pack_linears(kwargs["model"])
        # The Trainer counts the labels of a global batch, and compute_loss alone divides by their number.
        self.model_accepts_loss_kwargs = True
        self._sums: dict[str, dict[str, Metric]] = {"train": {}, "eval": {}}
        self.throughput = Throughput(self.args.device, token_at_peak)
        self.add_callback(self.throughput)
        self.add_callback(StopWhenAsked(self))
        self.add_callback(CountEpochs(self.data_collator))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        self.optimizer = super().create_optimizer(*args, **kwargs)
        if self.optimizer_kind == "sharded" and self.args.world_size > 1:
            self.optimizer = Sharded(self.optimizer)
        elif self.optimizer_kind == "muon":
            assert isinstance(self.model, Speculator)
            self.optimizer = MuonAndAdamW(self.optimizer, self.model)
        return self.optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharded = getattr(self.optimizer, "optimizer", None)  # accelerate wraps it
        if not isinstance(sharded, ShardedAdam):
            return super()._save_optimizer_and_scheduler(output_dir)
        sharded.consolidate_state_dict()
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        device = self.args.device
        sharded = isinstance(getattr(self.optimizer, "optimizer", None), ShardedAdam)
        if sharded:
            self.args._setup_devices = torch.device("cpu")  # where the moments of all processes are read
        with serialization.patch("load.mmap", sharded):  # type: ignore[attr-defined]  # to read its own moments alone
            super()._load_optimizer_and_scheduler(checkpoint)
        self.args._setup_devices = device

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Return the loss of a micro-batch, and with `return_outputs` also its metrics, (sum, count) by name.

        The loss is multiplied by the number of draft positions, and in training by that of the processes, because DDP
        averages the gradients. The sums are added to the figures of the next log line or of the evaluation.

        Args:
            model: the head, maybe in DDP's wrapper.
            num_items_in_batch: number of labels of an optimiser step, over all micro-batches and processes, by which
                the loss is divided; None: the labels of this batch, as in an evaluation.
        """
        input_ids = inputs["input_ids"]
        # The target runs here, outside the wrapped module: inside, DDP and the checkpoints would carry its frozen
        # weights.
        labels: Tensor = inputs["labels"]  # type: ignore[typeddict-item]
        with self.throughput.of_target(input_ids, labels) if model.training else nullcontext():
            normalisers = None
            if self.look_ahead is not None:
                raise AssertionError
            elif self.kept_states is not None:
                hidden, states, normalisers = self.kept_states.take(inputs)
            else:
                hidden, states = self.target.training_states(input_ids, inputs["document_ids"], self._aux_layers)
        states = states.float()  # heads are trained in it whatever the target's dtype is
        # Kept on the device, and read only if a loss is not finite: then it says whose fault that is.
        self._target_is_finite &= hidden.isfinite().all()
        batch = TrainingBatch(
            input_ids=input_ids,
            document_ids=inputs["document_ids"],
            hidden=hidden,
            states=states,
            normalisers=normalisers,
            targets={name: value for name, value in inputs.items() if name not in _ROW_COLUMNS},
        )
        # The wrapped module computes the loss itself. A call of the head's own methods would go around the wrapper, and
        # DDP would not reduce the gradients: no error, only heads that differ between processes.
        metrics = model(batch, self.token_loss)
        objective, count = metrics.pop("objective")
        # `count` and the Trainer's own number of labels are those of all N positions together. Times N, the loss is the
        # sum of the positions' means, if they have equally many labels; a head of 3 positions would log a third of it.
        objective = objective * self._positions
        if model.training:
            self._add("train", metrics)
        else:  # the Trainer would average the means of batches, which have different numbers of labels
            self._add("eval", metrics | {"objective": (objective, count)})
        # `num_items_in_batch`: labels of all micro-batches and processes of an optimiser step. It is None in an
        # evaluation.
        items = count if num_items_in_batch is None else num_items_in_batch
        # DDP takes the mean of the gradients over the processes, but we divide by the labels of all of them: undo its
        # mean. With 2 processes of 300 and 100 labels each sum is divided by 400 and doubled, and DDP halves their
        # total.
        scale = self.accelerator.num_processes if num_items_in_batch is not None else 1
        loss = objective * scale / items.clamp_min(1)
        return (loss, metrics) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        self.throughput.begin()  # the wait for a loader that starves is part of a step
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def _refuse_unless_finite(self, what: str, value: float) -> None:
        """Raise a UserError if a figure on the host is not finite; reading one from the device would stall it."""
        if not math.isfinite(value):
            why = (
                "start another run with a smaller learning_rate" if self._target_is_finite else not_finite(self.target)
            )
            raise UserError(
                f"{what} became {value} by step {self.state.global_step}; the checkpoints in {self.args.output_dir} "
                f"are kept; {why}"
            )

    def _add(self, phase: str, metrics: dict[str, Metric]) -> None:
        """Add the (sum, count) pairs of a batch to those of a phase, "train" or "eval", see `_take`."""
        for name, pair in metrics.items():
            # Sums of many batches in float64, and still on the device: the log line reads them once.
            total, count = (value.detach().double() for value in pair)
            before = self._sums[phase].get(name, (0, 0))
            self._sums[phase][name] = before[0] + total, before[1] + count

    def _take(self, phase: str) -> dict[str, float]:
        """Return the figures (`summarise`) of a phase, "train" or "eval", since the last call, over all processes."""
        sums = self.accelerator.reduce(self._sums[phase], "sum")
        self._sums[phase] = {}
        return summarise(sums)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and "learning_rate" in logs:
            self._refuse_unless_finite("the loss", logs["loss"])
            logs |= self._take("train")
            logs |= self.throughput.figures(self.state, self.args.world_size)
            if self.look_ahead is not None:
                logs["waiting_for_servers"] = self.look_ahead.share_waited()
        # SIGTERM to all processes ends wandb's own too, before the checkpoint is saved.
        with suppress(Exception) if interrupts.stop_asked() else nullcontext():
            super().log(logs, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        collator: Any = self.data_collator
        epoch, collator.epoch = collator.epoch, 0  # the same training positions in every evaluation
        kwargs["metric_key_prefix"] = metric_key_prefix
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        collator.epoch = epoch
        head = self.accelerator.unwrap_model(self.model)
        figures = self._take("eval")
        self._refuse_unless_finite("the loss", figures["loss"])
        figures |= self.decode(head)
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        return output

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # Only a step whose checkpoint is saved can be the best.
        saved = planned(self.state.global_step, int(self.args.save_steps), self.args.max_steps)
        return saved and super()._determine_best_metric(metrics=metrics, trial=trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        assert self.args.output_dir is not None
        stage = Path(self.args.output_dir)
        folder = stage / f"checkpoint-{self.state.global_step}"
        # Reduced, so that all processes raise or none: the others would wait for it.
        self._refuse_unless_finite("the loss", self.accelerator.reduce(self._tr_loss, "mean").item())
        largest = torch.stack([weight.detach().abs().max() for weight in model.parameters()]).max()
        self._refuse_unless_finite("a weight", largest.item())
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
        self.accelerator.wait_for_everyone()
        try:
            with reporting_full_disk(folder):
                super()._save_checkpoint(model, trial)
                since_log = self._since_log()
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    torch.save(since_log, folder / _SINCE_LOG)
                    write_manifest(folder)
        except Exception:
            if self.args.should_save:  # this process alone writes the folder
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if self.args.should_save and self.keep:
            rotate(stage, self.keep, self.state.best_global_step, self.state.global_step)
        self.accelerator.wait_for_everyone()

    def _since_log(self) -> SinceLog:
        """Return the sums since the last log line, over all processes, for the checkpoint.

        A run that resumes from them logs the same lines, on any number of processes.
        """
        # The Trainer adds up a loss in each process and averages them at the next log line; sums and counts are added
        # instead.
        loss = self.accelerator.reduce(self._tr_loss, "mean")
        sums = self.accelerator.reduce(self._sums["train"], "sum")
        return {"loss": loss, "step": self._globalstep_last_logged, "sums": sums}

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        file = resume_from_checkpoint and Path(resume_from_checkpoint) / _SINCE_LOG
        if file and file.exists():
            self.add_callback(ResumeLogging(self, torch.load(file, self.args.device, weights_only=True)))
        try:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            self.progress.close()


class ResumeLogging(TrainerCallback):
    """Restores a checkpoint's state of the next log line."""

    def __init__(self, trainer: SpeculatorTrainer, since_log: SinceLog):
        self.trainer, self.since_log = trainer, since_log

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._tr_loss += self.since_log["loss"]
        self.trainer._globalstep_last_logged = self.since_log["step"]
        # The processes' losses are averaged, and their sums are added: each has the loss, and the first one the sums.
        own = float(self.trainer.args.process_index == 0)
        self.trainer._sums["train"] = {
            name: (total * own, count * own) for name, (total, count) in self.since_log["sums"].items()
        }


class CountEpochs(TrainerCallback):
    """Tells the collator the epoch, before its rows are read."""

    def __init__(self, collator: Any):
        self.collator = collator

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.epoch = int(state.epoch)


class StopWhenAsked(TrainerCallback):
    """Stops all processes at the same step, with a checkpoint: after SIGTERM, or if no checkpoint gets better."""

    def __init__(self, trainer: SpeculatorTrainer):
        self.trainer = trainer
        self._votes: Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size == 1:
            stop = stop_asked()
        else:
            # The sum is read one step later, when the device has finished it.
            before = self._votes
            # All processes must stop at the same step, or the others would wait for ever in the next reduction.
            self._votes = self.trainer.accelerator.reduce(
                torch.full((), float(stop_asked()), device=args.device), "sum"
            )
            stop = before is not None and bool(before)
        if stop:
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size == 1 and stop_asked():
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, best = state.global_step, state.best_global_step
        if has_ended(step, best, args.max_steps, args.save_steps, self.trainer.patience):
            control.should_training_stop = True


def has_ended(step: int, best_step: int | None, max_steps: int, save_steps: int, patience: int | None) -> bool:
    """Return whether a stage has taken all steps, or saved `patience` checkpoints since its best one."""
    return step >= max_steps or bool(patience and best_step and step >= best_step + patience * save_steps)


def on_one_gpu(arguments: TrainingArguments) -> TrainingArguments:
    """Return the arguments, changed in place to use one GPU per process.

    The Trainer would wrap several visible GPUs in nn.DataParallel.
    """
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def arguments(**fields: Any) -> TrainingArguments:
    """Return transformers' arguments of a stage: those that all stages share, and `fields`."""
    made = TrainingArguments(
        eval_strategy="steps",
        save_strategy="steps",
        metric_for_best_model=METRIC,
        greater_is_better=True,
        remove_unused_columns=False,
        label_names=["labels"],
        use_cpu=not has_accelerator(),
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # they never change
        dataloader_num_workers=_LOADERS if has_accelerator() else 0,
        project=tracking.PROJECT,
        trackio_space_id=None,
        logging_nan_inf_filter=False,  # the filter syncs at every step, and hides what must end the run
        **fields,
    )
    if made.device.type == "cpu":  # accelerate may say cpu:0, which torch.load does not accept
        made._setup_devices = torch.device("cpu")
    return on_one_gpu(made)
