"""Fingerprint of a target: recognises the model that a head was trained for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from speculator.errors import refuse
from speculator.target.loading import decoder_config
from speculator.target.sharding import whole

_SAMPLES = 8  # weights per matrix
_OF_FILES = ("_name_or_path", "transformers_version")  # in a config, about its files
_PIECE = 4096  # bytes
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
_CORRELATION = 0.95
"""Least correlation of a quantised copy's samples with the original's. With 4 bits it is 0.98 or more; of unrelated
matrices, 1 in 5,000 reaches 0.95."""


def fingerprint(model: Any) -> str:
    """Return sizes and a few weights (bfloat16) as a string; path, dtype, device and library versions don't matter."""
    config = decoder_config(model)
    matrices = [part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part]
    offloaded = any(matrix.is_meta for matrix in matrices)
    refuse(
        (
            offloaded,
            f"{config.name_or_path}: its embedding or output matrix does not fit the GPUs: use more or larger ones",
        )
    )
    samples = []
    for matrix in map(whole, matrices):
        rows, columns = sample_indices(*matrix.shape)
        samples += _bits(matrix[rows.to(matrix.device), columns.to(matrix.device)])
    # PEFT names its parameters after the adapter.
    if added := [weight for name, weight in sorted(model.named_parameters()) if "default" in name.split(".")]:
        # One weight, the middle one, of every `step`-th tensor: 28 tensors give 7 samples, at 0, 4, 8, ...
        step = -(-len(added) // _SAMPLES)
        samples += _bits(torch.stack([weight.flatten()[weight.numel() // 2] for weight in added[::step]]))
    facts = (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size)
    return "-".join(map(str, facts)) + ":" + _written(samples)


def digest(model: Any) -> str:
    """Return a hash of all weights and of the configs of model and adapter, some seconds for each ten gigabytes.

    It tells models apart that have one `fingerprint`: a fine-tune of the inner layers, a quantised copy that keeps the
    two matrices, another rope. The path has no influence.
    """
    adapters = {name: config.to_dict() for name, config in getattr(model, "peft_config", {}).items()}
    config = {name: value for name, value in model.config.to_dict().items() if name not in _OF_FILES}
    facts = json.dumps([config, adapters], sort_keys=True, default=_written_value)
    return _with_weights(facts, model)


def digest_of_weights(model: Any) -> str:
    """Return a hash of all weights, in the dtype and under the names that the libraries give them."""
    return _with_weights("", model)


def digest_of_files(name: str) -> str | None:
    """Return a hash of names, sizes and pieces of a local model's weight files; None for one on the hub.

    257 pieces of 4 kB tell any layer of a fine-tune, in a moment.

    Args:
        name: name of a target, such as "FOLDER --adapter FOLDER".
    """
    places = [Path(part.partition(" --")[0]) for part in name.split(" --adapter ")]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.glob("*")))]
    files = [file for file in files if file.suffix in _WEIGHTS]
    found = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for place in range(257):  # from the first piece to the last
                stream.seek(max(0, size - _PIECE) * place // 256)
                found.update(stream.read(_PIECE))
    return found.hexdigest() if files else None


def _with_weights(facts: str, model: Any) -> str:
    found = hashlib.sha256(facts.encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)}".encode())
        if not tensor.is_meta:  # offloaded weights are
            found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _written_value(value: Any) -> Any:
    """Return a value of a config for JSON. Sets, which PEFT has, get an order that is the same in all processes."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _written(samples: list[int]) -> str:
    return "".join(f"{value & 0xFFFF:04x}" for value in samples)


def sample_indices(rows: int, columns: int) -> tuple[Tensor, Tensor]:  # [8], [8]
    """Return the row and the column of each sampled weight of a matrix [rows, columns]."""
    # Spread over the matrix by a large multiplier, a prime, which has no factor in common with the matrix's size.
    indices = torch.arange(1, _SAMPLES + 1) * 2654435761 % (rows * columns)
    return indices // columns, indices % columns


def _bits(values: Tensor) -> list[int]:  # [n] -> the bits of n bfloat16 numbers, as int16
    # The 16 bits of each bfloat16 number, as a signed integer; `fingerprint` writes them as 4 hexadecimal digits.
    return values.to(torch.bfloat16).view(torch.int16).tolist()


def same_target(one: str, other: str) -> bool:
    """Return whether two fingerprints share sizes and 3/4 of the samples: rounding or more training changes some."""
    pairs = _pairs(one, other)
    return bool(pairs) and 4 * sum(a == b for a, b in pairs) >= 3 * len(pairs)


def has_matrix(
    recorded: str,
    which: Literal["embedding", "output"],
    samples: Tensor,  # [8] weights at `sample_indices`
    quantised: bool = False,
) -> bool:
    """Return whether the target with the fingerprint `recorded` has the matrix that `samples` are from.

    With `quantised`, one of the two matrices may be a quantised copy of the other.
    """
    facts, _, known = recorded.partition(":")
    first = 4 * _SAMPLES * (which == "output")
    pair = f"{facts}:{known[first : first + 4 * _SAMPLES]}", f"{facts}:{_written(_bits(samples))}"
    return similar_target(*pair) if quantised else same_target(*pair)


def similar_target(one: str, other: str) -> bool:
    """Return whether the weights of two fingerprints differ at most as those of a model and its quantised copy do.

    Both must have the same sizes, and the samples of each matrix must be highly correlated. A row of the embedding
    belongs to a token, so another tokenizer breaks the correlation.
    """
    if not (pairs := _pairs(one, other)) or same_target(one, other):
        return bool(pairs)
    values = torch.tensor(pairs).to(torch.int16).view(torch.bfloat16).float().T  # [2, samples]
    return all(torch.corrcoef(matrix)[0, 1] > _CORRELATION for matrix in values.split(_SAMPLES, dim=1))


def _pairs(one: str, other: str) -> list[tuple[int, int]]:
    """Return the samples of two fingerprints, 16 bits each, in pairs; [] if sizes or numbers of samples differ."""
    (facts, samples), (other_facts, other_samples) = one.partition(":")[::2], other.partition(":")[::2]
    if facts != other_facts or len(samples) != len(other_samples):
        return []
    return [(int(samples[i : i + 4], 16), int(other_samples[i : i + 4], 16)) for i in range(0, len(samples), 4)]
