"""Intervals."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Sample = TypeVar("Sample")
_RESAMPLES = 2000


def paired_bootstrap(samples: Sequence[Sample], statistic: Callable[[Sequence[Sample]], float]) -> dict[str, Any]:
    """The statistic of the samples, with its 95% interval over resamples of them; None for bounds of a lone sample.

    A sample holds all that was measured on one prompt or batch, so what is compared stays paired.
    """
    if len(samples) == 1:
        return {"value": statistic(samples), "low": None, "high": None}
    generator = random.Random(0)
    resampled = sorted(statistic(generator.choices(samples, k=len(samples))) for _ in range(_RESAMPLES))
    low, high = resampled[int(0.025 * _RESAMPLES)], resampled[int(0.975 * _RESAMPLES) - 1]
    return {"value": statistic(samples), "low": low, "high": high}


def shown(interval: Mapping[str, Any], form: str = ".2f") -> str:
    """An interval as a reader sees it: "1.32 (1.28 to 1.36)"; a lone prompt has none."""
    if interval["low"] is None:
        return f"{interval['value']:{form}} (one prompt)"
    return f"{interval['value']:{form}} ({interval['low']:{form}} to {interval['high']:{form}})"
