"""Counters of drafts on the page /metrics of a vLLM server, summed over its engines."""

from __future__ import annotations

import re
from collections import Counter

_DRAFTS = r"^vllm:spec_decode_num_(drafts|accepted_tokens(?:_per_pos)?)_total(?:\{(.*)\})? (\S+)$"
_COUNTER, _POSITION = re.compile(_DRAFTS, re.MULTILINE), re.compile(r'position="(\d+)"')


def read_counters(page: str) -> Counter[str]:
    """Return the counts since the server's start of "drafts", "accepted_tokens", and those at position "0", "1", ...

    Args:
        page: text of /metrics. Counters that it lacks are 0.
    """
    found: Counter[str] = Counter()
    for what, labels, value in _COUNTER.findall(page):
        position = _POSITION.search(labels)
        found[position[1] if position else what] += int(float(value))
    return found
