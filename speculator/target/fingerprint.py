"""Fingerprint of a target: recognises the model that a head was trained for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speculator.target.sharding import whole

_SAMPLES = 8  # weights per matrix


def fingerprint(model: Any) -> str:
    """Combine sizes from the config with a few weights of the embedding, the output matrix and an adapter.

    Weights are rounded to bfloat16. Path, dtype, device and library versions have no influence.
    """
    config = model.config.get_text_config()
    matrices = [part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part]
    samples = []
    for matrix in map(whole, matrices):
        # Spread over the matrix by a multiplier without a common factor with its size.
        places = torch.arange(1, _SAMPLES + 1) * 2654435761 % matrix.numel()
        rows, columns = places // matrix.shape[1], places % matrix.shape[1]
        samples += _bits(matrix[rows.to(matrix.device), columns.to(matrix.device)])
    # PEFT names its parameters after the adapter.
    if added := [weight for name, weight in sorted(model.named_parameters()) if "default" in name.split(".")]:
        step = -(-len(added) // _SAMPLES)
        samples += _bits(torch.stack([weight.flatten()[weight.numel() // 2] for weight in added[::step]]))
    facts = (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size)
    return "-".join(map(str, facts)) + ":" + "".join(f"{value & 0xFFFF:04x}" for value in samples)


def _bits(values: Tensor) -> list[int]:
    return values.to(torch.bfloat16).view(torch.int16).tolist()


def same_target(one: str, other: str) -> bool:
    """Compare two fingerprints; up to a quarter of the samples may differ, by rounding or a little more training."""
    (facts, samples), (other_facts, other_samples) = one.partition(":")[::2], other.partition(":")[::2]
    pairs = [(samples[i : i + 4], other_samples[i : i + 4]) for i in range(0, len(samples), 4)]
    equal = sum(a == b for a, b in pairs)
    return facts == other_facts and len(samples) == len(other_samples) and 4 * equal >= 3 * len(pairs)
