"""Above temperature 0: is a seed's text the same with drafts and without, and is its distribution?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from scipy import stats

from eval.checks import Check
from eval.greedy_check import compare_completions, gaps, transformers_greedy
from eval.metrics import drafted_share
from eval.recording import RecordingEngine
from speculator import Drafter, Generation, Sampling, Target, generate
from speculator.decoding.engine import Engine
from speculator.decoding.sampling import Noise, RowSampling
from speculator.terminal import Progress

_ALPHA = 1e-3  # probability that a lossless run fails, over all its tests together
_TOKENS = 3  # tokens per completion; the prefill samples the first, so the two after it are tested
_BATCH = 128
_MAX_PROBABILITIES = 2**26  # in all distributions of one verification
_MIN_EXPECTED = 5  # expected count of a cell
_BUCKETS = 16

Pair = tuple[int, int]


def sampled_checks(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    temperatures: list[float],
    samples: int,
    rule: str | None = None,
    seed: int = 0,
    families: int = 1,
) -> list[Check]:
    """Test for each temperature and prompt whether completions have the same distribution with drafts and without.

    Each check is a chi-square test of `samples` short completions with drafts and as many without.

    Args:
        rule: accept rule (default: the drafter's own).
        families: how often this function is called for one verdict, whose chance of a false alarm is divided.
    """
    cases = [(temperature, number) for temperature in temperatures for number in range(len(prompts))]
    batch = batch_size(target, drafter, samples)
    # One engine for each sample, so that a prompt is prefilled once for all its batches.
    engines = [Engine(target, who, slots=batch, rule=rule if who else None) for who in (drafter, None)]
    # Bonferroni: with many prompts one of them would fail by chance.
    alpha, checks = _ALPHA / families / len(cases), []
    for case, (temperature, number) in enumerate(Progress(cases, title="sampling", unit="prompts")):
        # The seeds of the samples are 2**32 apart, so no two rows share a random stream.
        drafted, plain = (
            _completions(engine, prompts[number], Sampling(temperature, seed=seed + (2 * case + i) * 2**32), samples)
            for i, engine in enumerate(engines)
        )
        statistic, degrees, p = homogeneity(
            *([(row[1], row[2]) for row in r.tokens[:samples]] for r in (drafted, plain))
        )
        figures = {
            "samples": samples,
            "chi_square": statistic,
            "degrees_of_freedom": degrees,
            "p": p,
            "alpha": alpha,
            "detectable": detectable(degrees + 1, samples),
            "drafted_share": drafted_share([drafted], skip=1),
        }
        name = f"distribution after prompt {number + 1}"
        summary = f"chi-square {statistic:.1f}, {degrees} df"
        checks.append(
            Check(
                name=name,
                temperature=temperature,
                sample=f"2 x {samples} rows",
                statistic=summary,
                result=f"p = {p:.2g}",
                passed=p >= alpha,
                figures=figures,
            )
        )
    return checks


def batch_size(target: Target, drafter: Drafter, samples: int) -> int:
    """Return the number of completions that are sampled together."""
    # A row of a step has the distributions of nodes + 1 positions in memory.
    return max(1, min(_BATCH, samples, _MAX_PROBABILITIES // ((drafter.nodes + 1) * target.vocab_size)))


@torch.no_grad()
def coupled_checks(
    target: Target, drafter: Drafter, prompts: list[list[int]], temperatures: list[float], count: int, seed: int = 0
) -> list[Check]:
    """Under `match`: compare completions drafted one by one, and all in one batch, with those of plain decoding.

    Each has at most `count` tokens. They may differ after a near-tie of the two best scores (see `_scores`). The
    tolerance is 4 times the rounding error of the first prompt's greedy completion, over the temperature.
    """
    _, _, rounding = transformers_greedy(target, prompts[0], count, drafter.nodes + 1)
    checks = []
    for temperature in temperatures:
        drafted, plain, score_gaps, generations = [], [], [], []
        samplings = [Sampling(temperature, seed=seed + number) for number in range(len(prompts))]
        rows = zip(prompts, samplings, strict=True)
        for prompt, sampling in Progress(
            rows, title=f"temperature {temperature:g}", unit="prompts", total=len(prompts)
        ):
            recorder = RecordingEngine(target, None)
            generations.append(generate(target, drafter, [prompt], sampling, max_new_tokens=count).check())
            drafted += generations[-1].tokens
            plain.append(recorder.decode(prompt, sampling, max_new_tokens=count).tokens)
            score_gaps.append(gaps(_scores(recorder.logits, sampling, len(target.text(prompt)))))
        together = generate(target, drafter, prompts, samplings, max_new_tokens=count).check()
        for name, made in (("text", drafted), ("text in a batch", together.tokens)):
            check = compare_completions(
                f"{name} against plain decoding", made, plain, score_gaps, 4 * rounding / temperature, temperature
            )
            check.figures["drafted_share"] = drafted_share(generations, skip=0)
            checks.append(check)
    return checks


def _scores(logits: torch.Tensor, sampling: Sampling, start: int) -> torch.Tensor:  # [S, V] -> [S, V]
    """Return the scores (scaled logits plus noise) whose maximum the target chose as its tokens under `match`.

    `start` is the number of the prompt's tokens: row i of the logits chose the token at position `start` + i.
    """
    # The noise of position `start` + i belongs to row i: the first new token follows a prompt of `start` tokens.
    begin = torch.tensor([start], device=logits.device)
    noise = Noise(RowSampling([sampling], logits.device), begin, logits.shape[-1], len(logits) - 1, coupled=True)
    return torch.cat([noise.scores(row[None, None], depth)[0] for depth, row in enumerate(logits)])


def _completions(engine: Engine, prompt: list[int], sampling: Sampling, count: int) -> Generation:
    """Return at least `count` short completions of one prompt, in full batches, each with its own random stream."""
    # Row r of a batch has the seed `seed + r`, so the next batch begins `batch` seeds later.
    rows, batch = Generation([], []), len(engine.scheduler.slots)
    for start in range(0, count, batch):
        seeded = replace(sampling, seed=sampling.seed + start)
        generation = engine.generate([prompt] * batch, seeded, max_new_tokens=_TOKENS, eos_token_ids=()).check()
        rows.tokens += generation.tokens
        rows.steps += generation.steps
    return rows


def homogeneity(first: Sequence[Pair], second: Sequence[Pair]) -> tuple[float, int, float]:
    """Return (statistic, degrees of freedom, p-value) of a chi-square test that two samples share a distribution."""
    cells = _cells(Counter(first), Counter(second))
    if len(cells) < 2:  # a distribution with one outcome
        return 0.0, 0, 1.0
    found = stats.chi2_contingency(cells, correction=False)
    return float(found.statistic), int(found.dof), float(found.pvalue)


def _cells(ours: Counter[Pair], theirs: Counter[Pair]) -> list[list[int]]:
    """Return [ours, theirs], the counts of both samples, in each cell; all cells are large enough for the test.

    A frequent pair is a cell. A rare one joins rare pairs with the same first or the same second token, chosen by its
    hash, so that a wrong distribution of either token shows. The remainder is grouped by hash alone. Merging depends on
    the pooled counts only, so p-values stay valid.
    """
    # A cell is expected to have its share of the smaller sample: with equal samples of n, twice the least expected
    # count.
    least = _MIN_EXPECTED * (ours.total() + theirs.total()) / min(ours.total(), theirs.total())
    coarser: list[Callable[[Pair], Hashable]] = [
        lambda pair: pair,
        lambda pair: ("first", pair[0]) if _hash(pair) % 2 else ("second", pair[1]),
        lambda pair: ("hash", _hash(pair) % _BUCKETS),
        lambda pair: "rest",
    ]
    cells: dict[Hashable, list[int]] = {}
    left = ours + theirs
    # From fine to coarse: each round takes the pairs that are frequent enough under its key, and leaves the others.
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
    if cells:  # too few pairs are left for a cell of their own
        smallest = min(cells.values(), key=sum)
        smallest[0] += sum(ours[pair] for pair in left)
        smallest[1] += sum(theirs[pair] for pair in left)
    return list(cells.values())


def _hash(pair: Pair) -> int:
    return hash(pair) >> 8  # hashes of integers are the same in every process


def detectable(cells: int, samples: int) -> float:
    """Return the total variation, spread evenly over the cells, that a test of 2 x `samples` detects 99 times in 100.

    At a level of 1e-4 this takes a noncentrality of 30 + 8.7 sqrt(cells), within 2% from 8 to 600 cells. A relative
    deviation d of every cell gives a noncentrality of 2 samples d^2.
    """
    return min(1.0, math.sqrt((30 + 8.7 * math.sqrt(cells)) / (2 * samples)))
