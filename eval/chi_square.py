"""Two samples of short continuations, with drafts and without: do they follow one distribution?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from tqdm import tqdm

from eval.metrics import drafted_share
from speculator import Drafter, Generation, Sampling, Target
from speculator.decoding.engine import Engine

_ALPHA = 1e-3  # that a lossless run fails by chance, all its tests together
_TOKENS = 3  # the prefill gives the first, whoever drafts: the two after it are tested
_BATCH = 128
_MOST_PROBABILITIES = 2**26  # of all distributions in one verify pass
_LEAST_EXPECTED = 5
_BUCKETS = 16


def homogeneity(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> tuple[float, int, float]:
    """Do two samples of token pairs follow one distribution? Gives (chi-square, degrees of freedom, p-value).

    A pair has a cell of its own if it is frequent enough. A rare one shares a cell with others of the same first token,
    or of the same second one, as its hash says, so that a wrong distribution of either shows; what is still rare goes
    by its hash alone. Merging looks at the two samples pooled: it knows nothing of how they differ, and p keeps its
    meaning."""
    ours, theirs = Counter(first), Counter(second)
    least = _LEAST_EXPECTED * (len(first) + len(second)) / min(len(first), len(second))
    coarser: list[Callable[[tuple[int, int]], Hashable]] = [
        lambda pair: pair,
        lambda pair: ("first", pair[0]) if _hash(pair) % 2 else ("second", pair[1]),
        lambda pair: ("hash", _hash(pair) % _BUCKETS),
        lambda pair: "rest",
    ]
    cells: dict[Hashable, list[int]] = {}
    left = ours + theirs
    for key in coarser:
        sizes: Counter[Hashable] = Counter()
        for pair, count in left.items():
            sizes[key(pair)] += count
        for pair in list(left):
            if sizes[key(pair)] >= least:
                cell = cells.setdefault(key(pair), [0, 0])
                cell[0] += ours[pair]
                cell[1] += theirs[pair]
                del left[pair]
    if cells:  # what is left is too little for a cell
        smallest = min(cells.values(), key=sum)
        smallest[0] += sum(ours[pair] for pair in left)
        smallest[1] += sum(theirs[pair] for pair in left)
    degrees = len(cells) - 1
    if degrees < 1:  # a distribution of one outcome
        return 0.0, 0, 1.0
    seen = torch.tensor(list(cells.values()), dtype=torch.float64)
    expected = seen.sum(1, keepdim=True) * seen.sum(0) / seen.sum()
    statistic = ((seen - expected) ** 2 / expected).sum()
    p = torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), statistic / 2)
    return statistic.item(), degrees, p.item()


def _hash(pair: tuple[int, int]) -> int:
    return hash(pair) >> 8  # of integers, so the same in every process


def detectable(cells: int, samples: int) -> float:
    """Total variation, spread evenly over the cells, that a test of two such samples sees 99 times in 100.

    The noncentrality that it takes at a level of 1e-4 is 30 + 8.7 sqrt(cells), within 2% from 8 to 600 cells; a
    deviation of d in every cell's share gives 2 samples d^2.
    """
    return min(1.0, math.sqrt((30 + 8.7 * math.sqrt(cells)) / (2 * samples)))


def sampled_twice(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    temperatures: list[float],
    samples: int,
    rule: str | None,
    seed: int,
) -> Iterator[tuple[float, int, dict[str, float]]]:
    """For each temperature and prompt, `samples` continuations with drafts and as many others without are compared.

    Gives:
        temperature, number of the prompt, and the test's figures; `alpha` is the p-value below which it fails.

    Raises:
        UserError: the rule does not fit the drafter.
    """
    cases = [(temperature, number) for temperature in temperatures for number in range(len(prompts))]
    batch = max(1, min(_BATCH, samples, _MOST_PROBABILITIES // ((drafter.nodes + 1) * target.vocab_size)))
    # A prompt is processed once for all its batches.
    engines = [Engine(target, who, slots=batch, rule=rule if who else None) for who in (drafter, None)]
    for case, (temperature, number) in enumerate(tqdm(cases, desc="sampling", unit="prompt")):
        # 2**32 streams for each sample: no two rows of the run share one.
        drafted, plain = (
            _continuations(engine, prompts[number], Sampling(temperature, seed=seed + (2 * case + i) * 2**32), samples)
            for i, engine in enumerate(engines)
        )
        statistic, degrees, p = homogeneity(*([tuple(row[1:]) for row in r.tokens[:samples]] for r in (drafted, plain)))
        yield (
            temperature,
            number,
            {
                "samples": samples,
                "chi_square": statistic,
                "degrees_of_freedom": degrees,
                "p": p,
                "alpha": _ALPHA / len(cases),
                "detectable": detectable(degrees + 1, samples),
                "drafted_share": drafted_share([drafted], skip=1),
            },
        )


def _continuations(engine: Engine, prompt: list[int], sampling: Sampling, count: int) -> Generation:
    """At least `count` short continuations of one prompt, each from a stream of its own, in whole batches."""
    rows, batch = Generation([], []), len(engine.scheduler.slots)
    for start in range(0, count, batch):
        own = replace(sampling, seed=sampling.seed + start)
        generation = engine.generate([prompt] * batch, own, max_new_tokens=_TOKENS, eos_token_ids=())
        rows.tokens += generation.tokens
        rows.steps += generation.steps
    return rows
