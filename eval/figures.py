"""From what was measured to the rows of report.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from eval.acceptance import acceptance, by_context
from eval.bootstrap import paired_bootstrap
from eval.decoders import BASELINES, Decoder
from eval.measuring import Measured
from eval.speed import Timed, speedup
from eval.suites import Suite
from speculator.drafters import Drafter
from speculator.drafters.topology import LOSSY
from speculator.sampling import Sampling
from speculator.target import Target, dtype_name

PARTED = 0.15  # prediction and measurement: something in the loop then costs what it should not


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
    rule = decoder.rule or (drafter.rules[0] if drafter else "plain")
    own = measured.timed[key]
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
        "draft_length": drafter.draft_length if drafter else 0,
        "nodes": drafter.nodes if drafter else 0,
        "rule": "greedy" if sampling.greedy else rule,
        "lossy": not sampling.greedy and rule in LOSSY,
        **_accepted(own, drafter, measured.conversations),
        "acceptance_by_context": _by_context(own, trained_length if key.startswith("head") else None),
        **_speeds(measured, key if drafter else None),
        "time_to_first_token": _each(measured, drafter and key, lambda t: _median(t, "prefill_seconds")),
        "peak_memory_bytes": _each(measured, drafter and key, lambda t: max(b.peak_memory for b in t.batches)),
    }
    check_identities(result, own)
    if sampling.greedy and "hf_generate" in measured.timed:
        result["identical_to_greedy"] = {
            "identical": sum(a == b for a, b in zip(own.tokens, measured.timed["hf_generate"].tokens, strict=True)),
            "of": len(own.tokens),
            "dtype": dtype_name(target.dtype),
        }
    if drafter:
        cost = result["cost"] = measured.costs[key].figures(drafter.draft_length)
        step = drafter.draft_length * cost["draft_over_decode"] + cost["verify_over_decode"]
        busy = result["rows_busy"] = rows_busy(own) / rows_busy(measured.timed["none"])
        predicted = result["predicted_speedup"] = result["tokens_per_step"] / step * busy
        result["predicted_over_measured"] = predicted / result["speedup"]["same_loop"]["value"]
    names = dict.fromkeys(measured.categories)
    if any(names):
        result["categories"] = [_category(name, key, drafter, measured.of_category(name)) for name in names]
        steps = sum(part["steps"] for part in result["categories"])
        assert steps == result["steps"], "the categories' steps do not add up to the suite's"
    return result


def check_identities(figures: dict, timed: Timed) -> None:
    """What must hold of any measurement: a report that breaks it is not written.

    `acceptance` asserts that tokens_per_step = 1 + sum_i prod_{j<=i} acceptance_by_position[j].
    """
    for batch in timed.batches:
        for tokens, steps in zip(batch.tokens, batch.steps, strict=bool(batch.steps)):
            assert len(tokens) == 1 + sum(step.emitted for step in steps), "steps and tokens do not add up"
            assert not any(step.cut for step in steps[:-1]), "a step was cut before the end of its text"
    buckets = figures["acceptance_by_context"]
    assert sum(bucket["steps"] for bucket in buckets) == figures["steps"], "the buckets do not hold all steps"
    tokens = sum(bucket["steps"] * bucket["tokens_per_step"] for bucket in buckets)
    assert abs(tokens - figures["steps"] * figures["tokens_per_step"]) < 1e-6 * max(1, tokens), "the buckets are off"


def rows_busy(timed: Timed) -> float:
    """The share of rows that still had something to say, over all steps, until the slowest row ends."""
    useful = sum(len(row) for batch in timed.batches for row in batch.steps)
    return useful / sum(len(batch.steps) * max(map(len, batch.steps)) for batch in timed.batches)


def _category(name: str, key: str, drafter: Drafter | None, part: Measured) -> dict:
    return {
        "name": name or "(none)",
        "turns": sum(batch.prefill_tokens for batch in part.timed[key].batches),
        **_accepted(part.timed[key], drafter, part.conversations),
        **_speeds(part, key if drafter else None),
    }


def _accepted(timed: Timed, drafter: Drafter | None, conversations: Sequence[int]) -> dict:
    """Acceptance, with the interval of tokens_per_step over conversations."""
    sums: dict[int, list[int]] = {}
    for number, batch in zip(conversations, timed.batches, strict=True):
        whole = [step.accepted + 1 for steps in batch.steps for step in steps if not step.cut]
        total = sums.setdefault(number, [0, 0])
        total[0] += sum(whole)
        total[1] += len(whole)
    samples = [total for total in sums.values() if total[1]]
    figures = acceptance(timed.steps, drafter.draft_length if drafter else 0)
    if samples:
        interval = paired_bootstrap(samples, lambda some: sum(a for a, _ in some) / sum(b for _, b in some))
        figures["tokens_per_step_interval"] = {"low": interval["low"], "high": interval["high"]}
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
    return {name: t for name in BASELINES if (t := measured.timed.get("none" if name == "same_loop" else name))}


def _median(timed: Timed, name: str) -> float:
    return statistics.median(getattr(batch, name) for batch in timed.batches)


def warnings(rows: Sequence[dict]) -> list[str]:
    """What a reader of the figures should know, a line each."""
    lines = []
    for each in rows:
        where = f"{each['name']}, temperature {each['temperature']:g}, batch size {each['batch_size']}"
        where += f", {each['drafter']} of {each['draft_length']}"
        ratio = each.get("predicted_over_measured", 1.0)
        if abs(ratio - 1) > PARTED:
            lines.append(
                f"{where}: predicted speedup {each['predicted_speedup']:.2f}, measured "
                f"{each['speedup']['same_loop']['value']:.2f}: they part by more than {PARTED:.0%}, so something in "
                "the loop costs what it should not, or the machine was busy"
            )
        beyond = [bucket for bucket in each["acceptance_by_context"] if bucket["beyond_trained_length"]]
        if beyond:
            steps = sum(bucket["steps"] for bucket in beyond)
            mean = sum(bucket["steps"] * bucket["tokens_per_step"] for bucket in beyond) / steps
            lines.append(
                f"{where}: {steps} of {each['steps']} steps lie beyond the {beyond[0]['from']} tokens of context that "
                f"the head was trained on; {mean:.2f} tokens per step there, {each['tokens_per_step']:.2f} overall"
            )
        for what, count in each["left_out"].items():
            if count and each["drafter"] == "none":
                lines.append(f"{each['name']}: {count} {what} left out: longer than the target's context has room for")
    return list(dict.fromkeys(lines))
