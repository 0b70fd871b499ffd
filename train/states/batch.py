"""Batches of rows, and where the target's states of them come from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil
from typing import Any, Final, NamedTuple, TypedDict
from zlib import crc32

import torch
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader

from data.packing import Columns
from speculator.device import has_accelerator
from speculator.heads import SpeculatorConfig
from speculator.target.base import TrainingTarget
from speculator.target.remote.server_target import split
from train.interrupts import Background

_LOADERS = 2
"""Data-loading processes per process with a GPU; a CPU has no core to spare."""
DOCUMENTS: Final = "documents"
REQUEST: Final = "request"
NOT_TARGETS = ("input_ids", "document_ids", DOCUMENTS, REQUEST)
"""Columns of a batch that are not the head's training targets."""


class Batch(TypedDict, total=False):
    """A batch of B rows, padded to L tokens, and the head's training targets: further tensors, which the head names."""

    input_ids: Tensor  # [B, L]
    document_ids: Tensor  # [B, L]
    labels: Tensor  # [B, ...]
    documents: Documents  # the rows without padding, if servers run the target or its states are kept
    request: Any  # what a `StateSource` has asked for ahead


class Documents:
    """The documents of a batch's rows, each a list of tokens without padding; no loader moves them to a device."""

    def __init__(self, rows: list[Columns]):
        tokens = [row["input_ids"] for row in rows]
        numbers = [row.get("document_ids") or [0] * len(row["input_ids"]) for row in rows]
        self.rows = [split(*pair) for pair in zip(tokens, numbers, strict=True)]


class Collator:
    """Pads rows to tensors and adds the head's training targets, among them `labels`.

    Rows have "input_ids", and may have "loss_mask" and "document_ids". Padding is on the right, where causal attention
    hides it and the loss mask excludes it. A batch has "input_ids" and "document_ids" [B, L], the targets by name and,
    if configured, `DOCUMENTS`.

    Args:
        documents: add the `Documents`, which servers read and `KeptStates` looks up.
        multiple: batches are padded to a multiple of this length, so that a GPU sees few shapes, up to `longest`.

    Attributes:
        epoch: number of times that the rows were read before.
    """

    def __init__(
        self,
        config: SpeculatorConfig,
        documents: bool = False,
        multiple: int = 1,
        longest: int = 0,
    ):
        self.config, self.documents = config, documents
        self.multiple, self.longest = multiple, longest
        self.epoch = 0

    def __call__(self, rows: list[Columns]) -> Batch:
        # A row too short for one label is padded, not dropped: every process must have the same number of rows.
        length = max(self.config.min_training_length, *(len(row["input_ids"]) for row in rows))
        # Not beyond the longest row: it fits the target's context.
        length = max(length, min(ceil(length / self.multiple) * self.multiple, self.longest))

        def column(name: str, default: int) -> Tensor:  # [B, L]
            lists = [row.get(name) or [default] * len(row["input_ids"]) for row in rows]
            return torch.tensor([values + [0] * (length - len(values)) for values in lists])

        input_ids, documents = column("input_ids", 0), column("document_ids", 0)
        # For heads that draw their training positions. By a row's own tokens, so that a seed depends neither on the
        # batch nor on where a run was resumed.
        seeds = [crc32(array("q", [self.epoch, *row["input_ids"]])) for row in rows]
        targets = self.config.training_targets(input_ids, documents, column("loss_mask", 1), seeds)
        batch: Batch = {"input_ids": input_ids, "document_ids": documents, **targets}  # type: ignore[typeddict-item]
        if self.documents:
            batch[DOCUMENTS] = Documents(rows)
        return batch


@dataclass(frozen=True)
class StageRows:
    """The rows of a stage.

    Attributes:
        train: rows to train on, in an order of their own in each epoch, by `seed`.
        collate: makes batches of them.
        validation: rows of an evaluation, as many as fill batches of `evaluation_batch` on all processes; None: there
            are no evaluations, and no planned checkpoints.
    """

    train: Any
    collate: Collator
    seed: int = 0
    validation: Any = None
    evaluation_batch: int = 8

    def loaders(self, size: int, device: torch.device) -> tuple[DataLoaderShard, DataLoaderShard | None]:
        """Return loaders of this process's batches on the device, for training with `size` rows, and for evaluations.

        The batches are dealt out to the processes in turn; rows from the start fill up the last ones.
        """

        def loader(rows: Any, size: int, collate: Collator, seed: int | None = None) -> DataLoaderShard:
            plain: DataLoader = DataLoader(
                rows,
                size,
                shuffle=seed is not None,
                collate_fn=collate,
                num_workers=_LOADERS if has_accelerator() else 0,
                pin_memory=has_accelerator(),
                # Its own, so that reading rows draws nothing from the generator that a head's dropout reads.
                generator=torch.Generator(),
            )
            shuffled = seed is not None
            return prepare_data_loader(  # type: ignore[return-value]
                plain, device, put_on_device=True, use_seedable_sampler=shuffled, data_seed=seed
            )

        # With another collator: an evaluation has the same training positions in every epoch.
        evaluated = (
            None if self.validation is None else loader(self.validation, self.evaluation_batch, copy(self.collate))
        )
        return loader(self.train, size, self.collate, self.seed), evaluated


class TargetStates(NamedTuple):
    """Tensors that the frozen target computes for a batch of B rows of L tokens; 0 for padding.

    Attributes:
        hidden: [B, L, D] hidden states after the final norm.
        states: [B, L, nD] those of n auxiliary layers, side by side; `hidden` without such layers.
        normalisers: [B, L] logsumexp of each hidden state's logits, float32; None if they are not kept.
    """

    hidden: Tensor
    states: Tensor
    normalisers: Tensor | None = None


class StateSource:
    """Gives the target's states of batches, those of `aux_layers` too; this one computes them in this process.

    Attributes:
        files: the thread for the files of states, if they are kept.
    """

    reads_documents = False
    """True if batches need their `Documents`."""

    def __init__(self, target: TrainingTarget, aux_layers: Sequence[int]):
        self.target, self.aux_layers = target, tuple(aux_layers)
        self.files = Background()

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches for `take`, which may be asked for ahead."""
        return iter(batches)

    def take(self, batch: Batch) -> TargetStates:
        """Return the states of a batch, on the device and in the target's dtype."""
        found = self.target.training_states(batch["input_ids"], batch["document_ids"], self.aux_layers)
        return TargetStates(*found)

    def figures(self) -> dict[str, float]:
        """Return figures for the training log since the last call."""
        return {}
