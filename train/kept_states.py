"""The target's states of training rows, kept in files, so that later passes over the rows need no forward pass."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from data.packing import Columns
from speculator.device import exact
from speculator.errors import UserError
from speculator.files import cache_folder, make_folder, write_bytes
from speculator.tables import gigabytes
from speculator.target.fingerprint import digest
from speculator.target.in_process import InProcessTarget
from train.look_ahead import ROWS, SOURCES, Batch, Row
from train.losses import chunk_tokens


class TargetStates(NamedTuple):
    """What the frozen target computes for a batch of B rows of L tokens.

    Attributes:
        hidden: [B, L, D] hidden states after the final norm.
        states: [B, L, nD] those of n auxiliary layers, side by side; `hidden` without such layers.
        normalisers: [B, L] logsumexp of each hidden state's logits, float32; None if they are not kept.
    """

    hidden: Tensor
    states: Tensor
    normalisers: Tensor | None


class KeptStates:
    """Computes what the target says about rows, and keeps it: one file a row, in a folder of this target and head.

    Other runs on the same rows read the same files. Delete the cache's folder `states` when no run needs them.

    Args:
        target: the target, whole in this process; each process computes its own rows' states.
        aux_layers: auxiliary layers whose states the head reads.
        normalisers: keep the `TargetStates.normalisers`. With them a head with a draft vocabulary needs no logits of
            other tokens.

    Attributes:
        folder: the files' folder in the cache, which is made.
    """

    def __init__(self, target: InProcessTarget, aux_layers: Sequence[int], normalisers: bool):
        self.target, self.aux_layers, self.normalisers = target, tuple(aux_layers), normalisers
        identity = json.dumps([digest(target.model), str(target.dtype), self.aux_layers, normalisers])
        self.folder = cache_folder() / "states" / hashlib.sha256(identity.encode()).hexdigest()[:16]
        make_folder(self.folder)

    def take(self, inputs: Batch) -> TargetStates:
        """Return the states of a batch; those of rows without a readable file are computed and written first."""
        rows: list[Row] = inputs[ROWS]
        found = {row: tensors for row in rows if (tensors := self._read(row))}
        if len(found) < len(set(rows)):
            found |= self._compute(inputs, {row: i for i, row in enumerate(rows) if row not in found})
        length = inputs["input_ids"].shape[1]

        def padded(name: str) -> Tensor:  # [B, L, ...]
            values = [found[row][name] for row in rows]
            made = values[0].new_zeros(len(rows), length, *values[0].shape[1:])
            for i, value in enumerate(values):
                made[i, : len(value)] = value
            return made

        hidden = padded("hidden")
        states = padded("states") if self.aux_layers else hidden
        return TargetStates(hidden, states, padded("normalisers") if self.normalisers else None)

    def _file(self, row: Row) -> Path:
        return self.folder / f"{row.name}.safetensors"

    def _read(self, row: Row) -> dict[str, Tensor] | None:
        """Return the tensors of a row's file; None if there is none, or a damaged one."""
        try:
            return load_file(self._file(row), str(self.target.device))
        except (FileNotFoundError, SafetensorError):
            return None

    def _compute(self, inputs: Batch, missing: dict[Row, int]) -> dict[Row, dict[str, Tensor]]:
        """Compute and write the tensors of some rows of a batch."""
        # The whole batch, even if a kill left files of some of its rows: a state's last bits depend on the batch.
        hidden, states = self.target.training_states(
            inputs["input_ids"], inputs["document_ids"], self.aux_layers, inputs.get(SOURCES, ())
        )
        made = {}
        for row, i in missing.items():
            made[row] = {"hidden": hidden[i, : row.length]}
            if self.aux_layers:
                made[row]["states"] = states[i, : row.length]
            if self.normalisers:
                made[row]["normalisers"] = self._normalisers(hidden[i, : row.length])
            if made[row]["hidden"].isfinite().all():  # else the run ends, and another one computes them again
                write_bytes(self._file(row), save({name: x.cpu().contiguous() for name, x in made[row].items()}))
        return made

    @torch.no_grad()
    def _normalisers(self, hidden: Tensor) -> Tensor:  # [S, D] -> [S]
        chunks = hidden.split(chunk_tokens(hidden.device.type, self.target.vocab_size))
        return torch.cat([exact(self.target.logits(chunk)).logsumexp(-1) for chunk in chunks])

    def check_room(self, setting: str, rows: Iterable[Columns]) -> None:
        """Raise a UserError, which names `setting`, if the disk has no room for the files that rows lack."""
        per_token = bytes_per_token(self.target.hidden_size, self.aux_layers, self.target.dtype, self.normalisers)
        lacking = {row for columns in rows if not self._file(row := Row.of(columns)).exists()}
        need, free = per_token * sum(row.length for row in lacking), shutil.disk_usage(self.folder).free
        if need > free:
            raise UserError(
                f"{setting} needs {gigabytes(need)} GB in {self.folder}, whose disk has {gigabytes(free)} free; set "
                "SPECULATOR_CACHE to a folder with more room, or leave the setting out"
            )


def bytes_per_token(hidden_size: int, aux_layers: Sequence[int], dtype: torch.dtype, normalisers: bool) -> int:
    """Return the bytes of a token's states in their file."""
    return (1 + len(aux_layers)) * hidden_size * dtype.itemsize + 4 * normalisers
