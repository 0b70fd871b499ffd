"""How many draft tokens verification steps accept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest


@dataclass
class Step:
    """One row's part of one verification step.

    Attributes:
        drafted: depth of the draft.
        emitted: tokens that were appended: accepted + 1, or fewer if the completion ended.
    """

    drafted: int
    accepted: int
    emitted: int

    @property
    def cut(self) -> bool:
        """True if the completion ended among the accepted tokens, so that the sampled token was dropped."""
        return self.emitted <= self.accepted


@dataclass
class Acceptance:
    """Verification steps, counted by the draft tokens that they accepted. Counts add up, and subtract.

    Attributes:
        reached: the number of steps, then of those that accepted at least 1, 2, ... draft tokens, as vLLM counts them.
    """

    reached: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, steps: Iterable[Step], cut: bool = False) -> Acceptance:
        """Count steps; those that a completion's end cut short only if `cut`."""
        made = cls()
        for step in steps:
            if cut or not step.cut:
                made.count(step.accepted)
        return made

    def count(self, accepted: int) -> None:
        self.reached += [0] * (accepted + 1 - len(self.reached))
        for i in range(accepted + 1):
            self.reached[i] += 1

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance([a + b for a, b in zip_longest(self.reached, other.reached, fillvalue=0)])

    def __sub__(self, other: Acceptance) -> Acceptance:
        return Acceptance([a - b for a, b in zip_longest(self.reached, other.reached, fillvalue=0)])

    @property
    def steps(self) -> int:
        return sum(self.reached[:1])

    @property
    def accepted(self) -> int:
        return sum(self.reached[1:])

    @property
    def length(self) -> float:
        """Mean tokens per step, the bonus token included; 1 without steps."""
        return 1 + self.accepted / max(1, self.steps)

    def per_position(self, positions: int) -> list[int]:
        """Return how many steps accepted the draft token at each of the first `positions` positions."""
        return [*self.reached[1:], *[0] * positions][:positions]

    def rates(self, positions: int) -> list[float]:
        """Return the acceptance rate at each position, given that the one before was accepted; 0 where none was."""
        # Of 10 steps that accepted [0: 4, 1: 2, 2: 1, 3: 3] tokens, 10 reached position 0, 6 reached 1, and 4 reached
        # 2. The rates are 6/10, 4/6 and 3/4, and 1 + 0.6 + 0.4 + 0.3 is the acceptance length.
        reached = [self.steps, *self.per_position(positions)]
        return [after / before if before else 0.0 for before, after in pairwise(reached)]

    def by_length(self, most: int) -> list[int]:
        """Return how many steps accepted 0, 1, ..., `most` draft tokens."""
        reached = [self.steps, *self.per_position(most + 1)]
        return [these - more for these, more in pairwise(reached)]
