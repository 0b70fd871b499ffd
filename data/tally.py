"""Count the rows of a source that can't be used, and why."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from data.rows import RowError, SourceError
from speculator.terminal import log

MAX_BAD_ROWS = 0.05
_EXAMPLES = 3
_HOPELESS = 1000  # give up early after this many bad rows if most rows are bad


def add_max_bad_rows(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flag `--max_bad_rows` of the commands that read sources."""
    parser.add_argument(
        "--max_bad_rows",
        type=float,
        default=MAX_BAD_ROWS,
        help=f"largest share of unusable rows; they are skipped with a warning (default: {MAX_BAD_ROWS})",
    )


@dataclass
class Tally:
    """Counts of the rows that were read, and of the bad rows and exact copies among them, which are skipped.

    Attributes:
        max_share: largest accepted share of bad rows; 0 raises the first one.
        rows: number of rows read, including bad ones.
        copies: number of rows whose content an earlier row has.
        kinds: number of bad rows by what is wrong with them.
        first: messages of the first few bad rows.
        lost_turns: number of assistant turns without loss, because the chat template leaves out a part of them.
    """

    max_share: float = 0.0
    rows: int = 0
    copies: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    lost_turns: int = 0

    @classmethod
    def from_record(cls, record: dict[str, Any], max_share: float) -> Tally:
        """Restore the counts that `record` returned."""
        return cls(
            max_share,
            record["rows"],
            record["copies"],
            Counter(record["kinds"]),
            record["first"],
            record["lost_turns"],
        )

    def record(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {
            "rows": self.rows,
            "copies": self.copies,
            "kinds": dict(self.kinds),
            "first": self.first,
            "lost_turns": self.lost_turns,
        }

    @property
    def bad(self) -> int:
        return self.kinds.total()

    def add(self, error: RowError) -> None:
        """Count a bad row; raise it if none is accepted, or if nearly all rows so far are bad."""
        if not self.max_share:
            raise error
        self.kinds[error.kind] += 1
        if len(self.first) < _EXAMPLES:
            self.first.append(str(error))
        if self.bad >= _HOPELESS and self.bad > self.rows / 2:
            self.check("the first rows")

    def check(self, name: str) -> None:
        """Raise a SourceError if the share of bad rows is above `max_share`."""
        if self.bad > self.max_share * self.rows:
            raise SourceError(
                f"{self._counts(name)}, more than max_bad_rows {self.max_share:g} allows: {self._kinds()}; "
                f"the first is {self.first[0]}"
            )

    def warn(self, name: str) -> None:
        """Print the numbers of exact copies, of bad rows with the reasons, and of turns without loss, if any."""
        if self.copies:
            log(f"{name}: {self.counted_copies()}")
        if self.bad:
            log(f"{self._counts(name)} and are skipped: {self._kinds()}")
            for line in self.first:
                log(f"  {line}")
        if self.lost_turns:
            log(
                f"{name}: {self.lost_turns:,} assistant turns have no loss: the chat template leaves out their content "
                "or their tool calls"
            )

    def counted_copies(self) -> str:
        """Return how many rows were left out because they are copies."""
        return f"{self.copies:,} of {self.rows:,} rows are exact copies of others and are skipped"

    def _counts(self, name: str) -> str:
        return f"{name}: {self.bad:,} of {self.rows:,} rows ({self.bad / self.rows:.1%}) can't be used"

    def _kinds(self) -> str:
        return "; ".join(f"{count:,} x {kind}" for kind, count in self.kinds.most_common(5))
