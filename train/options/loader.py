"""A dataclass of sections as flags and YAML keys: the string below a field is its help, and its type says what fits."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml

from speculator.errors import OneLineParser, UserError, first_line, refuse, removed
from speculator.files import read_text

PositiveInt = Annotated[int, "> 0"]
NonNegativeInt = Annotated[int, ">= 0"]
PositiveFloat = Annotated[float, "> 0"]
NonNegativeFloat = Annotated[float, ">= 0"]
Share = Annotated[float, "from 0 to 1"]
Values = dict[str, Any]
"""Settings of one file or command line, by their dotted names."""
_BOUNDS: dict[str, Callable[[float], bool]] = {
    "> 0": lambda number: number > 0,
    ">= 0": lambda number: number >= 0,
    "from 0 to 1": lambda number: 0 <= number <= 1,
}


class Option(NamedTuple):
    """A setting, or a section of them: the types that its value may have, its default and its help."""

    kinds: tuple[Any, ...]
    default: Any
    help: str

    @property
    def is_section(self) -> bool:
        """True if it holds further options."""
        return is_dataclass(self.kinds[0])


@cache
def options(declared: type, path: str = "") -> dict[str, Option]:
    """Return the options of a dataclass by dotted name, each section before what is in it."""
    found: dict[str, Option] = {}
    for item in fields(declared):
        kind: Any = get_type_hints(declared, include_extras=True)[item.name]
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        below = [_strings(each.__module__).get((each.__name__, item.name)) for each in declared.__mro__[:-1]]
        name = f"{path}{item.name}"
        found[name] = Option(kinds, default, next(filter(None, below), ""))
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


def add_flags(parser: OneLineParser, declared: type, alone: dict[str, str]) -> None:
    """Add a flag `--section.key` for each setting, whose value stays a word.

    `alone` has the values of flags that stand without one; a switch is then true.
    """
    groups: dict = {"": parser}
    for name, option in options(declared).items():
        section, _, key = name.rpartition(".")
        if option.is_section:
            groups[name] = parser.add_argument_group(name, option.kinds[0].__doc__)
            continue
        value = alone.get(name, "true" if option.kinds == (bool,) else None)
        shape: dict[str, Any] = {"nargs": "?", "const": value} if value else {}
        stated = "default" in option.help or option.default is False or option.default in (None, [], {})
        text = option.help if stated else f"{option.help.rstrip('.')} (default: {option.default})."
        literal = get_origin(option.kinds[0]) is Literal
        shape |= {"metavar": f"{{{','.join(get_args(option.kinds[0]))}}}" if literal else key.upper()}
        groups[section].add_argument(f"--{name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **shape)


class _Loader(yaml.SafeLoader):
    """YAML in which a mapping has a key once, 1e-3 is a number, and a date is a text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} comes a second time", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


_NUMBER = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: str(node.value))
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)


def read_file(declared: type, file: str) -> Values:
    """Return the settings in a YAML file by dotted name; raise a UserError for a file without, or an unknown key."""
    text = read_text(file)
    try:
        content = yaml.load(text, _Loader)
        if not isinstance(content, dict):
            raise UserError("not a mapping of settings")
        found: Values = {}
        for name, value in _by_name(declared, content):
            refuse((name in found, f"{name} comes a second time"))
            found[name] = value
        return found
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{file}: {line}{' '.join(filter(None, (error.context, error.problem)))}") from None
    except (UserError, *_YAML_ERRORS) as error:
        raise UserError(f"{file}: {first_line(error)}") from None


def _by_name(declared: type, content: dict[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name, option = f"{path}{key}", options(declared).get(f"{path}{key}")
        if option is None or (option.is_section and not isinstance(value, dict)):
            raise no_setting(declared, name, "" if value is None else f": {value}")
        if option.is_section:
            yield from _by_name(declared, value, f"{name}.")
        else:
            yield name, value


def no_setting(declared: type, name: str, value: str, dashes: str = "") -> UserError:
    """Return the error for a name that is no setting: it is unknown, or a section, whose first key may be meant.

    `dashes` and `value` are what stands before and after the key: "--" and " 3" of a flag, "" and ": 3" in a file.
    """
    names = list(options(declared))
    if name in names:
        first = names[names.index(name) + 1]
        return UserError(f"{name} is a section of keys: did you mean {dashes}{first}{value}?")
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]}?" if near else ": --help lists the valid ones"
    return UserError(removed(name) or f"unknown key {name}{hint}")


def read_word(word: str) -> Any:
    """Return the number, switch, null, list or mapping that a word is in YAML; any other word as it is."""
    with suppress(*_YAML_ERRORS):
        read = yaml.load(word, _Loader)
        return word if isinstance(read, str) or not word else read
    return word


def build(declared: Any, values: Values, path: str = "") -> Any:
    """Return a dataclass with the values given by dotted name, and defaults; raise a UserError for a wrong value."""
    made = {}
    for key in (item.name for item in fields(declared)):
        option, name = options(declared)[key], f"{path}{key}"
        if option.is_section:
            made[key] = build(option.kinds[0], values, f"{name}.")
        elif name in values:
            made[key] = convert(name, values[name], option.kinds)
    return declared(**made)


def convert(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    """Return a value of YAML, or a word, as a setting has it; raise a UserError that says what it must be.

    A list takes a single item too. NaN and infinity are no numbers.
    """
    if value in (None, "") and NoneType not in kinds:
        raise UserError(f"{name} has no value")
    for kind in sorted(kinds, key=lambda kind: kind is not NoneType):  # a text may be null
        with suppress(ValueError, TypeError, OverflowError):
            return _as(value, kind)
    raise UserError(f"{name}: must be {' or '.join(map(_words, kinds))}, got {value!s:.200}")


def _as(value: Any, kind: Any) -> Any:
    """Return a value as a type has it; raise an error if it can't be one."""
    origin, of = get_origin(kind), get_args(kind)
    read = read_word(value) if isinstance(value, str) else value
    if origin is Annotated:
        read = _as(value, of[0])
        fits = _BOUNDS[of[1]](read)
    elif origin is list:
        fits = not isinstance(read, dict)
        read = [_as(each, of[0]) for each in (read if isinstance(read, list) else [value])]
    elif origin is dict:
        fits = isinstance(read, dict) and all(isinstance(key, str) and key.isidentifier() for key in read)
    elif kind in (int, float):
        given, read = read, kind(read)
        fits = (kind is float or read == given) and math.isfinite(read) and not isinstance(given, bool)
    elif kind in (bool, NoneType):
        fits = isinstance(read, kind)
    else:
        read, fits = value, isinstance(value, str) if kind is str else value in of
    if not fits:
        raise ValueError(value)
    return read


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
_WORDS[dict] = "a mapping such as '{name: value}'"


def _words(kind: Any) -> str:
    origin, of = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{_WORDS[of[0]]} {of[1]}"
    if origin is list:
        return "a list of texts" if of[0] is str else "a list of numbers"
    if origin is Literal:
        return " or ".join(filter(None, (", ".join(of[:-1]), of[-1])))
    return _WORDS[origin or kind]
