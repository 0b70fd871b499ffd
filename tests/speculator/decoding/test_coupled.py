"""Coupled sampling: with Gumbel noise by (seed, position, token) the sampled text is the plain one, whatever drafts."""

from collections import Counter
from itertools import product

import pytest
import torch
from conftest import tiny_model
from enumeration import chi_square_p

from speculator import Candidates, Chain, FixedTree, Sampling, Target, Tree, generate
from speculator.decoding.draft import Draft
from speculator.decoding.drafter import LogitsSource, LookupPaths
from speculator.decoding.sampling import (
    _GAMMA,
    _GUMBEL,
    Noise,
    RowSampling,
    _gumbel_of,
    _mix,
    gumbel,
    random_bits,
    uniforms,
)
from speculator.decoding.verify import match
from speculator.drafters.adaptive import PathOrDraft

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1], [3, 3, 4]]
SIZE, CHUNK = 16, 100_000
SHAPES = {
    "chain": Chain(2),
    "likeliest": Chain(2, sampled=False),
    "candidates": Candidates((2, 1)),
    "fixed tree": FixedTree([(0,), (1,), (0, 0), (1, 0)]),
    "best-first tree": Tree((3, 2), nodes=5),
    "path or draft": PathOrDraft(3, Chain(2)),
}


def test_the_noise_is_gumbel_and_differs_by_seed_position_and_token():
    noise = gumbel(torch.arange(1000), torch.arange(1000) % 7, 1000)
    u = noise.double().neg().exp().neg().exp()  # uniform in (0, 1)
    counts = (u.flatten() * 100).long().bincount(minlength=100)
    assert chi_square_p(Counter(dict(enumerate(counts.tolist()))), dict.fromkeys(range(100), 0.01), u.numel()) > 1e-4
    same_seed = gumbel(torch.zeros(1000, dtype=torch.long), torch.arange(1000), 1000).double()
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (same_seed[1:], same_seed[:-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 5e-3


def test_the_noise_of_a_token_depends_on_nothing_else():
    alone = gumbel(torch.tensor([7]), torch.tensor([30]), 50)
    among = gumbel(torch.tensor([1, 7, -2]), torch.tensor([5, 30, 9]), 80)
    assert torch.equal(among[1:2, :50], alone)


def test_no_two_rows_have_the_same_noise():
    """By keys of 32 bits some ten of 300,000 rows would."""
    noise = gumbel(torch.arange(300_000), torch.zeros(300_000, dtype=torch.long), 4)
    assert len(noise.unique(dim=0)) == len(noise)


@pytest.mark.parametrize("rows", [250_000, pytest.param(500_000, marks=pytest.mark.soak)])
def test_rare_tokens_are_as_frequent_as_they_should_be(rows):
    """Probabilities of 1e-4 to 1e-7 beside one near 1."""
    rare = torch.tensor([1e-4, 1e-5, 1e-6, 1e-7]).repeat_interleave(200)
    probs = torch.cat([1 - rare.sum()[None], rare])
    counts, chunk = torch.zeros(len(probs), dtype=torch.long), 1000  # a chunk fits a CPU's cache
    for start in range(0, rows, chunk):
        noise = gumbel(torch.arange(start, start + chunk), torch.full((chunk,), 3), len(probs))
        counts += (probs.log() + noise).argmax(-1).bincount(minlength=len(probs))
    for p, seen in zip((1e-4, 1e-5, 1e-6, 1e-7), counts[1:].view(4, 200).sum(1).tolist(), strict=True):
        expected = 200 * p * rows
        assert abs(seen - expected) < 4 * expected**0.5, p


def hashed(x: int, second: int, bits: int) -> int:
    """The hash of `random_bits`, in Python's integers of any even number of bits."""
    half, size = bits // 2, 1 << bits
    x = ((x ^ x >> half) * 2146121005 + second) % size
    x = (x ^ x >> half - 1) * -2073254261 % size
    x = (x ^ x >> half) * 739982445 % size
    return (x ^ (x - size * (2 * x >= size)) >> half - 1) % (size // 2)  # this shift copies the sign bit


@pytest.mark.parametrize("bits", [6, 8, 10])
def test_over_all_keys_every_number_is_equally_likely(bits):
    for second in range(0, 1 << bits, 7):
        counts = Counter(hashed(first, second, bits) for first in range(1 << bits))
        assert set(counts.values()) == {2}
        assert len(counts) == 1 << bits - 1


def test_the_noise_is_this_hash_in_32_bits():
    """The two keys of a row are the halves of its 64-bit hash."""
    seeds, positions = torch.tensor([0, 1, -5, 2**62]), torch.tensor([3, 0, 77, 2**20])
    keys = _mix(_mix(seeds + _GUMBEL) + positions * _GAMMA).tolist()
    expected = [
        [hashed((key - 1640531527 * token) % 2**32, (key >> 32) % 2**32, 32) for token in range(100)] for key in keys
    ]
    assert random_bits(seeds, positions, 100).tolist() == expected


def test_numbers_of_different_rows_are_equal_as_often_as_by_chance():
    """4,096 pairs of 2^22 numbers of 31 bits. Rounds that are two to one gave 9,534."""
    bits = random_bits(torch.arange(64), torch.arange(64), 2**16)
    counts = bits.flatten().unique(return_counts=True)[1]
    assert abs((counts * (counts - 1) // 2).sum() - 4096) < 5 * 4096**0.5


@pytest.mark.soak
def test_all_numbers_below_a_probability_of_a_millionth_occur():
    """Rounds that are two to one left out 47.7% of them."""
    cells, rows, size = 2147, 2**12, 2**17
    counts = torch.zeros(cells, dtype=torch.long)
    for start in range(0, rows, 8):
        bits = random_bits(torch.arange(start, start + 8), torch.full((8,), 5), size)
        counts += bits[bits < cells].bincount(minlength=cells)
    expected = rows * size / 2**31
    statistic = (counts - expected).square().sum().item() / expected
    assert abs(statistic / cells - 1) < 5 * ((2 + 1 / expected) / cells) ** 0.5


def test_the_noise_is_finite_at_both_ends():
    """A uniform of 0 or 1 would make it infinite."""
    noise = _gumbel_of(torch.tensor([0, 1, 2**30, 2**31 - 1], dtype=torch.int32))
    assert noise.isfinite().all()
    assert (noise.diff() < 0).all()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
def test_the_noise_does_not_depend_on_torchs_default_dtype(default):
    """Rounded to bfloat16, one token in 500 would never be sampled; to float16, nearly none would."""
    bits = torch.tensor([0, 1, 2**30, 2**31 - 1], dtype=torch.int32)
    expected = _gumbel_of(bits)
    torch.set_default_dtype(default)
    try:
        found = _gumbel_of(bits)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


# ---- the shapes, over many rows


class Chained(LogitsSource):
    """A source whose distribution of the next token depends on the last one alone."""

    def __init__(self, table):
        self.logits = table.log()

    def first(self, pending, texts):
        return self.logits[pending][:, None]

    def next(self, level, tokens, parents):
        return self.logits[tokens]


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(SIZE + 1, SIZE, generator=generator).softmax(-1) for _ in range(2))
    return p, q


def paths(p: torch.Tensor, q: torch.Tensor) -> list[list[int]]:
    """Lookup paths of the likeliest tokens of either table, each also cut."""
    likely = torch.stack([p.argmax(-1), q.argmax(-1)], 1).tolist()
    found: list[list[int]] = []
    for kinds in product(range(2), repeat=3):
        path = [SIZE]
        for which in kinds:
            path.append(likely[path[-1]][which])
        found += [path[1 : 1 + length] for length in range(4)]
    return found


def rows_of(settings: Sampling, seeds: torch.Tensor) -> RowSampling:
    sampling = RowSampling([settings], torch.device("cpu")).of_tokens(torch.zeros_like(seeds))
    sampling.seeds = seeds
    return sampling


def steps(
    shape, settings: Sampling, seeds: torch.Tensor, kind: type[Noise], perfect: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tokens of every row: of a step, and of a plain one after it where that gave only one; how many it gave.

    A `perfect` source has the target's own distribution.
    """
    p, q = tables()
    q = p if perfect else q
    rows, found = len(seeds), paths(p, q)
    sampling = rows_of(settings, seeds)
    root = torch.full((rows,), SIZE)
    at = torch.full((rows,), 10)
    source = Chained(q)
    if isinstance(shape, PathOrDraft):
        source.paths = LookupPaths(3).open(rows, torch.device("cpu"))
        source.paths.put([found[i % len(found)] for i in range(rows)])
    noise = kind(sampling, at, SIZE, shape.depth, coupled=True)
    draft = shape.draft(source, root, noise, [])
    last, following = match(noise.samples(p.log()[torch.cat([root[:, None], draft.tokens], 1)], draft), draft)
    path = torch.cat([root[:, None], draft.tokens], 1).gather(1, draft.path(last))[:, 1:]
    path = torch.nn.functional.pad(path, (0, 1))
    kept = draft.depths.gather(1, last[:, None])[:, 0]
    first = torch.where(kept > 0, path[:, 0], following)
    plain = plainly(p, first, kind(sampling, at + 1, SIZE, 0, coupled=True))
    second = torch.where(kept > 1, path[:, 1], torch.where(kept == 1, following, plain))
    return torch.stack([first, second], 1), kept


def plainly(p: torch.Tensor, before: torch.Tensor, noise: Noise) -> torch.Tensor:
    return noise.samples(p.log()[before][:, None], Draft.none(before))[:, 0]


def plain_pairs(settings: Sampling, seeds: torch.Tensor) -> torch.Tensor:
    p, _ = tables()
    sampling = rows_of(settings, seeds)
    tokens = [torch.full((len(seeds),), SIZE)]
    for i in range(2):
        tokens.append(plainly(p, tokens[-1], Noise(sampling, torch.full((len(seeds),), 10 + i), SIZE, 0, coupled=True)))
    return torch.stack(tokens[1:], 1)


def fit(pairs: torch.Tensor, settings: Sampling) -> float:
    p, _ = tables()
    probs = settings.probs(p.log()).double()
    joint = (probs[SIZE][:, None] * probs[:SIZE]).flatten()
    counts = torch.bincount(pairs[:, 0] * SIZE + pairs[:, 1], minlength=SIZE * SIZE)
    return chi_square_p(Counter(dict(enumerate(counts.tolist()))), dict(enumerate(joint.tolist())), len(pairs))


SETTINGS = [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.2, top_k=5, min_p=0.05)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_plain_tokens_follow_the_target(settings):
    assert fit(plain_pairs(settings, torch.arange(CHUNK)), settings) > 1e-4


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_step_gives_the_plain_tokens(name, settings):
    seeds = torch.arange(CHUNK // 4)
    pairs, kept = steps(SHAPES[name], settings, seeds, Noise)
    assert torch.equal(pairs, plain_pairs(settings, seeds))
    assert len(kept.unique()) > 1 or name == "likeliest"


def test_coupled_candidates_accept_what_the_theory_says():
    """sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) for one candidate (2408.07978), more with a second one."""
    p, q = (table[SIZE].double() for table in tables())
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(-1)
    kept = [
        (steps(FixedTree(nodes), Sampling(1.0), torch.arange(CHUNK), Noise)[1] > 0).double().mean().item()
        for nodes in ([(0,)], [(0,), (1,)])
    ]
    assert kept[0] == pytest.approx((1 / ratios).sum().item(), abs=0.01)
    assert kept[1] > kept[0] + 0.05


@pytest.mark.parametrize(
    "shape", [Chain(2), Candidates((1, 1)), FixedTree([(0,), (0, 0)])], ids=["chain", "candidates", "fixed tree"]
)
def test_all_tokens_of_a_perfect_source_are_accepted(shape):
    """Each depth has the noise of its own position, in the draft as in the target."""
    _, kept = steps(shape, Sampling(0.8, top_p=0.9), torch.arange(1000), Noise, perfect=True)
    assert (kept == 2).all()


# ---- known-wrong variants


class ByPlaceInTheDraft(Noise):
    """Noise of the place in the draft, not in the sequence: the next step uses the same."""

    def __init__(self, sampling, positions, *settings, **named):
        super().__init__(sampling, torch.zeros_like(positions), *settings, **named)


class BeforeTheFilters(Noise):
    """Temperature and filters act on logits that already hold the noise."""

    def samples(self, logits, draft, unpadded=None):
        noise = torch.stack([self._level(depth) for depth in range(logits.shape[1])], 1)
        return self.sampling.scaled(logits + noise).argmax(-1)


class OneSeed(Noise):
    """Every row has the same seed."""

    def __init__(self, sampling, *settings, **named):
        seeds, sampling.seeds = sampling.seeds, torch.zeros_like(sampling.seeds)
        super().__init__(sampling, *settings, **named)
        sampling.seeds = seeds


@pytest.mark.parametrize("wrong", [ByPlaceInTheDraft, BeforeTheFilters, OneSeed])
def test_samples_of_wrong_noise_fail_the_goodness_of_fit_test(wrong):
    settings = Sampling(0.5, top_k=4)
    chain = Chain(1)
    assert fit(steps(chain, settings, torch.arange(CHUNK), Noise)[0], settings) > 1e-4
    assert fit(steps(chain, settings, torch.arange(CHUNK), wrong)[0], settings) < 1e-6


def test_noise_that_depends_on_the_draft_gives_another_text():
    """The target's own tokens must not know how deep the draft goes."""

    class OfTheDraft(Noise):
        def __init__(self, sampling, positions, size, depth, coupled):
            super().__init__(sampling, positions + depth, size, depth, coupled)

    seeds = torch.arange(1000)
    pairs, _ = steps(Chain(2), Sampling(1.0), seeds, OfTheDraft)
    assert not torch.equal(pairs, plain_pairs(Sampling(1.0), seeds))


@pytest.mark.parametrize("shared", [False, True], ids=["own noise", "shared noise"])
def test_shared_noise_under_rejection_sampling_is_wrong(shared):
    """vLLM's fault: after a refusal, the residual is sampled with the noise that drew the draft."""
    p, q = (table[SIZE] for table in tables())
    seeds, zeros = torch.arange(4 * CHUNK), torch.zeros(4 * CHUNK, dtype=torch.long)
    drawn = (q.log() + gumbel(seeds, zeros, SIZE)).argmax(-1)
    refused = uniforms(seeds, zeros, 1)[:, 0] * q[drawn] >= p[drawn]
    again = ((p - q).clamp_min(0).log() + gumbel(seeds, zeros if shared else zeros + 1, SIZE)).argmax(-1)
    tokens = torch.where(refused, again, drawn)
    counts = Counter(dict(enumerate(tokens.bincount(minlength=SIZE).tolist())))
    fits = chi_square_p(counts, dict(enumerate(p.tolist())), len(tokens))
    assert fits < 1e-6 if shared else fits > 1e-4


# ---- engines


def test_a_text_in_two_parts_equals_the_whole():
    """The noise belongs to the position: what was said, given as a prompt, is continued by the same tokens."""
    target, sampling = Target(tiny_model(scale=2.0).double(), None), Sampling(1.0, seed=11)
    whole = generate(target, None, [PROMPTS[0]], sampling, max_new_tokens=30).tokens[0]
    rest = generate(target, None, [PROMPTS[0] + whole[:12]], sampling, max_new_tokens=18).tokens[0]
    assert rest == whole[12:]
