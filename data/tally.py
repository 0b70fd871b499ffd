"""Count the rows of a source that can't be used, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from data.rows import RowError, SourceError
from speculator.terminal import log

_EXAMPLES = 3
_HOPELESS = 1000  # give up early after this many bad rows if most rows are bad


@dataclass
class Tally:
    """Counts of the rows that were read, and of the bad rows and exact copies among them, which are skipped.

    Attributes:
        max_share: largest accepted share of bad rows; 0 raises the first one.
        rows: number of rows read, including bad ones.
        copies: number of rows whose content an earlier row has.
        kinds: number of bad rows by what is wrong with them.
        first: messages of the first few bad rows.
        chats, chat_rows: number of chats, and of the rows that they became.
        answers: number of the assistant's turns that have loss.
        left_out: number of the assistant's turns that have none, by reason.
        first_left_out: place of the first of them by reason.
        completions: number of chats that are a prompt with its completion.
        greetings: number of the assistant's turns that began a chat, and were dropped.
    """

    max_share: float = 0.0
    rows: int = 0
    copies: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    chats: int = 0
    chat_rows: int = 0
    answers: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first_left_out: dict[str, str] = field(default_factory=dict)
    completions: int = 0
    greetings: int = 0

    @classmethod
    def from_record(cls, record: dict[str, Any], max_share: float) -> Tally:
        """Restore the counts that `record` returned."""
        counts = {name: Counter(record[name]) for name in ("kinds", "left_out")}
        return cls(**{**record, **counts, "max_share": max_share})

    def record(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "max_share"}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}

    @property
    def bad(self) -> int:
        return self.kinds.total()

    def add(self, error: RowError) -> None:
        """Count a bad row; raise it if `max_share` is 0, or a SourceError if most of many rows so far are bad."""
        if not self.max_share:
            raise error
        self.kinds[error.kind] += 1
        if len(self.first) < _EXAMPLES:
            self.first.append(str(error))
        # A file of the wrong kind has bad rows only; it need not be read to its end to say so.
        if self.bad >= _HOPELESS and self.bad > self.rows / 2:
            self.check("the first rows")

    def add_chat(self, chat: dict[str, Any]) -> None:
        """Count a chat by the facts that `data.rendering` returns of it."""
        self.chats += 1
        self.chat_rows += chat["rows"]
        self.answers += chat["answers"]
        self.greetings += chat["dropped"]
        self.completions += chat["completion"]
        for number, reason in chat["left_out"]:
            self.left_out[reason] += 1
            self.first_left_out.setdefault(reason, f"{chat['where']}, message {number + 1}")

    def check(self, name: str) -> None:
        """Raise a SourceError if the share of bad rows, or of answers without loss, is above `max_share`."""
        if self.bad > self.max_share * self.rows:
            raise SourceError(
                f"{self._counts(name)}, more than max_bad_rows {self.max_share:g} allows: {self._kinds()}; "
                f"the first is {self.first[0]}"
            )
        silent = self.left_out.total()
        if silent > self.max_share * (silent + self.answers):
            reason, _ = self.left_out.most_common(1)[0]
            raise SourceError(
                f"{name}: {silent:,} of {silent + self.answers:,} answers have no loss, more than max_bad_rows "
                f"{self.max_share:g} allows: mostly because {reason}; the first is {self.first_left_out[reason]}"
            )

    def warn(self, name: str) -> None:
        """Print, for the rows called `name`, what became of chats, and the exact copies and bad rows, if any."""
        if self.copies:
            log(f"{name}: {self.counted_copies()}")
        if self.bad:
            log(f"{self._counts(name)} and are skipped: {self._kinds()}")
            for line in self.first:
                log(f"  {line}")
        if self.chats:
            line = f"{name}: {self.chats:,} chats became {self.chat_rows:,} rows; {self.answers:,} answers have loss"
            reasons = [f"{count:,} x {reason}" for reason, count in self.left_out.most_common(5)]
            line += f", {self.left_out.total():,} have none: {'; '.join(reasons)}" if reasons else ""
            line += f"; {self.greetings:,} answers before the first question are dropped" if self.greetings else ""
            log(line)
        if self.completions:
            log(
                f"{name}: {self.completions:,} prompts with completions are rendered as chats; --raw, in a run "
                "--data.raw true, keeps them as text"
            )

    def counted_copies(self) -> str:
        """Return how many rows were left out because they are copies."""
        return f"{self.copies:,} of {self.rows:,} rows are exact copies of others and are skipped"

    def _counts(self, name: str) -> str:
        return f"{name}: {self.bad:,} of {self.rows:,} rows ({self.bad / self.rows:.1%}) can't be used"

    def _kinds(self) -> str:
        return "; ".join(f"{count:,} x {kind}" for kind, count in self.kinds.most_common(5))
