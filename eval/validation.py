"""Acceptance length and speed of a head during training, on validation prompts."""

from __future__ import annotations

import sys

from accelerate import PartialState
from accelerate.utils import gather_object

from eval.suites import Suite
from eval.timing import Timed, time_ours
from speculator import HeadDrafter, Sampling, Target, generate
from speculator.acceptance import Acceptance
from speculator.decoding.request import Step
from speculator.heads import Speculator
from speculator.terminal import Progress

NEW_TOKENS = 64
"""New tokens per validation prompt."""
_LOOKS, _DRAFTED = 3, 2
"""Prompts of the first look, and tokens of a draft: longer drafts cost more than an untrained head gains."""


def real_acceptance(
    target: Target,
    head: Speculator,
    suite: Suite,
    seed: int,
    max_new_tokens: int = NEW_TOKENS,
    max_positions: int = sys.maxsize,
) -> dict[str, float]:
    """Return "acceptance_length" (greedy) and "acceptance_length_sampled" (temperature 1) of a head, by decoding.

    Only first turns are decoded, up to EOS, as in a report. The processes split the prompts, and all return the figures
    of all. Each has at most `max_positions` positions in its KV cache, unless one prompt alone is longer.
    """
    state = PartialState()
    was_training = head.training
    drafter = HeadDrafter(head)  # sets the head to eval mode
    prompts = suite.prompts
    # Process k of n takes prompts n k // count on: shares differ by at most one, and none is left out.
    start, stop = (len(prompts) * k // state.num_processes for k in (state.process_index, state.process_index + 1))
    mine = prompts[start:stop]
    figures = {}
    passes = (("acceptance_length", 0.0), ("acceptance_length_sampled", 1.0))
    for name, temperature in Progress(passes, title="decoding validation prompts", unit="passes", leave=False):
        sampling = Sampling(temperature, seed=seed + start)  # independent of the number of processes
        steps: list[Step] = []
        if mine:
            # As many rows as the memory plan allows, by the longest prompt and all of its new tokens.
            rows = max(1, max_positions // (max(map(len, mine)) + max_new_tokens))
            generation = generate(
                target, drafter, mine, sampling, max_new_tokens=max_new_tokens, max_batch_size=rows
            ).check()
            steps = [step for row in generation.steps for step in row]
        figures[name] = sum(gather_object([Acceptance.of(steps)]), Acceptance()).length
    head.train(was_training)
    return figures


def first_look(target: Target, head: Speculator, suite: Suite) -> str:
    """Return a log line: how many times as fast as plain decoding the head answers a few prompts, prefill included."""
    was_training = head.training
    plain, drafted = Timed(), Timed()
    tokens = min(_DRAFTED, head.n_predict)
    ways = ((None, plain), (HeadDrafter(head, tokens), drafted))
    stop_at = sorted(target.eos_token_ids)
    prompts = suite.prompts[:_LOOKS]
    for prompt in [prompts[0], *prompts]:  # the first one is decoded twice, because a first decoding is slower
        for drafter, timed in ways:
            time_ours(target, drafter, [prompt], Sampling(), NEW_TOKENS, timed, {}, stop_at=stop_at)
    for _, timed in ways:
        del timed.batches[0]
    head.train(was_training)
    ratio = drafted.end_to_end_tokens_per_second / plain.end_to_end_tokens_per_second
    return (
        f"a first look: {ratio:.2f} times as fast as plain decoding, with drafts of {tokens} tokens, on {len(prompts)} "
        "validation prompts at temperature 0, one at a time, each decoded once"
    )
