"""The interval covers what it should, and keeps what belongs together."""

import random
import statistics

import pytest

from eval.bootstrap import paired_bootstrap


def test_the_interval_is_that_of_a_mean():
    """Of 400 normal samples: the mean give or take 1.96 standard errors."""
    generator = random.Random(1)
    samples = [generator.gauss(5, 2) for _ in range(400)]
    error = 1.96 * statistics.stdev(samples) / 20
    interval = paired_bootstrap(samples, statistics.fmean)
    assert interval["value"] == statistics.fmean(samples)
    assert interval["low"] == pytest.approx(interval["value"] - error, abs=0.1 * error)
    assert interval["high"] == pytest.approx(interval["value"] + error, abs=0.1 * error)


def test_pairs_stay_together():
    """Prompts differ a hundredfold, the two decoders always by a factor of 2: nothing is uncertain."""
    samples = [(2.0 * 10**k, 10.0**k) for k in (0, 1, 2) for _ in range(5)]
    interval = paired_bootstrap(samples, lambda pairs: sum(a for a, _ in pairs) / sum(b for _, b in pairs))
    assert interval == {"value": 2.0, "low": 2.0, "high": 2.0}
