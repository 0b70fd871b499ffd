"""Real tokens per step of a head in training, on validation prompts."""

from __future__ import annotations

import sys

from accelerate import PartialState
from accelerate.utils import gather_object

from eval.metrics import acceptance
from eval.suites import Suite
from speculator import HeadDrafter, Sampling, Target, generate
from speculator.decoding.request import Step
from speculator.heads import Speculator
from speculator.target.sharding import share

NEW_TOKENS = 64
"""Of each prompt."""


def real_acceptance(
    target: Target,
    head: Speculator,
    suite: Suite,
    seed: int,
    max_new_tokens: int = NEW_TOKENS,
    max_positions: int = sys.maxsize,
) -> dict[str, float]:
    """acceptance_length of a head on a suite's first turns, greedy and sampled, from the decoding loop.

    As in a report, answers of a chat end where the target ends them. Processes share the prompts, those that hold one
    target together one part.

    Args:
        max_positions: tokens that a process has in its KV cache at a time, if a single prompt has not more.
    """
    state = PartialState()
    was_training = head.training
    drafter = HeadDrafter(head)  # puts the head in eval mode
    prompts, eos = suite.prompts, None if suite.chat else ()
    index, count = share(target.group, state.process_index, state.num_processes)
    start, stop = (len(prompts) * k // count for k in (index, index + 1))
    own = prompts[start:stop]
    figures = {}
    for name, temperature in (("acceptance_length", 0.0), ("acceptance_length_sampled", 1.0)):
        sampling = Sampling(temperature, seed=seed + start)  # a prompt's stream is its own, whoever decodes it
        steps: list[Step] = []
        if own:
            rows = max(1, max_positions // (max(map(len, own)) + max_new_tokens))
            how = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos, "max_batch_size": rows}
            generation = generate(target, drafter, own, sampling, **how)
            steps = [step for row in generation.steps for step in row]
        figures[name] = acceptance(gather_object(steps), drafter.num_speculative_tokens)["acceptance_length"]
    head.train(was_training)
    return figures
