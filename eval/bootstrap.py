"""Intervals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Sample = TypeVar("Sample")
_RESAMPLES = 2000


def paired_bootstrap(samples: Sequence[Sample], statistic: Callable[[Sequence[Sample]], float]) -> dict[str, float]:
    """The statistic of the samples, with its 95% interval over resamples of them.

    A sample holds all that was measured on one prompt or batch, so what is compared stays paired.
    """
    generator = random.Random(0)
    resampled = sorted(statistic(generator.choices(samples, k=len(samples))) for _ in range(_RESAMPLES))
    low, high = resampled[int(0.025 * _RESAMPLES)], resampled[int(0.975 * _RESAMPLES) - 1]
    return {"value": statistic(samples), "low": low, "high": high}
