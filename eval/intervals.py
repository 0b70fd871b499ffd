"""Figures of samples with their 95% intervals. `ReportRow.samples` says which numbers a sample has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from scipy import stats

from speculator.report import Interval

Sample = TypeVar("Sample")
_RESAMPLES = 2000


def paired_bootstrap(samples: Sequence[Sample], statistic: Callable[[Sequence[Sample]], float]) -> Interval:
    """Return a statistic of the samples with its 95% interval.

    A single sample has no bounds. One sample holds all measurements of one prompt or conversation, so the
    decoders that are compared stay paired.

    The interval is value +- t s sqrt(n / (n - 1)), with the bootstrap's standard error s, and t of n - 1 degrees of
    freedom. It has its nominal error from two samples on, where the bootstrap's percentiles are far too narrow: of two
    equal heads they call the second one faster in 24% of the cases at n = 2, and in 8% at n = 5.
    """
    value, count = statistic(samples), len(samples)
    if count == 1:
        return Interval(value)
    # Resample the indices of prompts, not the figures: each draw takes both decoders' time on the same prompts, so what
    # makes a prompt slow for both cancels out.
    found = stats.bootstrap(
        (np.arange(count),),
        lambda chosen: statistic([samples[i] for i in chosen]),
        n_resamples=_RESAMPLES,
        vectorized=False,
        method="percentile",
        rng=0,
    )
    # Resampling divides by n where the variance of a mean divides by n - 1.
    reach = float(stats.t.ppf(0.975, count - 1) * found.standard_error * math.sqrt(count / (count - 1)))
    return Interval(value, value - reach, value + reach)


def difference(a: Interval, b: Interval) -> Interval:
    """Return the difference b - a of two independent figures; it has no bounds if one of them has none.

    low = (b - a) - sqrt((b - b_low)^2 + (a_high - a)^2), and high with the other bounds.
    """
    value = b.value - a.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Interval(value)
    # Squares of the distances to the bounds add up as variances do; A's upper bound makes the difference small.
    reach = math.hypot(b.value - b.low, a.high - a.value), math.hypot(b.high - b.value, a.value - a.low)
    return Interval(value, value - reach[0], value + reach[1])


def ratio(chosen: Iterable[Sequence[float]]) -> float:
    """Return the ratio of the speeds of some samples, (tokens, seconds, tokens of the baseline, its seconds, ...).

    It is a ratio of sums, so long texts weigh more than short ones, as they do in serving.
    """
    tokens, seconds, baseline_tokens, baseline_seconds, *_ = map(math.fsum, zip(*chosen, strict=True))
    return (tokens / seconds) / (baseline_tokens / baseline_seconds)


def length(chosen: Iterable[Sequence[float]]) -> float:
    """Return the acceptance length of some samples, (..., accepted draft tokens, steps), which have steps."""
    *_, accepted, steps = map(math.fsum, zip(*chosen, strict=True))
    return (accepted + steps) / steps


def paired_difference(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], figure: Callable[[Iterable[Sequence[float]]], float]
) -> Interval:
    """Return the figure of B less that of A, given the samples (A, B) of each prompt."""
    return paired_bootstrap(pairs, lambda chosen: figure(y for _, y in chosen) - figure(x for x, _ in chosen))
