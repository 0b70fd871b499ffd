"""One result of `speculator eval lossless`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Check:
    """A check, a line of the table; `figures` are numbers of `statistic` and its interpretation, `result`."""

    name: str
    temperature: float
    sample: str
    statistic: str
    result: str
    passed: bool
    figures: dict[str, float] = field(default_factory=dict)
