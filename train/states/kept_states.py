"""The target's states of training text, kept in files, so that later passes over it need no forward pass."""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.packing import Columns
from speculator.device import exact
from speculator.errors import UserError
from speculator.files import make_cache_folder, write_bytes
from speculator.kernels.compiled import Compiled
from speculator.tables import gigabytes
from speculator.target.fingerprint import digest
from speculator.target.in_process import InProcessTarget
from train.losses import chunk_tokens, compiling_pays
from train.states.batch import DOCUMENTS, Batch, Documents, StateSource, TargetStates

Tensors: TypeAlias = dict[str, Tensor]
"""A document's part of `TargetStates`, by name."""


def normaliser(logits: Tensor) -> Tensor:  # [C, V] -> [C]
    return exact(logits).logsumexp(-1)


class KeptStates(StateSource):
    """Computes what the target says about documents, and keeps it: one file each, in a folder of this target and head.

    No document sees another one, so other runs on the same documents read the same files, however rows are packed.
    Delete the cache's folder `states` when no run needs them.

    Args:
        target: the target, whole in this process; each process computes its own rows' states.
        normalisers: keep the `TargetStates.normalisers`. With them a head with a draft vocabulary needs no logits of
            other tokens.

    Attributes:
        folder: the files' folder in the cache, which is made.
    """

    reads_documents = True
    target: InProcessTarget

    def __init__(self, target: InProcessTarget, aux_layers: Sequence[int], normalisers: bool):
        super().__init__(target, aux_layers)
        self.normalisers = normalisers
        identity = json.dumps([digest(target.model), str(target.dtype), self.aux_layers, normalisers])
        self.folder = make_cache_folder(f"states/{hashlib.sha256(identity.encode()).hexdigest()[:16]}")
        # Compiled, it is one pass over the logits in place of three: six times as fast on a core with AVX-512.
        pays = compiling_pays(target.device, target.vocab_size)
        self.normaliser = Compiled(normaliser, "the normalisers") if pays else normaliser

    def take(self, inputs: Batch) -> TargetStates:
        """Return the states of a batch; what has no readable file is computed and written first."""
        rows = self._files(inputs[DOCUMENTS])
        found = {file: tensors for row in rows for file, _ in row if (tensors := self._read(file))}
        if any(file not in found for row in rows for file, _ in row):
            found |= self._compute(inputs, rows, found)
        length = inputs["input_ids"].shape[1]

        def joined(name: str) -> Tensor:  # [B, L, ...]
            values = pad_sequence([torch.cat([found[file][name] for file, _ in row]) for row in rows], batch_first=True)
            padding = values.new_zeros(len(rows), length - values.shape[1], *values.shape[2:])
            return torch.cat([values, padding], 1)

        hidden = joined("hidden")
        states = joined("states") if self.aux_layers else hidden
        return TargetStates(hidden, states, joined("normalisers") if self.normalisers else None)

    def _files(self, documents: Documents) -> list[list[tuple[Path, int]]]:
        """Return the file and the number of tokens of each document, row by row; their content names the files."""

        def file(tokens: Sequence[int]) -> Path:
            return self.folder / f"{hashlib.sha256(array('q', tokens).tobytes()).hexdigest()[:32]}.safetensors"

        return [[(file(tokens), len(tokens)) for tokens in row] for row in documents.rows]

    def _read(self, file: Path) -> Tensors | None:
        """Return the tensors of a document; None if there is no file, or a damaged one."""
        try:
            return load_file(file, str(self.target.device))
        except (FileNotFoundError, SafetensorError):
            return None

    def _compute(
        self, inputs: Batch, rows: list[list[tuple[Path, int]]], found: dict[Path, Tensors]
    ) -> dict[Path, Tensors]:
        """Compute the states of a batch; write and return those of its documents that `found` lacks."""
        # The whole batch, even if a kill left files of some of it: a state's last bits depend on the batch.
        hidden, states = self.target.training_states(inputs["input_ids"], inputs["document_ids"], self.aux_layers)
        made: dict[Path, Tensors] = {}
        for i, row in enumerate(rows):
            start = 0
            for file, length in row:
                span = i, slice(start, start + length)
                start += length
                if file in found:
                    continue
                made[file] = tensors = {"hidden": hidden[span]}
                if self.aux_layers:
                    tensors["states"] = states[span]
                if self.normalisers:
                    tensors["normalisers"] = self._normalisers(hidden[span])
                if tensors["hidden"].isfinite().all():  # else the run ends, and another one computes them again
                    write_bytes(file, save({name: x.cpu().contiguous() for name, x in tensors.items()}))
        return made

    @torch.no_grad()
    def _normalisers(self, hidden: Tensor) -> Tensor:  # [S, D] -> [S]
        chunks = hidden.split(chunk_tokens(hidden.device.type, self.target.vocab_size))
        return torch.cat([self.normaliser(self.target.logits(chunk)) for chunk in chunks])

    def lacking(self, rows: Iterable[Columns]) -> int:
        """Return the number of tokens in the documents of some rows that have no file."""
        named = (self._files(Documents([row])) for row in rows)
        return sum({file: length for (row,) in named for file, length in row if not file.exists()}.values())

    def check_room(self, setting: str, tokens: float) -> None:
        """Raise a UserError, which names `setting`, if the disk has no room for so many tokens."""
        per_token = bytes_per_token(self.target.hidden_size, self.aux_layers, self.target.dtype, self.normalisers)
        need, free = per_token * tokens, shutil.disk_usage(self.folder).free
        if need > free:
            raise UserError(
                f"{setting} needs {gigabytes(need)} GB in {self.folder}, whose disk has {gigabytes(free)} free; set "
                "SPECULATOR_CACHE to a folder with more room, or leave the setting out"
            )


def bytes_per_token(hidden_size: int, aux_layers: Sequence[int], dtype: torch.dtype, normalisers: bool) -> int:
    """Return the bytes of a token's states in their file."""
    return (1 + len(aux_layers)) * hidden_size * dtype.itemsize + 4 * normalisers
