"""Count the rows of a source that can't be used, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from data.documents import ChatFacts, NothingToLearnError, RowError
from data.mixture import SourceError
from speculator.files import JsonObject
from speculator.terminal import log

COPY, EMPTY, TOO_LONG = "exact copies of other rows", "without text", "too long"
"""Reasons to skip a row without a fault."""
CUT_SHARE = 0.1
"""Largest share of answers that may reach their limit without a warning."""
_EXAMPLES = 3
_HOPELESS = 1000  # give up early after this many bad rows if most rows are bad


@dataclass
class Tally:
    """Counts of the rows that were read: each is used, or skipped for a reason, or a bad row.

    Attributes:
        max_share: largest accepted share of bad rows; 0 raises the first one.
        rows: number of rows read, including bad ones and those whose use is not yet known.
        skipped: number of rows that were left out although nothing is wrong with them, by reason.
        kinds: number of bad rows by what is wrong with them.
        first: messages of the first few bad rows.
        chats, chat_rows: number of chats, and of the rows that they became.
        answers: number of the assistant's turns that have loss.
        left_out: number of the assistant's turns that can't have loss, by reason.
        first_left_out: by reason, the place of the first turn that can't have loss.
        marked: number of the assistant's turns that have no loss because the row says so.
        thoughtless: number of the assistant's turns that have loss without their thoughts.
        completions: number of chats that are a prompt with its completion.
        greetings: number of the assistant's turns that began a chat, and were dropped.
        unread: number of rows with each key that looks like a mark, and that we do not follow.
    """

    max_share: float = 0.0
    rows: int = 0
    used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    chats: int = 0
    chat_rows: int = 0
    answers: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first_left_out: dict[str, str] = field(default_factory=dict)
    marked: int = 0
    thoughtless: int = 0
    completions: int = 0
    greetings: int = 0
    unread: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_record(cls, record: dict[str, Any], max_share: float) -> Tally:
        counts = {name: Counter(record[name]) for name in ("skipped", "kinds", "left_out", "unread")}
        return cls(**{**record, **counts, "max_share": max_share})

    def record(self) -> JsonObject:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "max_share"}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}

    @property
    def bad(self) -> int:
        return self.kinds.total()

    @property
    def copies(self) -> int:
        return self.skipped[COPY]

    def add(self, error: RowError) -> None:
        """Count a bad row; raise it if `max_share` is 0, or a SourceError if most of many rows so far are bad.

        A NothingToLearnError is never raised: its row counts as skipped, not as bad.
        """
        if isinstance(error, NothingToLearnError):
            self.skipped[error.kind] += 1
            return
        if not self.max_share:
            raise error
        self.kinds[error.kind] += 1
        if len(self.first) < _EXAMPLES:
            self.first.append(str(error))
        # A file of the wrong kind has bad rows only; it need not be read to its end to say so.
        if self.bad >= _HOPELESS and self.bad > self.rows / 2:
            self.check("the first rows")

    def add_chat(self, chat: ChatFacts) -> None:
        self.chats += 1
        self.chat_rows += chat["rows"]
        self.answers += chat["answers"]
        self.greetings += chat["dropped"]
        self.completions += chat["completion"]
        self.marked += chat["marked"]
        self.thoughtless += chat["thoughtless"]
        for number, reason in chat["left_out"]:
            self.left_out[reason] += 1
            self.first_left_out.setdefault(reason, f"{chat['where']}, message {number + 1}")

    def take(self, used: int, too_long: int, limit: str) -> None:
        """Count `used` rows, `too_long` rows, and all other good rows as beyond the flag `limit`."""
        beyond = self.rows - self.bad - used - too_long
        self.used, self.skipped = used, Counter({TOO_LONG: too_long, f"beyond {limit}": beyond})

    def check(self, name: str) -> None:
        """Raise a SourceError if the share of bad rows, or of answers without loss, is above `max_share`."""
        if self.bad > self.max_share * self.rows:
            raise SourceError(
                f"{name}: {self.bad:,} of {self.rows:,} rows ({self.bad / self.rows:.1%}) can't be used, more than "
                f"max_bad_rows {self.max_share:g} allows: {self._kinds(self.kinds)}; the first is {self.first[0]}"
            )
        silent = self.left_out.total()
        if silent > self.max_share * (silent + self.answers):
            reason, _ = self.left_out.most_common(1)[0]
            raise SourceError(
                f"{name}: {silent:,} of {silent + self.answers:,} answers have no loss, more than max_bad_rows "
                f"{self.max_share:g} allows: mostly because {reason}; the first is {self.first_left_out[reason]}"
            )

    def warn(self, name: str) -> None:
        """Print what became of the rows called `name`, all of them, and of the answers of chats.

        Rows that were read ahead and not asked for are not counted.
        """
        left_out = self.skipped.total() + self.bad
        reasons = f", {left_out:,} left out: {self._kinds(self.skipped + self.kinds)}" if left_out else ""
        log(f"{name}: {self.used + left_out:,} rows read, {self.used:,} used{reasons}")
        for line in self.first:
            log(f"  {line}")
        if self.chats:
            line = f"{name}: {self.chats:,} chats became {self.chat_rows:,} rows; {self.answers:,} answers have loss"
            line += f", {self.left_out.total():,} have none: {self._kinds(self.left_out)}" if self.left_out else ""
            line += f"; {self.marked:,} more are marked as not to be learnt" if self.marked else ""
            line += (
                f"; {self.thoughtless:,} without their thoughts, as the chat template is" if self.thoughtless else ""
            )
            line += f"; {self.greetings:,} answers before the first question are dropped" if self.greetings else ""
            log(line)
        if self.unread:
            log(f"{name}: keys that look like marks and are not followed: {self._kinds(self.unread)}")
        if self.completions:
            log(
                f"{name}: {self.completions:,} prompts with completions are rendered as chats; --raw, in a run "
                "--data.raw true, keeps them as text"
            )

    def counted_copies(self) -> str:
        """Return a phrase for messages that says how many rows were left out because they are copies."""
        return f"{self.copies:,} of {self.rows:,} rows are exact copies of others and are skipped"

    @staticmethod
    def _kinds(counts: Counter[str]) -> str:
        """Return the five commonest reasons with their counts, and the sum of the others, in a phrase for messages."""
        others = counts.total() - sum(count for _, count in counts.most_common(5))
        words = [f"{count:,} x {kind}" for kind, count in counts.most_common(5)]
        return "; ".join([*words, *([f"{others:,} x other reasons"] if others else [])])


def cut_answers(manifest: Mapping[str, Any], setting: str = "max_new_tokens", share: float = 0.0) -> str:
    """Return how many of its answers reached their limit, the `setting`, in words; "" if at most a `share` did."""
    cut, answers = manifest.get("cut", 0), manifest.get("answers", 0)
    return f"{cut:,} of {answers:,} answers reached {setting} {manifest['max_new_tokens']}" * (cut > share * answers)
