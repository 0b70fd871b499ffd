"""Figures of acceptance, from the steps of a generation."""

from __future__ import annotations

import math
from collections.abc import Iterable

from accelerate import PartialState
from accelerate.utils import gather_object

from speculator import HeadDrafter, Sampling, generate
from speculator.decoding.generate import Step
from speculator.heads import Speculator
from speculator.target import Target

_NEW_TOKENS = 64


def acceptance(steps: Iterable[Step], draft_length: int) -> dict:
    """tokens_per_step and its parts, over the steps that neither EOS nor the length limit cut.

    `acceptance_by_position[i]` is conditional: kept at i given that i-1 was. A position that was not drafted counts
    as not kept; `acceptance_when_drafted[i]` leaves such steps out.
    """
    whole = [step for step in steps if not step.cut]
    reached = [sum(step.accepted >= i for step in whole) for i in range(draft_length + 1)]
    drafted = [sum(step.accepted >= i and step.drafted > i for step in whole) for i in range(draft_length)]
    by_position = [reached[i + 1] / reached[i] if reached[i] else 0.0 for i in range(draft_length)]
    when_drafted = [reached[i + 1] / drafted[i] if drafted[i] else 0.0 for i in range(draft_length)]
    mean = sum(step.accepted for step in whole) / len(whole) if whole else 0.0
    predicted = sum(math.prod(by_position[: i + 1]) for i in range(draft_length))
    assert math.isclose(mean, predicted, abs_tol=1e-9), "acceptance by position does not add up to the mean"
    return {
        "steps": len(whole),
        "tokens_per_step": 1 + mean,
        "accepted_per_step": mean,
        "acceptance_by_position": by_position,
        "acceptance_when_drafted": when_drafted,
    }


def real_acceptance(target: Target, head: Speculator, prompts: list[list[int]], seed: int) -> dict[str, float]:
    """tokens_per_step of a head on prompts, greedy and sampled, from the decoding loop. Processes share the prompts."""
    state = PartialState()
    was_training = head.training
    drafter = HeadDrafter(head)  # puts the head in eval mode
    start, stop = (len(prompts) * k // state.num_processes for k in (state.process_index, state.process_index + 1))
    share = prompts[start:stop]
    figures = {}
    for name, temperature in (("tokens_per_step", 0.0), ("tokens_per_step_sampled", 1.0)):
        sampling = Sampling(temperature, seed=seed + start)  # a prompt's stream is its own, whoever decodes it
        steps: list[Step] = []
        if share:
            generation = generate(target, drafter, share, sampling, max_new_tokens=_NEW_TOKENS, eos_token_ids=())
            steps = [step for row in generation.steps for step in row]
        figures[name] = acceptance(gather_object(steps), drafter.draft_length)["tokens_per_step"]
    head.train(was_training)
    return figures
