"""How many rows of a source could not be used, and why."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from data.rows import RowError, SourceError
from speculator.errors import printable

MAX_BAD_ROWS = 0.05
_SHOWN = 3
_HOPELESS = 1000  # so many, and more than there are others: the rest need not be read


def tell(line: str) -> None:
    """Say a line on stderr, once among the processes of a launch."""
    if os.environ.get("RANK", "0") == "0":
        print(printable(line.replace("\n", " ")), file=sys.stderr)


def add_max_bad_rows(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The flag `--max_bad_rows` of the commands that read sources."""
    parser.add_argument(
        "--max_bad_rows",
        type=float,
        default=MAX_BAD_ROWS,
        help=f"rows that can't be used are left out and shown; a larger share is an error; default: {MAX_BAD_ROWS}",
    )


@dataclass
class Tally:
    """Rows that were read, and the bad ones among them, which are passed over.

    Attributes:
        most: the share of bad rows from which a source is refused; with 0 the first of them is raised.
        rows: read, the bad ones included.
        kinds: of what was wrong, how often.
        first: what was wrong with the first few.
    """

    most: float = 0.0
    rows: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, record: dict[str, Any], most: float) -> Tally:
        """As `record` gave it."""
        return cls(most, record["rows"], Counter(record["kinds"]), record["first"])

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"rows": self.rows, "kinds": dict(self.kinds), "first": self.first}

    @property
    def bad(self) -> int:
        return self.kinds.total()

    def add(self, error: RowError) -> None:
        """Pass over a row.

        Raises:
            SourceError: none may be bad, or by now nearly all are.
        """
        if not self.most:
            raise error
        self.kinds[error.kind] += 1
        if len(self.first) < _SHOWN:
            self.first.append(str(error))
        if self.bad >= _HOPELESS and self.bad > self.rows / 2:
            self.judge("the first rows")

    def judge(self, what: str) -> None:
        """Refuse a source of too many bad rows.

        Raises:
            SourceError: their share is above `most`.
        """
        if self.bad > self.most * self.rows:
            raise SourceError(
                f"{self._said(what)}, more than max_bad_rows {self.most:g} allows: {self._by_kind()}; "
                f"the first is {self.first[0]}"
            )

    def show(self, what: str) -> None:
        """Say on stderr how many were passed over, why, and which came first; nothing where there was none."""
        if self.bad:
            lines = [f"{self._said(what)} and are left out: {self._by_kind()}", *(f"  {line}" for line in self.first)]
            for line in lines:
                tell(line)

    def _said(self, what: str) -> str:
        return f"{what}: {self.bad:,} of {self.rows:,} rows ({self.bad / self.rows:.1%}) can't be used"

    def _by_kind(self) -> str:
        return "; ".join(f"{count:,} x {kind}" for kind, count in self.kinds.most_common(5))
