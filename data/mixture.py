"""Which sources are read together, and in which shares.

A source is a location (see `data.readers.read`), followed by @ and its weight if sources are mixed:

    python-sources
    chats.jsonl@0.7   org/name:train_sft@0.3

Weights are shares of tokens; they need not add up to 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from speculator.errors import UserError

SELF = "self"
"""Location of text that the target writes itself."""
PYTHON_SOURCES = "python-sources"
"""Location of the Python files of this machine."""


class SourceError(UserError):
    """A source that can't be read or has nothing to train on."""


@dataclass(frozen=True)
class Source:
    """One source of text: where it is, and its share of the tokens (None if sources have no weights)."""

    location: str
    weight: float | None = None

    def __str__(self) -> str:
        return self.location if self.weight is None else f"{self.location}@{Decimal(str(self.weight)):f}"


@dataclass(frozen=True)
class Mixture:
    """Sources in the order in which they are read: all of them have a weight, or none has."""

    sources: tuple[Source, ...]

    @property
    def locations(self) -> list[str]:
        return [source.location for source in self.sources]

    @property
    def weights(self) -> list[float]:
        return [source.weight for source in self.sources if source.weight is not None]

    @property
    def names_self(self) -> bool:
        return SELF in self.locations

    @property
    def is_self(self) -> bool:
        return self.locations == [SELF]

    def __str__(self) -> str:
        return ", ".join(map(str, self.sources))


def mixture_of(sources: Sequence[str]) -> Mixture:
    """Parse sources such as "chats.jsonl@0.7"; raise a SourceError if a weight is not above 0 or only some have one."""
    if not sources or not all(sources):
        raise SourceError("no source is given")
    mixture = Mixture(tuple(map(_parse, sources)))
    if 0 < len(mixture.weights) < len(sources):
        without = next(source.location for source in mixture.sources if source.weight is None)
        having = next(source.location for source in mixture.sources if source.weight is not None)
        raise SourceError(f"{without} has no weight, but {having} has one: weight all sources, or none")
    return mixture


def _parse(source: str) -> Source:
    # The name of an existing file may end like a weight.
    match = None if Path(source).exists() else re.fullmatch(r"(.+)@([+-]?(?:\d+\.?\d*|\.\d+))", source, re.DOTALL)
    if match is None:
        return Source(source)
    if float(match[2]) <= 0:
        raise SourceError(f"{source}: a weight must be above 0")
    return Source(match[1], float(match[2]))
