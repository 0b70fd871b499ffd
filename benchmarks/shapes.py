"""Models of published shapes with random weights, and the machine's limits: memory bandwidth and matrix rate.

The cost of a step depends on shapes only. Acceptance depends on the weights, so it is never measured here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from speculator.device import resolve_device, synchronize
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig, Speculator
from speculator.target.model import Target


@dataclass(frozen=True)
class Preset:
    """Shapes of a target (arguments of LlamaConfig) and its head (arguments of MLPSpeculatorConfig)."""

    target: dict[str, int]
    head: dict[str, Any]


def _preset(sizes: str, inner_dim: int, n_predict: int) -> Preset:
    """Return the shape of a Llama with these sizes, in the order of `_SIZES`, and of an untied head."""
    head = {"inner_dim": inner_dim, "n_predict": n_predict, "tie_weights": False, "scale_input": False}
    return Preset(dict(zip(_SIZES, map(int, sizes.split()), strict=True)), head)


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("num_key_value_heads", "max_position_embeddings")
PRESETS = {
    "llama-3-8b": _preset("128256 4096 14336 32 32 8 8192", inner_dim=3072, n_predict=4),
    "tiny": _preset("512 64 128 2 4 2 1024", inner_dim=32, n_predict=3),
}


def random_target(name: str) -> Target:
    """Create a target of a preset's shape in bfloat16, directly on the device."""
    config = LlamaConfig(**PRESETS[name].target, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config.name_or_path = f"{name}, random weights"
    torch.manual_seed(0)
    with resolve_device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Target(model, tokenizer=None)  # type: ignore[arg-type]


def random_head(target: Target, shape: dict[str, Any]) -> Speculator:
    """Create a head for a target directly on its device."""
    config = MLPSpeculatorConfig(vocab_size=target.vocab_size, emb_dim=target.hidden_size, **shape)
    with target.device:
        return MLPSpeculator._from_config(config, dtype=torch.bfloat16)


def step_bytes(target: Target, rows: int, live: int) -> int:
    """Bytes that a forward pass must read: every weight once, states, and keys and values of `live` positions per row.

    An embedding table that is not tied to the output matrix does not count: only a few of its rows are read.
    """
    model, cache = target.model, target.cache(1, 1)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert isinstance(embedding, nn.Parameter)
    if embedding is not output:
        weights -= embedding.nbytes
    position = sum(stack[:, 0, :, 0].nbytes for stack in cache.stacks.values())
    states = sum(state.nbytes for layer in cache.recurrent.values() for state in layer.states)
    return weights + rows * (states + live * position)


def bandwidth() -> float:
    """Bytes per second of a large copy on the device, counting reads and writes."""
    device = resolve_device()
    source = torch.ones(2**32 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: copy.copy_(source))


def matrix_rate() -> float:
    """Floating-point operations per second of a large product of random bfloat16 matrices on the device."""
    device = resolve_device()
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: a @ b)


def median_seconds(work: Callable[[], Any]) -> float:
    """Median time of repeated calls after a warm-up."""
    times = []
    for _ in range(12):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])
