"""Options, declared once: a dataclass's fields are flags and YAML keys, and the string below a field is its help."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from speculator.errors import OneLineParser, UserError, first_line, removed
from speculator.files import read_text


@dataclass(frozen=True)
class Bound:
    """What a number must be: in words, such as "> 0", and as a test."""

    words: str
    holds: Callable[[float], bool]


PositiveInt = Annotated[int, Bound("> 0", lambda number: number > 0)]
NonNegativeInt = Annotated[int, Bound(">= 0", lambda number: number >= 0)]
PositiveFloat = Annotated[float, Bound("> 0", lambda number: number > 0)]
NonNegativeFloat = Annotated[float, Bound(">= 0", lambda number: number >= 0)]
Share = Annotated[float, Bound("from 0 to 1", lambda number: 0 <= number <= 1)]


@dataclass(frozen=True)
class Flag:
    """What the type of a flag does not say.

    Attributes:
        name: the flag as typed, if not "--" and the field's name; without dashes it is positional.
        metavar: the value in the help.
        alone: the value of a flag without one.
        read: turns a word into a value.
        group: flags of a group exclude each other; one is required if its first has no default.
    """

    name: str = ""
    metavar: str | None = None
    alone: str | None = None
    read: Callable[[str], Any] | None = None
    group: str = ""


@dataclass(frozen=True)
class Option:
    """A field of a declaration; `kind` is its type, and `default` is MISSING if it is required."""

    name: str
    kind: Any
    default: Any
    help: str
    flag: Flag

    @property
    def is_section(self) -> bool:
        """True if it holds further options."""
        return is_dataclass(self.kind)

    @property
    def is_mapping(self) -> bool:
        """True if it takes keys that are not declared."""
        return get_origin(self.kind) is dict

    @property
    def is_optional(self) -> bool:
        """True if it may be null."""
        return NoneType in _alternatives(self.kind)

    @property
    def help_with_default(self) -> str:
        """The help, with a default that it doesn't state itself."""
        stated = "default" in self.help or self.default in (MISSING, None, False) or self.default in ("", [], {})
        shown = self.default if isinstance(self.default, str) else f"{self.default}"
        return self.help if stated else f"{self.help.rstrip('.')} (default: {shown})."


@cache
def options(declared: type, path: str = "") -> dict[str, Option]:
    """Return the options of a dataclass by dotted name, each section before what is in it."""
    found: dict[str, Option] = {}
    hints = get_type_hints(declared, include_extras=True)
    for item in fields(declared):
        kind, *notes = get_args(hints[item.name]) if get_origin(hints[item.name]) is Annotated else (hints[item.name],)
        flag = next((note for note in notes if isinstance(note, Flag)), Flag())
        kind = hints[item.name] if any(isinstance(note, Bound) for note in notes) else kind
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        owners = [each for each in declared.__mro__ if is_dataclass(each)]
        help_ = next(filter(None, (_strings(each.__module__).get((each.__name__, item.name)) for each in owners)), "")
        name = f"{path}{item.name}"
        found[name] = Option(name, kind, default, help_, flag)
        found |= options(kind, f"{name}.") if found[name].is_section else {}
    return found


@cache
def _strings(module: str) -> dict[tuple[str, str], str]:
    """Return the strings below the fields of a module's classes, by class and field."""
    return {
        (kind.name, item.target.id): " ".join(str(below.value.value).split())
        for kind in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(kind, ast.ClassDef)
        for item, below in pairwise(kind.body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def add_flags(parser: OneLineParser, declared: type) -> None:
    """Add a flag to a parser for each field of a dataclass."""
    groups: dict[str, Any] = {"": parser}
    for option in options(declared).values():
        flag, required = option.flag, option.default is MISSING
        if flag.group not in groups:
            groups[flag.group] = parser.add_mutually_exclusive_group(required=required)
        kind = next(each for each in _alternatives(option.kind) if each is not NoneType)
        settings: dict[str, Any] = {"help": option.help_with_default.replace("%", "%%"), "metavar": flag.metavar}
        if kind is bool:
            settings = {"help": settings["help"], "action": "store_true"}
        elif get_origin(kind) is Literal:
            settings["choices"] = get_args(kind)
        else:
            settings["type"] = flag.read or (get_args(kind)[0] if get_origin(kind) is list else kind)
        if get_origin(kind) is list and not flag.read:
            settings |= {"action": "extend", "nargs": "+"}
        if flag.name and not flag.name.startswith("-"):
            groups[flag.group].add_argument(option.name, nargs=None if required else "?", **settings)
            continue
        default = None if required else option.default
        required = required and not flag.group
        name = flag.name or f"--{option.name}"
        groups[flag.group].add_argument(name, dest=option.name, required=required, default=default, **settings)


def add_words(parser: OneLineParser, declared: type) -> None:
    """Add a flag `--section.key` to a parser for each setting in a dataclass of sections; `build` reads the words."""
    groups: dict[str, Any] = {"": parser}
    for name, option in options(declared).items():
        section, _, key = name.rpartition(".")
        if option.is_section:
            groups[name] = parser.add_argument_group(name, option.kind.__doc__)
            continue
        choices = f"{{{','.join(map(str, get_args(option.kind)))}}}" if get_origin(option.kind) is Literal else ""
        alone = option.flag.alone or ("true" if option.kind is bool else None)
        settings: dict[str, Any] = {"nargs": "?", "const": alone} if alone else {}
        settings |= {"default": argparse.SUPPRESS, "metavar": choices or key.upper()}
        groups[section].add_argument(f"--{name}", help=option.help_with_default.replace("%", "%%"), **settings)


class _Loader(yaml.SafeLoader):
    """YAML in which a mapping has a key once, 1e-3 is a number, and a date is a text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if str(key.value) in seen:
                problem = f"{key.value} comes a second time"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


_NUMBER = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: str(node.value))


def read_file(file: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file; raise a UserError for any other content, or a file that can't be read."""
    text = read_text(file)
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise UserError(f"{file}: {line}{getattr(error, 'problem', None) or first_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a mapping of settings")
    return content


def read_word(word: str) -> Any:
    """Return the number, switch, null, list or mapping that a word is in YAML; any other word as it is."""
    try:
        read = yaml.load(word, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return word
    return word if isinstance(read, str) or not word else read


def by_name(declared: type, content: dict[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of the settings in a file's content; raise a UserError for an unknown key."""
    for key, value in content.items():
        name = f"{path}{key}"
        option = options(declared).get(name)
        if option is None or (option.is_section and not isinstance(value, dict)):
            raise UserError(no_setting(declared, name, f": {value}"))
        if option.is_section:
            yield from by_name(declared, value, f"{name}.")
        else:
            yield name, value


def no_setting(declared: type, name: str, value: str, dashes: str = "") -> str:
    """Return the message for a name that is no setting: a section, whose first key may be meant, or unknown.

    Args:
        value: the value that it got, as it would follow the key: ": 3" in a file, " 3" after a flag.
        dashes: what precedes a key.
    """
    names = list(options(declared))
    if name in names:
        return f"{name} is a section of keys: did you mean {dashes}{names[names.index(name) + 1]}{value}?"
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]}?" if near else ": --help lists the valid ones"
    return removed(name) or f"unknown key {name}{hint}"


def build(declared: Any, values: dict[str, Any], path: str = "") -> Any:
    """Return a dataclass with the values given by dotted name, and defaults; raise a UserError for a wrong value."""
    made = {}
    for item in fields(declared):
        option = options(declared)[item.name]
        name = f"{path}{item.name}"
        if option.is_section:
            made[item.name] = build(option.kind, values, f"{name}.")
        elif name in values:
            made[item.name] = convert(name, values[name], option.kind)
    return declared(**made)


def convert(name: str, value: Any, kind: Any) -> Any:
    """Return a value of YAML, or a word, as the type of a setting has it; raise a UserError that says what it must be.

    A list takes a single item too. NaN and infinity are no numbers.
    """
    alternatives = sorted(_alternatives(kind), key=lambda each: each is not NoneType)  # a text may be null
    if value in (None, "") and NoneType not in alternatives:
        raise UserError(f"{name} has no value")
    for each in alternatives:
        with suppress(ValueError, TypeError, OverflowError):
            return _as(value, each)
    raise UserError(f"{name}: must be {' or '.join(map(_words, _alternatives(kind)))}, got {value!s:.200}")


def _as(value: Any, kind: Any) -> Any:
    """Return a value as a type has it; raise an error if it can't be one."""
    origin, of = get_origin(kind), get_args(kind)
    read = read_word(value) if isinstance(value, str) else value
    if origin is Annotated:
        read = _as(value, of[0])
        fits = all(bound.holds(read) for bound in of[1:])
    elif origin is list:
        fits = not isinstance(read, dict)
        read = [_as(each, of[0]) for each in (read if isinstance(read, list) else [value])]
    elif origin is dict:
        fits = isinstance(read, dict) and all(isinstance(key, str) and key.isidentifier() for key in read)
    elif kind in (int, float):
        read = kind(value)
        whole = kind is float or isinstance(value, str) or read == value
        fits = whole and math.isfinite(read) and not isinstance(value, bool)
    elif kind in (bool, NoneType):
        fits = isinstance(read, kind)
    else:
        read = value
        fits = isinstance(value, str) if kind is str else value in of
    if not fits:
        raise ValueError(value)
    return read


def _words(kind: Any) -> str:
    """Return what a value of a type is, in words."""
    origin, of = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join([_words(of[0]), *(bound.words for bound in of[1:])])
    if origin is list:
        return "a list such as [a, b]" if of[0] is str else "a list of numbers such as [0, 1]"
    if origin is Literal:
        return " or ".join(of)
    return _WORDS[origin or kind]


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
_WORDS[dict] = "a mapping such as '{name: value}'"
