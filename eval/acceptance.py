"""Figures of acceptance, from the steps of a generation."""

from __future__ import annotations

import math
from collections.abc import Iterable

from accelerate import PartialState
from accelerate.utils import gather_object

from eval.suites import Suite
from speculator import HeadDrafter, Sampling, generate
from speculator.heads import Speculator
from speculator.request import Step
from speculator.target import Target

_NEW_TOKENS = 64


def acceptance(steps: Iterable[Step], draft_length: int) -> dict:
    """tokens_per_step and its parts, over the steps that neither EOS nor the length limit cut.

    `acceptance_by_position[i]` is conditional: accepted at i given that i-1 was. A position that was not drafted counts
    as not accepted; `acceptance_when_drafted[i]` leaves such steps out.
    """
    whole = [step for step in steps if not step.cut]
    lengths = [0] * (draft_length + 1)
    for step in whole:
        assert step.accepted <= step.drafted <= draft_length, (
            "more accepted than drafted, or more drafted than asked for"
        )
        assert step.emitted == step.accepted + 1, "a whole step gives the accepted tokens and one more"
        lengths[step.accepted] += 1
    reached = [sum(step.accepted >= i for step in whole) for i in range(draft_length + 1)]
    drafted = [sum(step.accepted >= i and step.drafted > i for step in whole) for i in range(draft_length)]
    by_position = [reached[i + 1] / reached[i] if reached[i] else 0.0 for i in range(draft_length)]
    when_drafted = [reached[i + 1] / drafted[i] if drafted[i] else 0.0 for i in range(draft_length)]
    mean = sum(step.accepted for step in whole) / len(whole) if whole else 0.0
    predicted = sum(math.prod(by_position[: i + 1]) for i in range(draft_length))
    assert math.isclose(mean, predicted, abs_tol=1e-9), "acceptance by position does not add up to the mean"
    counted = sum(i * count for i, count in enumerate(lengths))
    assert counted == sum(step.accepted for step in whole), "the histogram does not add up to what was accepted"
    return {
        "steps": len(whole),
        "tokens_per_step": 1 + mean,
        "accepted_per_step": mean,
        "acceptance_by_position": by_position,
        "acceptance_when_drafted": when_drafted,
        "accepted_lengths": lengths,
    }


def by_context(runs: Iterable[tuple[int, list[Step]]], trained_length: int | None) -> list[dict]:
    """tokens_per_step by how long the context was when a step began, in buckets that double; the last are the longest.

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
            "tokens_per_step": tokens / count,
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


def real_acceptance(
    target: Target, head: Speculator, suite: Suite, seed: int, max_new_tokens: int = _NEW_TOKENS
) -> dict[str, float]:
    """tokens_per_step of a head on a suite's first turns, greedy and sampled, from the decoding loop.

    As in a report, answers of a chat end where the target ends them. Processes share the prompts.
    """
    state = PartialState()
    was_training = head.training
    drafter = HeadDrafter(head)  # puts the head in eval mode
    prompts, eos = suite.prompts, None if suite.chat else ()
    start, stop = (len(prompts) * k // state.num_processes for k in (state.process_index, state.process_index + 1))
    share = prompts[start:stop]
    figures = {}
    for name, temperature in (("tokens_per_step", 0.0), ("tokens_per_step_sampled", 1.0)):
        sampling = Sampling(temperature, seed=seed + start)  # a prompt's stream is its own, whoever decodes it
        steps: list[Step] = []
        if share:
            generation = generate(target, drafter, share, sampling, max_new_tokens=max_new_tokens, eos_token_ids=eos)
            steps = [step for row in generation.steps for step in row]
        figures[name] = acceptance(gather_object(steps), drafter.draft_length)["tokens_per_step"]
    head.train(was_training)
    return figures
