"""From a command line to a config: dataclasses <- YAML <- flags. Imports no torch, so mistakes show at once."""

from __future__ import annotations

import difflib
import math
import re
import sys
from dataclasses import fields
from functools import cache
from itertools import islice
from typing import NoReturn

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_loader, set_parsing_settings

from speculator.errors import UserError, printable
from speculator.files import read_text
from train.bounded_yaml import load_yaml
from train.config import HERE, ROOT, RunConfig, optional_names, section_names, values_of

set_parsing_settings(docstring_parse_attribute_docstrings=True)
set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))

QUICKSTART = ROOT / "configs" / "quickstart.yaml"

_LONGEST_MESSAGE = 500
_MOST = 10**8  # of any count of a config ...
_UNBOUNDED = ("seed", "max_tokens", "max_package_bytes")  # ... but these


def _fail(message: str) -> NoReturn:
    shown = " ".join(message[:_LONGEST_MESSAGE].split()) + " ..." * (len(message) > _LONGEST_MESSAGE)
    print(f"train.py: {printable(shown)}", file=sys.stderr)
    raise SystemExit(2)


def _check_file(name: str) -> None:
    """Refuse a config file that can't be one, before the parser reads it."""
    try:
        read = load_yaml(read_text(name))
    except UserError as error:
        _fail(f"--config {error}")
    except yaml.YAMLError as error:
        _fail(f"--config {name}: {error}")
    for section in ("", *section_names()):
        inner = read
        for key in section.split(".") if section else ():
            inner = inner.get(key, {})
        if not isinstance(inner, dict):
            where = f"{section} is {inner!r:.40}, not a section" if section else "no config: it has no keys"
            _fail(f"--config {name}: {where}")
        odd = next((key for key in inner if not isinstance(key, str) or re.search(r"\s", key) or not key), None)
        if odd is not None:
            _fail(f"--config {name}: unknown key {f'{section}.{odd}' if section else odd}")


def _check_numbers(config: RunConfig) -> None:
    optional = set(optional_names())
    for name, value in values_of(config):
        if value is None and name not in optional:
            _fail(f"{name} has no value")
        if isinstance(value, float) and not math.isfinite(value):
            _fail(f"{name} is {value}, not a number that can be used")
        if isinstance(value, int) and abs(value) > _MOST and name.split(".")[-1] not in _UNBOUNDED:
            _fail(f"{name} is {value:,}; the most is {_MOST:,}")
        if isinstance(value, str) and (not value or "\0" in value):
            _fail(f"{name} is {'empty' if not value else 'no text: it has a NUL in it'}")


@cache
def build_parser() -> ArgumentParser:
    """One flag per field, `--section.field`, with its docstring as help."""
    parser = ArgumentParser(
        prog="train.py",
        description="Train a speculator. Where neither --config nor a target is given: configs/quickstart.yaml.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="a YAML file with any of the fields below")
    parser.add_class_arguments(RunConfig, None, fail_untyped=True)
    return parser


_SWITCHES = ("--overwrite_output_dir", "--dry_run")

# What jsonargparse says of a key that no field has, on the command line and in a file.
_UNKNOWN = [
    re.compile(r"unrecognized arguments: --(?P<key>[^\s=]+)", re.IGNORECASE),
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"(?:Key|option) '(?P<key>[^']+)' is not (?:expected|accepted)", re.IGNORECASE),
]


def _explain(parser: ArgumentParser, error: str) -> str:
    """The parser's complaint, with the nearest valid key for an unknown one."""
    found = next((match.groupdict() for pattern in _UNKNOWN if (match := pattern.search(error))), None)
    if found is None:
        return error
    key = f"{found['group']}.{found['key']}" if found.get("group") else found["key"]
    known = [action.dest for action in parser._actions]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"unknown key {key}" + (f": did you mean {near[0]}?" if near else ": --help lists the valid ones")


def _files_first(argv: list[str]) -> list[str]:
    """Flags go over the files, wherever they stand."""
    files, flags = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            files += [word, *islice(words, 1)]
        else:
            (files if word.startswith("--config=") else flags).append(word)
    return files + flags


def parse(argv: list[str]) -> RunConfig:
    """The config of a command line.

    Raises:
        SystemExit: 2 with one line on stderr for an unknown key or an unusable value; 0 after --help.
    """
    parser = build_parser()
    argv = _files_first(argv)
    if not any(word.partition("=")[0] in ("--config", "--target.name_or_path") for word in argv):
        argv = [f"--config={QUICKSTART}", *argv]
    argv = [f"{word}=true" if word in _SWITCHES else word for word in argv]
    alone = (word == "--plan" and after.startswith("--") for word, after in zip(argv, [*argv[1:], "--"], strict=True))
    argv = [f"--plan={HERE}" if here else word for word, here in zip(argv, alone, strict=True)]
    sections = {f"--{name}" for name in section_names()}
    for word, after in zip(argv, [*argv[1:], None], strict=True):
        flag, given, value = word.partition("=")
        if flag == "--config" and (given or after is not None):
            _check_file(value if given else str(after))
        if flag in sections:
            _fail(f"{flag} is a section: give its settings one by one, as {flag}.NAME VALUE")
    try:
        parsed: Namespace = parser.parse_args(argv)
        built = parser.instantiate(parsed)
    except (ArgumentError, OverflowError) as error:  # the latter of an integer that is no float
        _fail(_explain(parser, str(error)))
    config = RunConfig(**{item.name: built[item.name] for item in fields(RunConfig)})
    _check_numbers(config)
    return config
