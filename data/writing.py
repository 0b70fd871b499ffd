"""How the target writes text: the settings that every path takes which generates rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from speculator.decoding.sampling import Sampling


@dataclass(frozen=True)
class Ends:
    """Tokens and strings that end a text."""

    eos_token_ids: list[int]
    stop_strings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How the target continues prompts.

    Attributes:
        samplings: temperature and filters, each for an equal share of the rows; their seeds are ignored.
        max_new_tokens: largest number of new tokens. An answer also ends with EOS, which it keeps, or with the context.
        ends: stop tokens and strings (default: the target's EOS).
    """

    samplings: tuple[Sampling, ...] = (Sampling(temperature=1.0),)
    max_new_tokens: int = 256
    seed: int = 0
    ends: Ends | None = None

    def sampling(self, row: int, rows: int, answer: int = 0) -> Sampling:
        """Return the sampling of answer number `answer` of row `row` of all `rows`, with a seed of its own.

        Each group of neighbouring rows has every sampling once, in an order of its own: sources that take turns, and
        rows that are held out at equal distances, would have one sampling each if all groups had the same order.
        """
        count = len(self.samplings)
        group, place = divmod(row, count)
        order = sorted(range(count), key=lambda each: hashlib.sha256(f"{group} {each}".encode()).digest())
        return replace(self.samplings[order[place]], seed=self.seed + answer * rows + row)
