"""Acceptance and speed of decoders, and the rows of report.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, TypeVar

import numpy as np

from eval.decoders import Decoder, Measured
from eval.intervals import length, paired_bootstrap, ratio
from eval.suites import Suite
from eval.timing import Timed
from speculator.acceptance import Acceptance
from speculator.decoding.request import Generation, Step
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name
from speculator.drafters.measure import interquartile_mean
from speculator.report import Bounds, Bucket, Cost, Figures, Identical, Interval, ReportRow, Spread
from speculator.tables import BASELINES
from speculator.target.model import Target

Figure = TypeVar("Figure")


def speedup(ours: Timed, baseline: Timed, groups: Sequence[int] | None = None, whole: bool = False) -> Interval:
    """Return `ours` over `baseline` in tokens per second, with a 95% interval.

    Sequences that end with the prefill's token are left out; the ratio is 1 if there are no others.

    Args:
        ours, baseline: timings of the same batches in the same order.
        groups: conversation of each batch; the turns of a conversation are resampled together (default: each alone).
        whole: count the prefill and its tokens too.
    """
    samples = _conversations(ours, baseline, groups, whole)
    return paired_bootstrap(samples, ratio) if samples else Interval(1.0)


def _conversations(ours: Timed, baseline: Timed, groups: Sequence[int] | None, whole: bool) -> list[list[float]]:
    """Return (tokens, seconds, tokens of the baseline, its seconds) of each conversation that has decoded tokens."""
    pairs = list(zip(ours.batches, baseline.batches, strict=True))
    rows = ([*x.counted(whole), *y.counted(whole), x.decoded and y.decoded] for x, y in pairs)
    return [total[:-1] for total in _added(groups or range(len(pairs)), rows) if total[-1]]


def _added(groups: Sequence[int], rows: Iterable[Sequence[float]]) -> list[list[float]]:
    """Add up the rows of each group: turns of a conversation depend on each other, so a conversation is one sample."""
    sums: dict[int, list[float]] = {}
    for group, row in zip(groups, rows, strict=True):
        sums[group] = [a + b for a, b in zip(sums.get(group, [0] * len(row)), row, strict=True)]
    return list(sums.values())


def spread(ours: Timed, baseline: Timed, groups: Sequence[int]) -> Spread | None:
    """Return quantiles over conversations of whole answers' speedup, and the share that got slower; None: no data."""
    ratios = [ratio([each]) for each in _conversations(ours, baseline, groups, whole=True)]
    if not ratios:
        return None
    p5, p50, p95 = np.quantile(ratios, [0.05, 0.5, 0.95]).tolist()
    return Spread(p5, p50, p95, slower=sum(ratio < 1 for ratio in ratios) / len(ratios))


def drafted_share(generations: Iterable[Generation], skip: int) -> float:
    """Return the share of the new tokens that are accepted draft tokens; the first `skip` of each row do not count."""
    accepted = count = 0
    for generation in generations:
        accepted += sum(min(step.accepted, step.emitted) for row in generation.steps for step in row)
        count += sum(len(row) - skip for row in generation.tokens)
    return accepted / max(count, 1)


def by_context(sequences: Iterable[tuple[int, list[Step]]], trained_length: int | None) -> list[Bucket]:
    """Return the acceptance length in buckets of the context length at the beginning of a step, whose bounds double.

    Args:
        sequences: prompt length and steps of each sequence.
        trained_length: context length that the head was trained on; no bucket extends across it.
    """
    found: dict[tuple[int, int], Acceptance] = {}
    for prompt_length, steps in sequences:
        # A step of a text begins at its length so far: with 10 tokens of prompt, at 11, since the prefill gave one.
        length = prompt_length + 1
        for step in steps:
            if not step.cut:
                found.setdefault(_bucket(length, trained_length), Acceptance()).count(step.accepted)
            length += step.emitted
    return [
        Bucket(
            from_=low,
            below=high,
            steps=steps.steps,
            acceptance_length=steps.length,
            beyond_trained_length=trained_length is not None and low >= trained_length,
        )
        for (low, high), steps in sorted(found.items())
    ]


def _bucket(length: int, edge: int | None) -> tuple[int, int]:
    """Return the bounds [low, high) of a length's bucket: 0 to 64, 64 to 128, 128 to 256, ..., split at `edge`."""
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
    tuned_on: int = 0,
) -> ReportRow:
    """Return the row of one decoder in report.json; docs/reference/report.md explains the keys.

    Args:
        measured: the timings of the suite with this sampling and batch size.
        trained_length: context length that the head was trained on; None: unknown.
        tuned_on: number of the suite's prompts that the head was tuned on.
    """
    drafter, timed = decoder.drafter, measured.timed[decoder.key]
    rule = decoder.rule or (drafter.rules[0] if drafter else "plain")
    sequences = [pair for batch in timed.batches for pair in zip(batch.prompt_lengths, batch.steps, strict=True)]
    identical, reference, names = None, measured.timed.get("hf_generate"), dict.fromkeys(measured.categories)
    if sampling.greedy and reference:
        same = sum(a == b for a, b in zip(timed.tokens, reference.tokens, strict=True))
        identical = Identical(same, of=len(timed.tokens), dtype=dtype_name(target.dtype))
    figures = _figures(suite.name, measured, decoder)
    cost, busy = _cost(measured, decoder), rows_busy(timed) / rows_busy(measured.timed["none"])
    depth = drafter.num_speculative_tokens if drafter else 0
    return ReportRow(
        **vars(figures),
        prompts=len(suite.prompts),
        digest=suite.digest,
        left_out={"prompts": suite.left_out, "turns": measured.turns_left_out},
        chat=suite.chat,
        temperature=sampling.temperature,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        tuned_on=tuned_on,
        cut=sum(row[-1] not in target.eos_token_ids for row in timed.tokens) if suite.chat else 0,
        drafter=decoder.key.split()[0],
        num_speculative_tokens=depth,
        nodes=drafter.nodes if drafter else 0,
        rule="greedy" if sampling.greedy else rule,
        acceptance_by_context=by_context(sequences, trained_length if decoder.key.startswith("head") else None),
        time_to_first_token=_by_decoder(measured, decoder, lambda t: median(b.prefill_seconds for b in t.batches)),
        peak_memory_bytes=_by_decoder(measured, decoder, lambda t: max(b.peak_memory for b in t.batches)),
        identical_to_greedy=identical,
        server_log=None,
        cost=cost,
        rows_busy=busy,
        # E / (G c + v) (2211.17192, theorem 3.8); a batch runs until its slowest row ends.
        predicted_speedup=figures.acceptance_length / (depth * cost.draft + cost.verify) * busy,
        categories=[_figures(name or "(none)", measured.of_category(name), decoder) for name in names if any(names)],
        samples=samples(timed, measured),
        acceptance_along_answer=by_context(((0, steps) for _, steps in sequences), None),
    )


def samples(timed: Timed, measured: Measured) -> list[list[float]]:
    """Return `ReportRow.samples`."""
    rows = []
    for ours, plain in zip(timed.batches, measured.timed["none"].batches, strict=True):
        steps = Acceptance.of(step for row in ours.steps for step in row)
        rows.append([*ours.counted(whole=True), *plain.counted(whole=True), steps.accepted, steps.steps])
    return _added(measured.conversations, rows)


def _cost(measured: Measured, decoder: Decoder) -> Cost:
    """Return what a step of the decoder costs; plain decoding drafts nothing.

    A whole step is timed; v is what the target pays for the verified tokens by its cost entry; drafting is the rest.
    """
    drafter, entry = decoder.drafter, measured.verification
    if drafter is None or entry is None:
        return Cost(draft=0.0, verify=1.0)
    depth = drafter.num_speculative_tokens
    step = interquartile_mean(drafted / plain for plain, drafted in measured.steps[decoder.key])
    # A tree's steps say how deep they drafted; its tokens are verified whole.
    drafted = [each.drafted for each in measured.timed[decoder.key].steps]
    tokens = drafter.nodes / depth * sum(drafted) / max(1, len(drafted))
    verify = min(step, entry.of(0, tokens * entry.rows, False))
    return Cost(draft=(step - verify) / depth, verify=verify)


def rows_busy(timed: Timed) -> float:
    """Return the mean share of a batch's rows that still decode until the slowest ends; 1 if nothing was decoded."""
    # Rows of 10, 6 and 2 steps: 18 of 3 * 10 are busy. Drafts end some rows earlier than others.
    useful = sum(len(row) for batch in timed.batches for row in batch.steps)
    return useful / sum(len(batch.steps) * max(map(len, batch.steps)) for batch in timed.batches) if useful else 1.0


def _figures(name: str, measured: Measured, decoder: Decoder) -> Figures:
    """Return the figures of one decoder in the timings of a suite or a category, which has this name."""
    timed, groups, baselines = measured.timed[decoder.key], measured.conversations, _baselines(measured)
    steps, whole = Acceptance.of(timed.steps), [step for step in timed.steps if not step.cut]
    depth = decoder.drafter.num_speculative_tokens if decoder.drafter else 0
    with_steps = [sample for sample in samples(timed, measured) if sample[-1]]
    interval = paired_bootstrap(with_steps, length) if with_steps else Interval(1.0)
    drafts = decoder.drafter is not None
    return Figures(
        name=name,
        turns=sum(batch.prefill_tokens for batch in timed.batches),
        steps=steps.steps,
        acceptance_length=steps.length,
        acceptance_length_interval=Bounds(interval.low, interval.high),
        accepted_per_step=steps.accepted / max(1, steps.steps),
        undrafted_share=sum(not step.drafted for step in whole) / max(1, len(whole)),
        acceptance_by_position=steps.rates(depth),
        accepted_lengths=steps.by_length(depth),
        tokens_per_second=_by_decoder(measured, decoder, lambda t: t.tokens_per_second),
        end_to_end_tokens_per_second=_by_decoder(measured, decoder, lambda t: t.end_to_end_tokens_per_second),
        speedup={key: speedup(timed, other, groups) for key, other in baselines.items() if drafts},
        end_to_end_speedup={key: speedup(timed, other, groups, True) for key, other in baselines.items() if drafts},
        spread=spread(timed, baselines["plain"], groups) if drafts else None,
    )


def _by_decoder(measured: Measured, decoder: Decoder, figure: Callable[[Timed], Figure]) -> dict[str, Any]:
    """Return a figure of the row's decoder as "speculative" (None for plain decoding), and of each baseline by name."""
    own = figure(measured.timed[decoder.key]) if decoder.drafter else None
    return {"speculative": own, **{name: figure(timed) for name, timed in _baselines(measured).items()}}


def _baselines(measured: Measured) -> dict[str, Timed]:
    """Return the timings of plain decoding, as "plain", and of transformers' baselines by their names in a report."""
    return {name: t for name in BASELINES if (t := measured.timed.get("none" if name == "plain" else name))}
