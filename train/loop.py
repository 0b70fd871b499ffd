"""The training loop of a draft head: `Loop.step` is one optimiser step, `Loop.after` what follows it."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.utils import gather_object, recursively_apply
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from transformers import get_scheduler

from speculator.device import has_accelerator
from speculator.errors import UserError
from speculator.files import JsonObject, new_folder, read_json, write_manifest, write_text
from speculator.heads import Speculator
from speculator.heads.training import IGNORE, Metric, TrainingBatch
from speculator.kernels.linear import pack_linears
from speculator.target.probe import not_finite
from speculator.terminal import Progress as Bar
from speculator.terminal import log
from train import interrupts
from train.checkpoint import METRIC, planned, reporting_full_disk, rotate
from train.interrupts import stop_asked
from train.losses import ChunkedLoss, compiling_pays, summarise
from train.optimizers import MuonAndAdamW, ShardedAdam
from train.options.config import LossConfig, StageConfig
from train.progress import Clock, Display, log_line
from train.states.batch import NOT_TARGETS, Batch, StageRows, StateSource

STATE, _MOMENTS, _RANDOM = "trainer_state.json", "optimizer.pt", "rng_state.pth"
"""Files of a checkpoint beside the head's: `Progress`, the optimiser's state, and each process's generators."""


Sums: TypeAlias = dict[str, Metric]
"""(sum, count) pairs by name, in float64, and on the device until a line of the log reads them."""


def add(sums: Sums, metrics: dict[str, Metric]) -> None:
    """Add the (sum, count) pairs of a batch."""
    for name, pair in metrics.items():
        total, count = (value.detach().double() for value in pair)
        before = sums.get(name, (0, 0))
        sums[name] = before[0] + total, before[1] + count


@dataclass
class Progress:
    """How far a stage is: what a checkpoint has in `STATE`, whole.

    Attributes:
        max_steps: optimiser steps of the stage.
        global_step, epoch: optimiser steps that were taken, and passes over the rows.
        best_global_step, best_metric: the planned checkpoint with the highest `METRIC`, and its value.
        log_history: entries of the log, figures by name, with "step" and "epoch".
        since_log: sums since the last line of the log, over all processes: (sum, count) by name, as lists.
        schedule: state of the learning rate's schedule.
    """

    max_steps: int
    global_step: int = 0
    epoch: float = 0.0
    best_global_step: int | None = None
    best_metric: float | None = None
    log_history: list[dict[str, float]] = field(default_factory=list)
    since_log: dict[str, list[Any]] = field(default_factory=dict)
    schedule: JsonObject = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Progress:
        """Return the progress of a checkpoint."""
        return cls(**read_json(folder / STATE))

    def ends(self, stage: StageConfig) -> bool:
        """Return whether a stage has taken all steps, or saved `patience` checkpoints since its best one."""
        best, patience = self.best_global_step, stage.patience
        stuck = patience and best and self.global_step >= best + patience * stage.save_steps
        return self.global_step >= self.max_steps or bool(stuck)


class Loop:
    """Trains a head against a frozen target.

    The target is not a submodule: the optimiser, the checkpoints and the data-parallel wrapper see the head alone.
    Metrics are (sum, count) pairs, reduced over micro-batches and processes before the division, so results do not
    depend on how a step's rows are split.

    Args:
        head: the head, in float32, which is moved to the target's device.
        folder: takes the checkpoints.
        decode: decodes with the current head and returns figures by name; called at each evaluation.
        sharded: split the moments of AdamW among the processes.
    """

    def __init__(
        self,
        head: Speculator,
        source: StateSource,
        stage: StageConfig,
        loss: LossConfig,
        rows: StageRows,
        folder: Path,
        *,
        decode: Callable[[Speculator], dict[str, float]] = lambda head: {},
        sharded: bool = False,
        display: Display | None = None,
    ):
        target = source.target
        self.device, self.source, self.stage, self.folder = target.device, source, stage, folder
        self.decode, self.display = decode, display or Display()
        self.accelerator = self.display.accelerator or Accelerator(cpu=not has_accelerator())
        self.head = head
        self.model: torch.nn.Module = head.to(self.device)  # type: ignore[arg-type]
        pack_linears(head)
        if self.accelerator.num_processes > 1:
            # Gradients lie in the buckets that are reduced, not beside them; buffers never change.
            self.model = DistributedDataParallel(head, gradient_as_bucket_view=True, broadcast_buffers=False)
        compiled, matrix = compiling_pays(self.device, target.vocab_size), target.output_matrix
        self.loss = ChunkedLoss(target.logits, loss, target.vocab_size, compiled=compiled, output_matrix=matrix)
        self.optimizer = _optimizer(head, stage, sharded and self.accelerator.num_processes > 1)
        share = stage.warmup_steps < 1  # of all steps
        warm_up = math.ceil(stage.max_steps * stage.warmup_steps) if share else int(stage.warmup_steps)
        self.schedule = get_scheduler(stage.lr_scheduler_type, self.optimizer, warm_up, stage.max_steps)
        self.collate = rows.collate
        self.batches, self.validation = rows.loaders(stage.per_device_train_batch_size, self.device)
        self.progress = Progress(stage.max_steps)
        self.clock = Clock(self.device, self.display)
        self.checkpoints = interrupts.Background()
        self.since_log: Sums = {}
        self._latest: dict[str, Tensor | float] = {}
        self._votes: Tensor | None = None
        # Kept on the device, and read only if a loss is not finite: then it says whose fault that is.
        self._target_is_finite = torch.tensor(True, device=self.device)
        torch.manual_seed(rows.seed)  # a stage draws the same numbers whatever the run did before it

    def run(self) -> Progress:
        """Train up to the last step, or until a signal or the stage's patience ends it."""
        progress, size = self.progress, self.stage.gradient_accumulation_steps
        steps = math.ceil(len(self.batches) / size)  # of an epoch; its last one may have fewer micro-batches
        self.clock.begin(progress.global_step, progress.max_steps)
        ends = False
        bar = Bar(title=self.display.title, unit="steps", total=progress.max_steps, initial=progress.global_step)
        with self.source.files, self.checkpoints, bar:
            while not ends:
                epoch, done = divmod(progress.global_step, steps)
                self.collate.epoch = epoch
                self.batches.set_epoch(epoch)
                left = skip_first_batches(self.batches, done * size)
                left.iteration = epoch  # accelerate before 1.15 would give it epoch 0's order
                batches = self.source.over(left)
                while done < steps and not ends:
                    self.checkpoints.check()
                    self.source.files.check()
                    with self.clock.steps:  # the wait for a loader that starves is part of a step
                        self.step(list(islice(batches, size)))
                    done += 1
                    progress.global_step += 1
                    progress.epoch = epoch + min(done * size / len(self.batches), 1)
                    self.clock.passed(progress.global_step)
                    bar.update(1)
                    ends = self.after()
        self.accelerator.wait_for_everyone()  # for the last checkpoint, which the first process has written
        return progress

    def step(self, batches: list[Batch]) -> None:
        """Take an optimiser step on this process's micro-batches."""
        # Labels of all micro-batches and processes: the loss is their mean.
        count = self.accelerator.reduce(sum((batch["labels"] != IGNORE).sum() for batch in batches), "sum")
        processes = self.accelerator.num_processes
        self.model.train()
        for i, batch in enumerate(batches, 1):
            self.clock.count(batch)
            with self.clock.target:
                inputs = self.with_states(batch)
            # DDP adds up the gradients of all processes in the last backward pass: its forward pass decides that.
            with nullcontext() if i == len(batches) else self.accelerator.no_sync(self.model):
                with self.autocast():
                    metrics = self.model(inputs, self.loss)
                del inputs  # what the backward pass needs of the states is in its graph
                objective, _ = metrics.pop("objective")
                # The count is that of all N positions together. Times N, the loss is the sum of the positions' means,
                # if they have equally many labels. Times the processes, because DDP takes the mean of the gradients:
                # of 300 and 100 labels each sum is divided by 400 and doubled, and DDP halves their total.
                loss = objective * self.head.n_predict * processes / count.clamp_min(1)
                loss.backward()  # the chunked loss has its gradients, which this scales
            # Of each process a share, so that a line of the log may span steps on other numbers of processes.
            counted = loss.new_full((), (i == len(batches)) / processes, dtype=torch.float64)
            add(self.since_log, metrics | {"objective": (loss.detach() / processes, counted)})
        norm = clip_grad_norm_(self.head.parameters(), self.stage.max_grad_norm or math.inf)
        self._latest = {"grad_norm": norm, "learning_rate": self.schedule.get_last_lr()[0]}
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def after(self) -> bool:
        """Log, evaluate and save, in this order, what is due after a step; return whether training ends."""
        step, stage = self.progress.global_step, self.stage
        stop = self._stop_asked()
        if step % stage.logging_steps == 0:
            self.log()
        if self._due(stage.eval_steps):
            self.evaluate()
            stop |= self.accelerator.num_processes == 1 and stop_asked()
        if stop or self._due(stage.save_steps):
            self.save()
            stop |= self.progress.ends(stage)
        return stop or step == stage.max_steps

    def _due(self, every: int) -> bool:
        return self.validation is not None and planned(self.progress.global_step, every, self.stage.max_steps)

    def with_states(self, batch: Batch) -> TrainingBatch:
        """Return a batch with the target's states, which are computed outside the head's wrapper and autocast."""
        found = self.source.take(batch)
        self._target_is_finite &= found.hidden.isfinite().all()
        return TrainingBatch(
            input_ids=batch["input_ids"],
            document_ids=batch["document_ids"],
            hidden=found.hidden,
            states=found.states.float(),  # heads are trained in it whatever the target's dtype is
            normalisers=found.normalisers,
            targets={name: value for name, value in batch.items() if name not in NOT_TARGETS},
        )

    def autocast(self) -> torch.autocast:
        """Return the context of the head's forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.stage.bf16)

    def figures(self, sums: Sums) -> dict[str, float]:
        """Return the figures (`summarise`) of sums over all processes; raise a UserError if the loss is not finite."""
        figures = summarise(self.accelerator.reduce(sums, "sum"))
        self._refuse_unless_finite("the loss", figures["loss"])
        return figures

    def log(self) -> None:
        """Log the figures of the steps since the last call."""
        figures, self.since_log = self.figures(self.since_log), {}
        progress, processes = self.progress, self.accelerator.num_processes
        figures |= {name: float(value) for name, value in self._latest.items()}
        figures |= self.clock.figures(progress.global_step, processes) | self.source.figures()
        self._note(figures)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Log and return the figures of the validation rows, and of decoding; note whether they are the best so far."""
        assert self.validation is not None
        began = time.monotonic()
        sums: Sums = {}
        self.head.eval()
        with Bar(title="evaluating", unit="batches", total=len(self.validation), leave=False) as bar:
            for batch in self.source.over(self.validation):
                inputs = self.with_states(batch)
                with self.autocast():
                    metrics = self.head(inputs, self.loss)
                objective, count = metrics.pop("objective")
                add(sums, metrics | {"objective": (objective * self.head.n_predict, count)})
                bar.update(1)
        figures = self.figures(sums) | self.decode(self.head)
        figures["runtime"] = time.monotonic() - began
        entry = {f"eval_{name}": value for name, value in figures.items()}
        self._note(entry)
        progress = self.progress
        best = -math.inf if progress.best_metric is None else progress.best_metric
        # Only a step whose checkpoint is planned can be the best.
        if self._due(self.stage.save_steps) and entry[METRIC] > best:
            progress.best_global_step, progress.best_metric = progress.global_step, entry[METRIC]
        return entry

    def _note(self, entry: dict[str, float]) -> None:
        """Add an entry to the log, print its line, and send it to the trackers."""
        progress = self.progress
        step = progress.global_step
        progress.log_history.append({**entry, "epoch": progress.epoch, "step": step})
        log(log_line(step, self.stage.max_steps, entry))
        tracked = {
            name.replace("eval_", "eval/", 1) if name.startswith("eval_") else f"train/{name}": value
            for name, value in progress.log_history[-1].items()
        }
        # SIGTERM to all processes ends wandb's own too, before the checkpoint is saved.
        with suppress(Exception) if interrupts.stop_asked() else nullcontext():
            self.accelerator.log(tracked, step=step)

    def _stop_asked(self) -> bool:
        """Return whether SIGTERM arrived, in all processes at the same step: one that is left waits for ever."""
        if self.accelerator.num_processes == 1:
            return stop_asked()
        # The sum is read one step later, when the device has finished it.
        before = self._votes
        self._votes = self.accelerator.reduce(torch.full((), float(stop_asked()), device=self.device), "sum")
        return before is not None and bool(before)

    def _refuse_unless_finite(self, what: str, value: float) -> None:
        """Raise a UserError if a figure on the host is not finite; reading one from the device would stall it."""
        if not math.isfinite(value):
            # All processes are here, and the one that speaks may not be the one whose rows the target overflowed on.
            faults = self.accelerator.reduce((~self._target_is_finite).float(), "sum")
            why = not_finite(self.source.target) if faults else "start another run with a smaller learning_rate"
            raise UserError(
                f"{what} became {value} by step {self.progress.global_step}; the checkpoints in {self.folder} "
                f"are kept; {why}"
            )

    def save(self) -> None:
        """Let a thread of the first process write a checkpoint, and delete old ones."""
        progress = self.progress
        # Reduced, so that all processes raise or none: the others would wait for it.
        sums = self.accelerator.reduce(self.since_log, "sum")
        if sums:
            self._refuse_unless_finite("the loss", sums["objective"][0].item())
        largest = torch.stack([weight.detach().abs().max() for weight in self.head.parameters()]).max()
        self._refuse_unless_finite("a weight", largest.item())
        progress.since_log = {name: [total.tolist(), count.tolist()] for name, (total, count) in sums.items()}
        progress.schedule = self.schedule.state_dict()
        random = gather_object([[module.get_rng_state() for module in self._generators()]])
        if isinstance(self.optimizer, ShardedAdam):
            self.optimizer.consolidate_state_dict()
        if not self.accelerator.is_main_process:
            return
        folder, text = self.folder / f"checkpoint-{progress.global_step}", json.dumps(dataclasses.asdict(progress))
        kept = self.stage.save_total_limit, progress.best_global_step, progress.global_step
        self.checkpoints.wait()  # for the one before, so that there is one copy at a time
        # Copies, which the next steps do not change.
        state = self.head.state_dict(), self.optimizer.state_dict()
        weights, moments = recursively_apply(lambda tensor: tensor.to("cpu", copy=True), state)

        def write() -> None:
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            with reporting_full_disk(folder), new_folder(folder) as scratch:
                self.head.save_pretrained(scratch, state_dict=weights)
                torch.save(moments, scratch / _MOMENTS)
                torch.save(random, scratch / _RANDOM)
                write_text(scratch / STATE, text)
                write_manifest(scratch)
            rotate(self.folder, *kept)

        self.checkpoints.write(write)

    def resume(self, folder: Path, progress: Progress) -> None:
        """Continue from a checkpoint and its progress; any number of processes may have written it."""
        self.progress = progress
        self.head.load_state_dict(load_file(folder / "model.safetensors"))
        # All processes of a machine share a mapped file's pages. On a CPU the moments would stay in an old file.
        moments = torch.load(folder / _MOMENTS, map_location="cpu", mmap=self.device.type != "cpu", weights_only=True)
        self.optimizer.load_state_dict(moments)
        self.schedule.load_state_dict(progress.schedule)
        # The first process has the sums, and the others begin at 0.
        own = float(self.accelerator.is_main_process)
        for name, (total, count) in progress.since_log.items():
            pair = (own * torch.tensor(x, dtype=torch.float64, device=self.device) for x in (total, count))
            self.since_log[name] = tuple(pair)  # type: ignore[assignment]
        saved = torch.load(folder / _RANDOM, weights_only=True)
        for state, module in zip(saved[self.accelerator.process_index % len(saved)], self._generators(), strict=False):
            module.set_rng_state(state)

    def _generators(self) -> list[Any]:
        """Return the modules of torch whose generators a head may read, as with dropout."""
        return [torch] if self.device.type == "cpu" else [torch, torch.get_device_module(self.device)]


def _optimizer(head: Speculator, stage: StageConfig, sharded: bool) -> Optimizer:
    """Return AdamW, or `sharded` among the processes, or with Muon, as a stage's settings say."""
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    groups: list[dict[str, list[Tensor] | float]] = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": stage.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    whole = AdamW(groups, lr=stage.learning_rate, betas=(0.9, 0.95), fused=True)
    if stage.optimizer == "muon":
        return MuonAndAdamW(whole, head)
    return ShardedAdam(whole) if sharded else whole
