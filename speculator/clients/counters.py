"""Counters of verification steps on the page /metrics of vLLM and of `speculator serve`."""

from __future__ import annotations

import re
from collections import Counter

from speculator.acceptance import Acceptance

_STEPS = re.compile(
    r"^(?:vllm:spec_decode_num_drafts_total|speculator_acceptance_length_count)(?:\{.*\})? (\S+)$", re.MULTILINE
)
_ACCEPTED = re.compile(
    r"^(?:vllm:spec_decode_num_accepted_tokens_per_pos_total|speculator_accepted_total)"
    r'\{.*position="(\d+)".*\} (\S+)$',
    re.MULTILINE,
)


def read_acceptance(page: str) -> Acceptance | None:
    """Return the steps since the server's start, summed over its engines; None if the page has no such counters."""
    steps, at = _STEPS.findall(page), Counter[int]()
    for position, value in _ACCEPTED.findall(page):
        at[int(position)] += int(float(value))
    reached = [sum(int(float(value)) for value in steps), *(at[i] for i in range(max(at, default=-1) + 1))]
    return Acceptance(reached) if steps else None
