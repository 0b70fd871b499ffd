"""One result of `speculator eval lossless`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Check:
    """Result of one check, a line of the table.

    Attributes:
        name: what is compared.
        sample: size of the sample.
        statistic: measured statistic, as text.
        result: its interpretation, as text.
        figures: statistic and result as numbers.
    """

    name: str
    temperature: float
    sample: str
    statistic: str
    result: str
    passed: bool
    figures: dict[str, float] = field(default_factory=dict)
