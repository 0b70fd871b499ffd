"""A plain step, a draft and a verification at a published shape with random weights.

Both steps are compared with the time that this machine needs to read their bytes once (all weights and the live keys
and values), at the bandwidth of a large copy. Draft cost c and verify cost v are measured as in every report.
"""

from __future__ import annotations

import math

import torch

from benchmarks.shapes import step_bytes
from speculator import HeadDrafter, Sampling, Target
from speculator.drafters.measure import interquartile_mean, measure_costs, paired_steps
from speculator.heads import Speculator

_BLOCK = 5  # steps


def measure_steps(
    target: Target, head: Speculator, length: int, rows: int, context: int, blocks: int, rate: float
) -> dict:
    """Measure chains of `length` for `rows` sequences of `context` tokens; `rate` is in bytes per second."""
    torch.manual_seed(0)
    prompts = torch.randint(target.vocab_size, (rows, context)).tolist()
    steps = paired_steps(target, HeadDrafter(head, length), prompts, Sampling(), blocks * _BLOCK)
    (entry,) = measure_costs(target, None, (), [(rows, True)], math.inf)
    step, decode = interquartile_mean(b / a for a, b in steps), interquartile_mean(a for a, _ in steps)
    v = min(step, entry.of(0, length * rows, False))
    c = (step - v) / length
    # Random weights reject nearly every draft, so rows grow by about one token per step while they are measured.
    live = context + blocks * _BLOCK // 2
    plain, wide = (step_bytes(target, rows, live + width) / rate for width in (1, 1 + length))
    return {
        "decode_seconds": decode,
        "decode_over_bound": decode / plain,
        "verify_seconds": v * decode,
        "verify_over_bound": v * decode / wide,
        "draft_over_decode": c,
        "verify_over_decode": v,
    }
