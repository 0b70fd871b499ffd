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
from scipy.optimize import brentq
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig

from speculator.device import resolve_device, synchronize
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig, Speculator
from speculator.target.model import Target


@dataclass(frozen=True)
class Preset:
    """Shapes of a target (arguments of its config class) and its head (arguments of MLPSpeculatorConfig).

    `acceptance_length` is a published figure for projections, with its source, of drafts of `drafted` tokens.
    """

    target: dict[str, Any]
    head: dict[str, Any]
    acceptance_length: float
    drafted: int
    source: str
    config_class: type[PreTrainedConfig] = LlamaConfig

    def length_at(self, drafted: int) -> float:
        """Return the acceptance length of longer or shorter drafts, if all positions have the same acceptance rate."""

        def length(rate: float, tokens: int) -> float:
            return sum(rate**i for i in range(tokens + 1))

        rate = brentq(lambda rate: length(rate, self.drafted) - self.acceptance_length, 0, 1)
        return length(rate, drafted)


NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def llama(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, key_heads: int, context: int
) -> dict[str, int]:
    """Arguments of LlamaConfig."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": context,
    }


def _untied(inner_dim: int, n_predict: int) -> dict[str, Any]:
    return {"inner_dim": inner_dim, "n_predict": n_predict, "tie_weights": False, "scale_input": False}


_SMOLLM2 = llama(49_152, 576, 1536, 30, 9, 3, 8192)
_MEASURED = "docs/lab/smollm2/eval-mlp-1: an MLP head that drafts 3 tokens, 26 prompts of Spec-Bench, temperature 0"
_LINEAR_ATTENTION = {"linear_num_key_heads": 9, "linear_num_value_heads": 9}
_LINEAR_ATTENTION |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
PRESETS = {
    "llama-3-8b": Preset(
        llama(128_256, 4096, 14_336, 32, 32, 8, 8192),
        _untied(3072, 4),
        acceptance_length=2.43,
        drafted=6,
        source="arXiv 2602.23881: an MLP head that drafts 6 tokens for Llama 3.1 8B, KL loss, temperature 0",
    ),
    "llama-2-13b": Preset(
        llama(32_000, 5120, 13_824, 40, 40, 40, 4096),
        _untied(4096, 3),
        acceptance_length=3.03,
        drafted=3,
        source="the authors of 2404.19124 in fms-extras #7: LLaMA 7B, 100 tokens in 33 steps, one prompt, greedy",
    ),
    "smollm2-135m": Preset(_SMOLLM2, _untied(576, 8), acceptance_length=1.31, drafted=3, source=_MEASURED),
    "smollm2-135m-hybrid": Preset(  # linear attention in three of four layers
        target=_SMOLLM2 | _LINEAR_ATTENTION,
        head=_untied(576, 8),
        acceptance_length=1.31,
        drafted=3,
        source=_MEASURED,
        config_class=Qwen3_5TextConfig,
    ),
    "tiny": Preset(
        llama(512, 64, 128, 2, 4, 2, 1024),
        _untied(32, 3),
        acceptance_length=2.0,
        drafted=3,
        source="made up for tests",
    ),
}


def random_target(name: str, dtype: torch.dtype = torch.bfloat16) -> Target:
    """Create a target of a preset's shape directly on the device and in its dtype."""
    preset = PRESETS[name]
    config = preset.config_class(**preset.target, **NO_ENDS)
    config.name_or_path = f"{name}, random weights"
    return of_random_weights(config, dtype, resolve_device())


def of_random_weights(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Target:
    """Create a target from any config directly on the device."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target(model, tokenizer=None)  # type: ignore[arg-type]


def random_head(target: Target, shape: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Speculator:
    """Create a head for a target directly on its device."""
    config = MLPSpeculatorConfig(vocab_size=target.vocab_size, emb_dim=target.hidden_size, **shape)
    with target.device:
        return MLPSpeculator._from_config(config, dtype=dtype)


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


def draft_bytes(head: MLPSpeculator, length: int) -> float:
    """Bytes that a drafted token must read, averaged over a chain of `length`."""
    steps = [head.proj[min(i, len(head.proj) - 1)].weight.nbytes + head.output(i).weight.nbytes for i in range(length)]
    return sum(steps) / length


def bandwidth() -> float:
    """Bytes per second of a large copy on the device, counting reads and writes."""
    device = resolve_device()
    source = torch.ones(2**32 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: copy.copy_(source))


def matrix_rate(dtype: torch.dtype = torch.bfloat16) -> float:
    """Floating-point operations per second of a large product of random matrices on the device."""
    device = resolve_device()
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: a @ b)


def median_seconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Median time of repeated calls after a warm-up."""
    times = []
    for _ in range(repeats + 2):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])
