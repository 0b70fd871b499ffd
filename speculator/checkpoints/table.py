"""Tables of layouts: each row says where config.json holds a field of a head's config, and is read both ways.

Several rows may hold one field: all of them are written, and the first that config.json has is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speculator.checkpoints.files import ForeignConfig
from speculator.errors import UserError, refuse
from speculator.files import Json, JsonObject

ABSENT: Any = object()
"""In place of a value: the key is not there."""
DTYPE = "dtype"
"""`Key.ours` of a key for the name of the weights' dtype, which is written only."""


@dataclass(frozen=True)
class Key:
    """One key of config.json.

    Attributes:
        ours: the field that it holds; None: it says nothing about the head.
        theirs: the key; "a/b" is the key b of the object a.
        to: computes the value, or ABSENT, from the head's config, and of `DTYPE` from its name. By default it is the
            field's, and no key for None.
        back: computes the field from the value and the whole config.json; None: the default of the config class.
        optional: the key may be missing or null; then the field has the default of the head's config class.
        default: value of a missing key.
        must: the only value, if the key is there, with which the head computes the same here.
    """

    ours: str | None
    theirs: str
    to: Callable[[Any], Any] | None = None
    back: Callable[[Any, ForeignConfig], Any] = field(default=lambda value, read: value, kw_only=True)
    optional: bool = field(default=False, kw_only=True)
    default: Any = field(default=ABSENT, kw_only=True)
    must: Any = field(default=ABSENT, kw_only=True)

    def written(self, config: Any, dtype: str) -> Any:
        """Return the value of the key for a head's config and the name of its dtype; ABSENT: it has none."""
        if self.to is not None:
            return self.to(dtype if self.ours == DTYPE else config)
        value = dtype if self.ours == DTYPE else getattr(config, str(self.ours), None)
        return ABSENT if value is None else value

    def found(self, read: ForeignConfig) -> Any:
        """Return the value of the key in the content of a config.json, or its default."""
        value: Any = read
        for key in self.theirs.split("/"):
            value = value.get(key, ABSENT)
            if value is ABSENT:
                return self.default
        return value


@dataclass(frozen=True)
class Lack:
    """What a layout can't hold, or none of its servers runs. A head that has it is not exported.

    Attributes:
        has: whether a head with this config has it.
        why: returns the message.
        reads: values of the fields in question for every head of the layout; None: the default of the config class.
    """

    has: Callable[[Any], Any]
    why: Callable[[Any], str]
    reads: JsonObject = field(default_factory=dict)


Table = tuple[Key | Lack, ...]


def only(ours: str, value: Json, why: str) -> Lack:
    """Return a `Lack` of every value of a field except one; `why` is its message, in which {0.field} is the head's."""
    return Lack(lambda config: getattr(config, ours) != value, why.format, {ours: value})


def same(*names: str, optional: bool = False) -> tuple[Key, ...]:
    """Return rows of keys that are called as the fields."""
    return tuple(Key(name, name, optional=optional) for name in names)


def constant(theirs: str, value: Json, must: bool = False) -> Key:
    """Return the row of a key that always has this value; `must`: a head that has another is refused."""
    return Key(None, theirs, lambda config: value, must=value if must else ABSENT)


def within(outer: str, rows: Iterable[Key]) -> tuple[Key, ...]:
    """Return the rows with their keys in the object `outer`."""
    return tuple(replace(row, theirs=f"{outer}/{row.theirs}") for row in rows)


def given_for(condition: Callable[[Any], bool], rows: Iterable[Key]) -> tuple[Key, ...]:
    """Return optional rows that are written for the heads whose config meets the condition."""

    def limited(row: Key) -> Key:
        return replace(row, to=lambda config: row.written(config, "") if condition(config) else ABSENT, optional=True)

    return tuple(map(limited, rows))


def keys(table: Table) -> list[Key]:
    return [row for row in table if isinstance(row, Key)]


def fields_in(table: Table) -> set[str]:
    """Return the fields of a head's config that a table has."""
    named = {row.ours for row in keys(table) if row.ours not in (None, DTYPE)}
    return {str(name) for name in named}.union(*(each.reads for each in table if isinstance(each, Lack)))


def to_json(table: Table, config: Any, dtype: str) -> JsonObject:
    """Return the content of config.json; raise a UserError for the first `Lack` that a head with this config has."""
    for lack in table:
        if isinstance(lack, Lack) and lack.has(config):
            raise UserError(lack.why(config))
    made: JsonObject = {}
    for row in keys(table):
        if (value := row.written(config, dtype)) is not ABSENT:
            *outer, key = row.theirs.split("/")
            place: Any = made
            for each in outer:
                place = place.setdefault(each, {})
            place[key] = value
    return made


def from_json(table: Table, read: ForeignConfig, file: Path) -> JsonObject:
    """Return the fields that config.json holds, given its content and its path for errors."""
    made: JsonObject = {}
    for row in table:
        if isinstance(row, Lack):
            made |= {name: value for name, value in row.reads.items() if value is not None}
            continue
        value, key = row.found(read), row.theirs.replace("/", ".")
        wrong = row.must is not ABSENT and value not in (ABSENT, None, row.must)
        refuse((wrong, f"{file}: {key} is {value!r}; must be {row.must!r}"))
        if row.ours in (None, DTYPE) or made.get(str(row.ours)) is not None:
            continue
        if row.optional and value in (ABSENT, None):
            continue
        refuse((value is ABSENT, f"{file}: {key} is missing"))
        field = None if value is None else row.back(value, read)
        if field is not None or value is None:  # a null is refused by its type
            made[str(row.ours)] = field
    return made
