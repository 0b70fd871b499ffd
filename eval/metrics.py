"""Figures: acceptance from the steps of a generation, ratios of speeds, their intervals, the rows of report.json."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from eval.decoders import Decoder, Measured
from eval.suites import Suite
from eval.timing import Timed
from speculator.decoding.request import Generation, Step
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name
from speculator.drafters import Drafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.tables import BASELINES
from speculator.target.model import Target

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


def speedup(ours: Timed, baseline: Timed, groups: Sequence[int] | None = None) -> dict[str, float]:
    """Ratio of decode-only tokens per second, with a 95% interval by paired bootstrap.

    Sequences that ended with their first token, the prefill's, have nothing to compare; of such alone the ratio is 1.

    Args:
        groups: of each batch, what it belongs to: the turns of a conversation are resampled together. Default: every
            batch is its own.
    """

    def ratio(samples: Sequence[tuple[int, float, int, float]]) -> float:
        a, sa, b, sb = (sum(column) for column in zip(*samples, strict=True))
        return (a / sa) / (b / sb)

    sums: dict[int, list[float]] = {}
    for group, x, y in zip(groups or range(len(ours.batches)), ours.batches, baseline.batches, strict=True):
        total = sums.setdefault(group, [0, 0.0, 0, 0.0])
        for i, value in enumerate((x.decoded, x.decode_seconds, y.decoded, y.decode_seconds)):
            total[i] += value
    decoded = [tuple(total) for total in sums.values() if total[0] and total[2]]
    return paired_bootstrap(decoded, ratio) if decoded else {"value": 1.0, "low": None, "high": None}


def acceptance(steps: Iterable[Step], num_speculative_tokens: int) -> dict:
    """acceptance_length and its parts, over the steps that neither EOS nor the length limit cut.

    `acceptance_by_position[i]` is conditional: accepted at i given that i-1 was. A position that was not drafted counts
    as not accepted; `acceptance_when_drafted[i]` leaves such steps out.
    """
    whole = [step for step in steps if not step.cut]
    lengths = [0] * (num_speculative_tokens + 1)
    for step in whole:
        assert step.accepted <= step.drafted <= num_speculative_tokens, (
            "more accepted than drafted, or more drafted than asked for"
        )
        assert step.emitted == step.accepted + 1, "a whole step gives the accepted tokens and one more"
        lengths[step.accepted] += 1
    reached = [sum(step.accepted >= i for step in whole) for i in range(num_speculative_tokens + 1)]
    drafted = [sum(step.accepted >= i and step.drafted > i for step in whole) for i in range(num_speculative_tokens)]
    by_position = [reached[i + 1] / reached[i] if reached[i] else 0.0 for i in range(num_speculative_tokens)]
    when_drafted = [reached[i + 1] / drafted[i] if drafted[i] else 0.0 for i in range(num_speculative_tokens)]
    mean = sum(step.accepted for step in whole) / len(whole) if whole else 0.0
    predicted = sum(math.prod(by_position[: i + 1]) for i in range(num_speculative_tokens))
    assert math.isclose(mean, predicted, abs_tol=1e-9), "acceptance by position does not add up to the mean"
    counted = sum(i * count for i, count in enumerate(lengths))
    assert counted == sum(step.accepted for step in whole), "the histogram does not add up to what was accepted"
    return {
        "steps": len(whole),
        "acceptance_length": 1 + mean,
        "accepted_per_step": mean,
        "acceptance_by_position": by_position,
        "acceptance_when_drafted": when_drafted,
        "accepted_lengths": lengths,
    }


def drafted_share(generations: Iterable[Generation], skip: int) -> float:
    """Share of the new tokens that drafts gave, the first `skip` of each row left out."""
    accepted = count = 0
    for generation in generations:
        accepted += sum(min(step.accepted, step.emitted) for row in generation.steps for step in row)
        count += sum(len(row) - skip for row in generation.tokens)
    return accepted / max(count, 1)


def by_context(runs: Iterable[tuple[int, list[Step]]], trained_length: int | None) -> list[dict]:
    """acceptance_length by how long the context was when a step began, in buckets that double; the last are the longest.

    Args:
        runs: of each text, the prompt's length and its steps.
        trained_length: what the head was trained on: a bucket ends there, so that none is half beyond it.
    """
    sums: dict[tuple[int, int], list[int]] = {}
    for length, steps in runs:
        length += 1  # the prefill's token
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
    """The power of two from 64 on that a length lies below, and the one before; `edge` parts a bucket in two."""
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
) -> dict:
    """One decoder's row: see docs/evaluation.md for every figure."""
    key, drafter = decoder.key, decoder.drafter
    if isinstance(drafter, AdaptiveDrafter):
        rule = "as drafted"
    else:
        rule = decoder.rule or (drafter.rules[0] if drafter else "plain")
    own, own_key = measured.timed[key], key if drafter else None
    result = {
        "name": suite.name,
        "prompts": len(suite.prompts),
        "turns": sum(batch.prefill_tokens for batch in own.batches),
        "left_out": {"prompts": suite.left_out, "turns": measured.turns_left_out},
        "chat": suite.chat,
        "temperature": sampling.temperature,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "drafter": key.split()[0],
        "num_speculative_tokens": drafter.num_speculative_tokens if drafter else 0,
        "nodes": drafter.nodes if drafter else 0,
        "rule": "greedy" if sampling.greedy else rule,
        **_accepted(own, drafter, measured.conversations),
        "acceptance_by_context": _by_context(own, trained_length if key.startswith("head") else None),
        **_speeds(measured, own_key),
        "time_to_first_token": _each(measured, own_key, lambda t: median(b.prefill_seconds for b in t.batches)),
        "peak_memory_bytes": _each(measured, own_key, lambda t: max(b.peak_memory for b in t.batches)),
    }
    check_identities(result, own)
    if sampling.greedy and "hf_generate" in measured.timed:
        result["identical_to_greedy"] = {
            "identical": sum(a == b for a, b in zip(own.tokens, measured.timed["hf_generate"].tokens, strict=True)),
            "of": len(own.tokens),
            "dtype": dtype_name(target.dtype),
        }
    if drafter:
        cost = result["cost"] = measured.costs[key].figures(drafter.num_speculative_tokens)
        step = drafter.num_speculative_tokens * cost["draft_over_decode"] + cost["verify_over_decode"]
        busy = result["rows_busy"] = rows_busy(own) / rows_busy(measured.timed["none"])
        predicted = result["predicted_speedup"] = result["acceptance_length"] / step * busy
        result["predicted_over_measured"] = predicted / result["speedup"]["plain"]["value"]
    names = dict.fromkeys(measured.categories)
    if any(names):
        result["categories"] = [_category(name, key, drafter, measured.of_category(name)) for name in names]
        steps = sum(part["steps"] for part in result["categories"])
        assert steps == result["steps"], "the categories' steps do not add up to the suite's"
    return result


def check_identities(figures: dict, timed: Timed) -> None:
    """What must hold of any measurement: a report that breaks it is not written.

    `acceptance` asserts that acceptance_length = 1 + sum_i prod_{j<=i} acceptance_by_position[j].
    """
    for batch in timed.batches:
        for tokens, steps in zip(batch.tokens, batch.steps, strict=bool(batch.steps)):
            assert len(tokens) == 1 + sum(step.emitted for step in steps), "steps and tokens do not add up"
            assert not any(step.cut for step in steps[:-1]), "a step was cut before the end of its text"
    buckets = figures["acceptance_by_context"]
    assert sum(bucket["steps"] for bucket in buckets) == figures["steps"], "the buckets do not hold all steps"
    tokens = sum(bucket["steps"] * bucket["acceptance_length"] for bucket in buckets)
    assert abs(tokens - figures["steps"] * figures["acceptance_length"]) < 1e-6 * max(1, tokens), "the buckets are off"


def rows_busy(timed: Timed) -> float:
    """The mean share of a batch's rows that still decode, over the steps until its slowest row ends; 1 of no steps."""
    useful = sum(len(row) for batch in timed.batches for row in batch.steps)
    return useful / sum(len(batch.steps) * max(map(len, batch.steps)) for batch in timed.batches) if useful else 1.0


def _category(name: str, key: str, drafter: Drafter | None, part: Measured) -> dict:
    return {
        "name": name or "(none)",
        "turns": sum(batch.prefill_tokens for batch in part.timed[key].batches),
        **_accepted(part.timed[key], drafter, part.conversations),
        **_speeds(part, key if drafter else None),
    }


def _accepted(timed: Timed, drafter: Drafter | None, conversations: Sequence[int]) -> dict:
    """Acceptance, with the interval of acceptance_length over conversations."""
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


def _by_context(timed: Timed, trained_length: int | None) -> list[dict]:
    runs = [pair for batch in timed.batches for pair in zip(batch.prompt_lengths, batch.steps, strict=True)]
    return by_context(runs, trained_length)


def _speeds(measured: Measured, key: str | None) -> dict:
    """Tokens per second of a drafter (None: of none) and of every baseline, and the ratios with their intervals."""
    speeds = {
        "tokens_per_second": _each(measured, key, lambda timed: timed.tokens_per_second),
        "end_to_end_tokens_per_second": _each(measured, key, lambda timed: timed.end_to_end_tokens_per_second),
    }
    if key:
        own = measured.timed[key]
        speeds["speedup"] = {
            name: speedup(own, baseline, measured.conversations) for name, baseline in _baselines(measured).items()
        }
    return speeds


def _each(measured: Measured, key: str | None, figure) -> dict:
    parts = _baselines(measured)
    return {"speculative": figure(measured.timed[key]) if key else None, **{n: figure(t) for n, t in parts.items()}}


def _baselines(measured: Measured) -> dict[str, Timed]:
    return {name: t for name in BASELINES if (t := measured.timed.get("none" if name == "plain" else name))}
