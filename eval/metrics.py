"""Acceptance, speed and their confidence intervals, and the rows of report.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, TypeVar

import numpy as np
from scipy import stats

from eval.decoders import Decoder, Measured
from eval.suites import Suite
from eval.timing import Timed
from speculator.decoding.request import Generation, Step
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name
from speculator.drafters import Drafter
from speculator.drafters.measure import interquartile_mean
from speculator.report import Bucket, Figures, Interval, ReportRow, Spread
from speculator.tables import BASELINES
from speculator.target.model import Target

Figure = TypeVar("Figure")
Sample = TypeVar("Sample")
_RESAMPLES = 2000


def paired_bootstrap(samples: Sequence[Sample], statistic: Callable[[Sequence[Sample]], float]) -> Interval:
    """Return {"value", "low", "high"}: a statistic of the samples and its 95% interval.

    A single sample has None for both bounds. One sample holds all measurements of one prompt or conversation, so the
    decoders that are compared stay paired.

    The interval is value +- t s sqrt(n / (n - 1)), with the bootstrap's standard error s, and t of n - 1 degrees of
    freedom. It has its nominal error from two samples on, where the bootstrap's percentiles are far too narrow: of two
    equal heads they call the second one faster in 24% of the cases at n = 2, and in 8% at n = 5.
    """
    value, count = statistic(samples), len(samples)
    if count == 1:
        return {"value": value, "low": None, "high": None}
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
    return {"value": value, "low": value - reach, "high": value + reach}


def speedup(ours: Timed, baseline: Timed, groups: Sequence[int] | None = None, whole: bool = False) -> Interval:
    """Return `ours` over `baseline` in tokens per second, as {"value", "low", "high"} with a 95% interval.

    Sequences that end with the prefill's token are left out; the ratio is 1 if there are no others.

    Args:
        ours, baseline: timings of the same batches in the same order.
        groups: conversation of each batch; the turns of a conversation are resampled together (default: each alone).
        whole: count the prefill and its tokens too.
    """
    samples = _conversations(ours, baseline, groups, whole)
    return paired_bootstrap(samples, _ratio) if samples else {"value": 1.0, "low": None, "high": None}


def _conversations(ours: Timed, baseline: Timed, groups: Sequence[int] | None, whole: bool) -> list[np.ndarray]:
    """Return (tokens, seconds, tokens of the baseline, its seconds) of each conversation that has decoded tokens."""
    sums: dict[int, np.ndarray] = {}
    for group, x, y in zip(groups or range(len(ours.batches)), ours.batches, baseline.batches, strict=True):
        batch = np.array([*x.counted(whole), *y.counted(whole), x.decoded and y.decoded])
        sums[group] = sums.get(group, 0) + batch
    return [total[:-1] for total in sums.values() if total[-1]]


def _ratio(chosen: Sequence[np.ndarray]) -> float:
    """Return the ratio of the speeds of some conversations of `_conversations`.

    It is a ratio of sums, so long texts weigh more than short ones, as they do in serving.
    """
    tokens, seconds, baseline_tokens, baseline_seconds = np.sum(chosen, axis=0).tolist()
    return (tokens / seconds) / (baseline_tokens / baseline_seconds)


def spread(ours: Timed, baseline: Timed, groups: Sequence[int]) -> Spread | None:
    """Return quantiles of the whole answers' speedup over conversations, and the share that got slower; None: no data.

    Arguments are those of `speedup`.
    """
    ratios = [_ratio([each]) for each in _conversations(ours, baseline, groups, whole=True)]
    if not ratios:
        return None
    p5, p50, p95 = np.quantile(ratios, [0.05, 0.5, 0.95]).tolist()
    return {"p5": p5, "p50": p50, "p95": p95, "slower": sum(ratio < 1 for ratio in ratios) / len(ratios)}


def acceptance(steps: Iterable[Step], num_speculative_tokens: int) -> Figures:
    """Return acceptance figures over the steps that neither EOS nor the length limit cut.

    "steps" is their number, "acceptance_length" is "accepted_per_step" + 1, and "undrafted_share" the share of steps
    without a draft. `acceptance_by_position[i]` is conditional on position i-1 having been accepted. A position that
    was not drafted counts as rejected. `accepted_lengths[n]` counts the steps that accepted n tokens.
    """
    whole = [step for step in steps if not step.cut]
    lengths = [0] * (num_speculative_tokens + 1)
    for step in whole:
        assert step.accepted <= step.drafted <= num_speculative_tokens
        assert step.emitted == step.accepted + 1
        lengths[step.accepted] += 1
    # Of 10 steps that accepted [0: 4, 1: 2, 2: 1, 3: 3] tokens, 10 reached position 0, 6 reached 1, and 4 reached 2.
    # The rates are 6/10, 4/6 and 3/4, and 1 + 0.6 + 0.4 + 0.3 is the acceptance length.
    reached = [sum(lengths[i:]) for i in range(num_speculative_tokens + 1)]  # steps that accepted at least i tokens
    rates = [reached[i + 1] / reached[i] if reached[i] else 0.0 for i in range(num_speculative_tokens)]
    mean = sum(step.accepted for step in whole) / len(whole) if whole else 0.0
    # The identity of the two definitions, asserted in every report: it fails if a step is counted on one side only.
    expected = sum(math.prod(rates[: i + 1]) for i in range(num_speculative_tokens))
    assert math.isclose(mean, expected, abs_tol=1e-9), "the acceptance rates do not add up to the acceptance length"
    return {
        "steps": len(whole),
        "acceptance_length": 1 + mean,
        "accepted_per_step": mean,
        "undrafted_share": sum(not step.drafted for step in whole) / len(whole) if whole else 0.0,
        "acceptance_by_position": rates,
        "accepted_lengths": lengths,
    }


def drafted_share(generations: Iterable[Generation], skip: int) -> float:
    """Return the share of the new tokens that are accepted draft tokens; the first `skip` of each row do not count."""
    accepted = count = 0
    for generation in generations:
        accepted += sum(min(step.accepted, step.emitted) for row in generation.steps for step in row)
        count += sum(len(row) - skip for row in generation.tokens)
    return accepted / max(count, 1)


def by_context(sequences: Iterable[tuple[int, list[Step]]], trained_length: int | None) -> list[Bucket]:
    """Return the acceptance length in buckets of the context length at the beginning of a step, whose bounds double.

    Each bucket is a dict with "from", "below", "steps", "acceptance_length" and "beyond_trained_length".

    Args:
        sequences: prompt length and steps of each sequence.
        trained_length: context length that the head was trained on; no bucket extends across it.
    """
    sums: dict[tuple[int, int], list[int]] = {}
    for prompt_length, steps in sequences:
        # A step of a text begins at its length so far: with 10 tokens of prompt, at 11, since the prefill gave one.
        length = prompt_length + 1
        for step in steps:
            if not step.cut:
                total = sums.setdefault(_bucket(length, trained_length), [0, 0])
                total[0] += step.accepted + 1
                total[1] += 1
            length += step.emitted
    return [
        {
            "from": low,
            "below": high,
            "steps": count,
            "acceptance_length": tokens / count,
            "beyond_trained_length": trained_length is not None and low >= trained_length,
        }
        for (low, high), (tokens, count) in sorted(sums.items())
    ]


def _bucket(length: int, edge: int | None) -> tuple[int, int]:
    """Return the bounds (first length, first length beyond) of a length's bucket: 0 to 64, 64 to 128, 128 to 256, ...

    The bucket around `edge` is split there.
    """
    # 100 has 7 bits, so its bucket ends at 2^7 = 128, and begins at 64.
    high = max(64, 1 << length.bit_length())
    low = high // 2 if high > 64 else 0
    if edge is not None and low < edge < high:
        return (low, edge) if length < edge else (edge, high)
    return low, high


def row(
    target: Target,
    decoder: Decoder,
    suite: Suite,
    sampling: Sampling,
    measured: Measured,
    max_new_tokens: int,
    batch_size: int,
    trained_length: int | None,
) -> ReportRow:
    """Return the row of one decoder in report.json; docs/reference/report.md explains the keys.

    Args:
        measured: the timings of the suite with this sampling and batch size.
        trained_length: context length that the head was trained on; None: unknown.
    """
    drafter, timed = decoder.drafter, measured.timed[decoder.key]
    rule = decoder.rule or (drafter.rules[0] if drafter else "plain")
    sequences = [pair for batch in timed.batches for pair in zip(batch.prompt_lengths, batch.steps, strict=True)]
    result: ReportRow = {
        "name": suite.name,
        "prompts": len(suite.prompts),
        "digest": suite.digest,
        "turns": sum(batch.prefill_tokens for batch in timed.batches),
        "left_out": {"prompts": suite.left_out, "turns": measured.turns_left_out},
        "chat": suite.chat,
        "temperature": sampling.temperature,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "cut": sum(row[-1] not in target.eos_token_ids for row in timed.tokens) if suite.chat else 0,
        "drafter": decoder.key.split()[0],
        "num_speculative_tokens": drafter.num_speculative_tokens if drafter else 0,
        "nodes": drafter.nodes if drafter else 0,
        "rule": "greedy" if sampling.greedy else rule,
        **_acceptance(timed, drafter, measured.conversations),
        "acceptance_by_context": by_context(sequences, trained_length if decoder.key.startswith("head") else None),
        **_speeds(measured, decoder),
        "time_to_first_token": _by_decoder(measured, decoder, lambda t: median(b.prefill_seconds for b in t.batches)),
        "peak_memory_bytes": _by_decoder(measured, decoder, lambda t: max(b.peak_memory for b in t.batches)),
    }
    if sampling.greedy and "hf_generate" in measured.timed:
        result["identical_to_greedy"] = {
            "identical": sum(a == b for a, b in zip(timed.tokens, measured.timed["hf_generate"].tokens, strict=True)),
            "of": len(timed.tokens),
            "dtype": dtype_name(target.dtype),
        }
    if drafter:
        result |= _prediction(measured, decoder, drafter, result["acceptance_length"])
    names = dict.fromkeys(measured.categories)
    if any(names):
        result["categories"] = [_category(name, decoder, measured.of_category(name)) for name in names]
    return result


def _prediction(measured: Measured, decoder: Decoder, drafter: Drafter, acceptance_length: float) -> ReportRow:
    """Return "cost" {"draft": c, "verify": v} in plain steps, "rows_busy" and "predicted_speedup".

    The prediction is E / (G c + v) (2211.17192, theorem 3.8) times "rows_busy", the share of busy rows relative to
    plain decoding: a batch runs until its slowest row ends. E is the acceptance length, and G the draft's length. A
    whole step is timed; v is what the target pays for the verified tokens by its cost entry, and the rest is drafting.
    """
    timed, entry, length = measured.timed[decoder.key], measured.verification, drafter.num_speculative_tokens
    assert entry is not None  # something drafts
    step = interquartile_mean(drafted / plain for plain, drafted in measured.steps[decoder.key])
    # A tree's steps say how deep they drafted; its tokens are verified whole.
    drafted = [each.drafted for batch in timed.batches for row in batch.steps for each in row]
    tokens = drafter.nodes / length * sum(drafted) / max(1, len(drafted))
    verify = min(step, entry.of(0, tokens * entry.rows, False))
    busy = rows_busy(timed) / rows_busy(measured.timed["none"])
    return {
        "cost": {"draft": (step - verify) / length, "verify": verify},
        "rows_busy": busy,
        "predicted_speedup": acceptance_length / step * busy,
    }


def rows_busy(timed: Timed) -> float:
    """Return the mean share of a batch's rows that still decode, over the steps until its slowest row ends.

    It is 1 if nothing was decoded.
    """
    # Rows of 10, 6 and 2 steps: 18 of 3 * 10 are busy. Drafts end some rows earlier than others.
    useful = sum(len(row) for batch in timed.batches for row in batch.steps)
    return useful / sum(len(batch.steps) * max(map(len, batch.steps)) for batch in timed.batches) if useful else 1.0


def _category(name: str, decoder: Decoder, part: Measured) -> Figures:
    """Return the figures of one category in a decoder's row; `part` are the timings of the category alone."""
    timed = part.timed[decoder.key]
    return {
        "name": name or "(none)",
        "turns": sum(batch.prefill_tokens for batch in timed.batches),
        **_acceptance(timed, decoder.drafter, part.conversations),
        **_speeds(part, decoder),
    }


def _acceptance(timed: Timed, drafter: Drafter | None, conversations: Sequence[int]) -> Figures:
    """Return the figures of `acceptance`, and "acceptance_length_interval" {"low", "high"} unless all steps were cut.

    The interval is over conversations; `conversations` has the number of each batch's conversation.
    """
    # Turns of a conversation depend on each other, so a conversation is one sample: its (tokens, steps) are added up.
    sums: dict[int, list[int]] = {}
    for number, batch in zip(conversations, timed.batches, strict=True):
        whole = [step.accepted + 1 for steps in batch.steps for step in steps if not step.cut]
        total = sums.setdefault(number, [0, 0])
        total[0] += sum(whole)
        total[1] += len(whole)
    samples = [total for total in sums.values() if total[1]]
    figures = acceptance(timed.steps, drafter.num_speculative_tokens if drafter else 0)
    if samples:
        interval = paired_bootstrap(samples, lambda some: sum(a for a, _ in some) / sum(b for _, b in some))
        figures["acceptance_length_interval"] = {"low": interval["low"], "high": interval["high"]}
    return figures


def _speeds(measured: Measured, decoder: Decoder) -> Figures:
    """Return "tokens_per_second" by decoder and a drafter's "speedup" by baseline, and both "end_to_end_" too.

    A speedup is {"value", "low", "high"}. "spread" is that of the whole answers' speedup over plain decoding.
    """
    speeds: Figures = {
        "tokens_per_second": _by_decoder(measured, decoder, lambda t: t.tokens_per_second),
        "end_to_end_tokens_per_second": _by_decoder(measured, decoder, lambda t: t.end_to_end_tokens_per_second),
    }
    if decoder.drafter:
        timed, groups, baselines = measured.timed[decoder.key], measured.conversations, _baselines(measured)
        speeds["speedup"] = {name: speedup(timed, other, groups) for name, other in baselines.items()}
        speeds["end_to_end_speedup"] = {name: speedup(timed, other, groups, True) for name, other in baselines.items()}
        speeds["spread"] = spread(timed, baselines["plain"], groups)
    return speeds


def _by_decoder(measured: Measured, decoder: Decoder, figure: Callable[[Timed], Figure]) -> dict[str, Figure]:
    """Return a figure of the row's decoder as "speculative" (None for plain decoding), and of each baseline by name."""
    own: Any = figure(measured.timed[decoder.key]) if decoder.drafter else None
    return {"speculative": own, **{name: figure(timed) for name, timed in _baselines(measured).items()}}


def _baselines(measured: Measured) -> dict[str, Timed]:
    """Return the timings of plain decoding, as "plain", and of transformers' baselines by their names in a report."""
    return {name: t for name in BASELINES if (t := measured.timed.get("none" if name == "plain" else name))}
