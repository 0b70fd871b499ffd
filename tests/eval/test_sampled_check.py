"""P-values of the chi-square test are valid, and it detects the deviations that it claims to detect."""

import math
import random

import pytest
import torch

from eval.sampled_check import detectable, homogeneity


def test_chi_square_of_a_table_equals_one_by_hand():
    first, second = [(1, 1)] * 30 + [(2, 2)] * 70, [(1, 1)] * 50 + [(2, 2)] * 50
    statistic, degrees, p = homogeneity(first, second)
    assert (statistic, degrees) == (pytest.approx(25 / 3), 1)  # 2 (10^2 / 40 + 10^2 / 60)
    assert p == pytest.approx(math.erfc(math.sqrt(25 / 6)))  # one degree of freedom: a squared normal
    assert homogeneity([(1, 1)] * 9, [(1, 1)] * 9) == (0.0, 0, 1.0)


def pairs(count, generator, first, second):
    """Of tokens below `first` and `second`; a float draws the lower half of them that often."""

    def token(size, tilt):
        half = size // 2
        return generator.randrange(half) + half * (generator.random() >= tilt)

    return [(token(*first), token(*second)) for _ in range(count)]


@pytest.mark.parametrize("sizes", [(4, 4), (300, 300), (10**6, 10**6)])
def test_p_values_of_equal_distributions_are_uniform_however_rare_the_outcomes(sizes):
    generator = random.Random(0)
    wide, deep = ((size, 0.7) for size in sizes)
    p_values = [homogeneity(*(pairs(400, generator, wide, deep) for _ in range(2)))[2] for _ in range(200)]
    assert 0.4 < sum(p_values) / 200 < 0.6
    assert 4 <= sum(p < 0.1 for p in p_values) <= 38
    assert 4 <= sum(p > 0.9 for p in p_values) <= 38


@pytest.mark.parametrize("tilted", [0, 1])
@pytest.mark.parametrize("size", [4, 300])
def test_a_wrong_distribution_of_either_token_is_seen_though_every_pair_is_rare(size, tilted):
    generator = random.Random(0)
    fair, wrong = [(size, 0.5)] * 2, [(size, 0.5)] * 2
    wrong[tilted] = (size, 0.8)
    assert homogeneity(pairs(4000, generator, *fair), pairs(4000, generator, *wrong))[2] < 1e-6


def test_the_stated_detectable_deviation_is_detected():
    """16 equal cells, every second one too likely: at the stated deviation nearly all tests fail, at a third few."""
    generator = torch.Generator().manual_seed(0)
    samples, cells = 4000, 16
    even = torch.full((cells,), 1 / cells)

    def seen(deviation):
        probs = even * (1 + 2 * deviation * torch.tensor([1.0, -1.0]).repeat(cells // 2))
        draws = [[w.multinomial(samples, True, generator=generator).tolist() for w in (even, probs)] for _ in range(50)]
        return sum(homogeneity(*([(cell, 0) for cell in row] for row in pair))[2] < 1e-4 for pair in draws)

    assert seen(detectable(cells, samples)) >= 47
    assert seen(detectable(cells, samples) / 3) <= 10
