"""The config of a command line: defaults, then YAML files, then flags. Mistakes show at once: torch is not imported."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from speculator.errors import CheckedHelp, UserError, printable, removed
from train.config import (
    HERE,
    ROOT,
    HeadOptions,
    LossConfig,
    RunConfig,
    TargetConfig,
    mapping_names,
    optional_names,
    values_of,
)

set_parsing_settings(docstring_parse_attribute_docstrings=True)

CONFIGS = ROOT / "configs"
_EMBEDDED = TargetConfig().name_or_path
_LONGEST_MESSAGE = 500
_FIRST_KEYS = {
    section.name: fields(section.default_factory)[0].name  # type: ignore[arg-type]
    for section in fields(RunConfig)
    if is_dataclass(section.default_factory)
}
_ALONE = {"--plan": HERE, "--dry_run": "true", "--overwrite_output_dir": "true"}
"""Values of flags that stand without one."""


def _fail(message: str) -> NoReturn:
    """Print the message as one line on stderr, and exit with code 2."""
    shown = " ".join(message[:_LONGEST_MESSAGE].split()) + " ..." * (len(message) > _LONGEST_MESSAGE)
    print(f"train.py: {printable(shown)}", file=sys.stderr)
    raise SystemExit(2)


def _check_values(config: RunConfig) -> None:
    """Exit with code 2 and one line for values that the field types accept and no run can use: none, NaN, infinity."""
    optional = set(optional_names())
    for name, value in values_of(config):
        if value in (None, "") and name not in optional:
            _fail(f"{name} has no value")
        if isinstance(value, float) and not math.isfinite(value):
            _fail(f"{name} must be a finite number, got {value}")


class _Parser(CheckedHelp, ArgumentParser):
    pass


@cache
def build_parser() -> ArgumentParser:
    """Return the parser of train.py: a flag `--section.field` per field of `RunConfig`, with its docstring as help."""
    parser = _Parser(
        prog="train.py",
        description="Train a draft head. Without --config: configs/eagle3.yaml for the target that you name, "
        "configs/continue.yaml if you name a head to start from too, configs/quickstart.yaml if you name neither.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="a YAML file with any of the fields below")
    parser.add_class_arguments(RunConfig, None, fail_untyped=True)
    return parser


# jsonargparse's messages for an unknown key, on the command line and in a file.
_UNKNOWN = [
    re.compile(r"unrecognized arguments: --(?P<key>[^\s=]+)", re.IGNORECASE),
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"(?:Key|option) '(?P<key>[^']+)' is not (?:expected|accepted)", re.IGNORECASE),
]


def _explain(parser: ArgumentParser, error: str) -> str:
    """Return a message of the parser in plainer words, with the nearest valid key for an unknown one."""
    found = next((match.groupdict() for pattern in _UNKNOWN if (match := pattern.search(error))), None)
    section = re.search(rf"\"({'|'.join(_FIRST_KEYS)})\":\s+Unable to load config '([^']*)'", error)
    if section:
        return _section(section[1], section[2], "{}: {}")
    if found is None:
        error = re.sub(r'Parser key "([^"]+)":', r"\1:", error)
        error = re.sub(r"Not of type \w*Int: .*: '(.*)'", r"must be a whole number, got \1", error)
        error = re.sub(r"Not of type \w+: .*: ('.*')", r"must be a number, got \1", error)
        error = re.sub(r"Not of type \w+: (\S+) does not conform to restriction v(.*)", r"must be \2, got \1", error)
        return re.sub(r"Expected a <class '(\w+)'>\. Got value: (\S+)", r"expected a value of type \1, got \2", error)
    key = f"{found['group']}.{found['key']}" if found.get("group") else found["key"]
    if gone := removed(key):
        return gone
    known = [action.dest for action in parser._actions]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"unknown key {key}" + (f": did you mean {near[0]}?" if near else ": --help lists the valid ones")


def _section(name: str, value: str, form: str) -> str:
    """Return the message for a section that got a value: the section's first key may be meant.

    `form` has two braces, for key and value: "--{} {}" on the command line, "{}: {}" in a file.
    """
    return f"{name} is a section of keys: did you mean {form.format(f'{name}.{_FIRST_KEYS[name]}', value)}?"


def _check_sections(file: str) -> None:
    """Exit with code 2 if a YAML file has a key twice, or a value as a section: the parser would open it as a file."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        if twice := _twice(yaml.compose(text, yaml.SafeLoader)):
            _fail(f"{file}: {twice}")
        read = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # the parser says it
        return
    for name, value in read.items() if isinstance(read, dict) else ():
        if name in _FIRST_KEYS and isinstance(value, str) and not value.endswith((".yaml", ".yml")):
            _fail(f"{file}: {_section(name, value, '{}: {}')}")


def _twice(node: yaml.Node | None) -> str:
    """Return which key a YAML node, or one below it, has twice, and on which line; "" if none."""
    seen = set[str]()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if str(key.value) in seen:
            return f"line {key.start_mark.line + 1}: {key.value} comes a second time"
        seen.add(str(key.value))
        if below := _twice(value):
            return below
    return ""


def _plain(value: Any) -> Any:
    """Return a value, or a config with all its values, whose numbers of jsonargparse's types are int and float."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _plain(getattr(value, item.name)) for item in fields(value)})
    return next(
        (kind(value) for kind in (int, float) if isinstance(value, kind) and not isinstance(value, bool)), value
    )


def _files_first(argv: list[str]) -> list[str]:
    """Return the words with `--config FILE` at the front, so that flags override it.

    configs/NAME.yaml is found from any working folder.
    """
    files, flags = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            files += [word, *map(_found, islice(words, 1))]
        elif word.startswith("--config="):
            files.append(f"--config={_found(word.removeprefix('--config='))}")
        else:
            flags.append(word)
    return files + flags


def _found(file: str) -> str:
    """Return the path of a config file; configs/NAME.yaml, if it does not exist here, is the project's own."""
    ours = ROOT / file
    return str(ours) if not os.path.exists(file) and ours.parent == CONFIGS and ours.is_file() else file


def default_recipe(argv: list[str]) -> Path:
    """Return the recipe of a command line without --config."""
    words = [word for flag in argv for word in flag.split("=", 1)]
    given = dict(pairwise(words))
    if "--speculator.warm_start" in given:
        return CONFIGS / "continue.yaml"
    embedded = given.get("--target.name_or_path", _EMBEDDED) == _EMBEDDED
    return CONFIGS / ("quickstart.yaml" if embedded else "eagle3.yaml")


def _merging(argv: list[str]) -> list[str]:
    """Return the words with `--NAME '{key: value}'` as `--NAME.key=value`, which keeps the recipe's other keys.

    Exits with code 2 if the value is no such mapping.
    """
    merged, words = [], iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag[2:] not in mapping_names():
            merged.append(word)
            continue
        value = value if equals else next(words, "")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            read = None
        if not isinstance(read, dict) or not all(isinstance(key, str) and key.isidentifier() for key in read):
            _fail(f"{flag} must be a mapping such as '{{name: value}}', got {value!r}")
        merged += [f"{flag}.{key}={each if isinstance(each, str) else json.dumps(each)}" for key, each in read.items()]
    return merged


def _files_of(argv: list[str]) -> list[str]:
    """Return the files that a command line names by --config, in order."""
    words = [part for word in argv for part in word.split("=", 1)]
    return [file for flag, file in pairwise(words) if flag == "--config"]


def _one_length(argv: list[str], config: RunConfig) -> RunConfig:
    """Return the config without `epochs` in each stage whose `max_steps` a later file or a flag gives.

    A stage that an earlier file leaves out by `max_steps: 0` runs if `epochs` are given later. Exits with code 2 if
    flags give both.
    """
    given = {word.partition("=")[0] for word in argv}
    files = [build_parser().parse_args([f"--config={file}"], defaults=False) for file in _files_of(argv)]
    for name in ("stage1", "stage2"):
        lengths = [{key for key in ("max_steps", "epochs") if f"{name}.{key}" in file} for file in files]
        lengths.append({key for key in ("max_steps", "epochs") if f"--{name}.{key}" in given})
        if len(lengths[-1]) == 2 and getattr(config, name).epochs:  # null is no contradiction
            _fail(f"--{name}.max_steps and --{name}.epochs are mutually exclusive")
        last = next(filter(None, reversed(lengths)), set())
        stage = getattr(config, name)
        if last == {"max_steps"}:
            config = replace(config, **{name: replace(stage, epochs=None)})
        elif last == {"epochs"} and stage.epochs and not stage.max_steps:
            config = replace(config, **{name: replace(stage, max_steps=type(stage)().max_steps)})
    return config


def parse(argv: list[str]) -> RunConfig:
    """Return the config of a command line; with a warm start, its head has the shape of the one to start from.

    If no loss is given, a warm start is trained with the loss of our recipe for its architecture and method.

    Exits with code 2 and one line on stderr for an unknown key or an unusable value; with 0 after --help.
    """
    parser = build_parser()
    for flag, value in pairwise([*(part for word in argv for part in word.split("=", 1)), "VALUE"]):
        if flag.startswith("--") and flag[2:] in _FIRST_KEYS:
            _fail(_section(flag[2:], value, "--{} {}"))
    argv = _merging(_files_first(argv))
    for file in _files_of(argv):
        _check_sections(file)
    if not any(word.partition("=")[0] == "--config" for word in argv):
        argv = [f"--config={default_recipe(argv)}", *argv]
    argv = [
        f"{word}={_ALONE[word]}" if word in _ALONE and after.startswith("--") else word
        for word, after in pairwise([*argv, "--"])
    ]
    try:
        parsed: Namespace = parser.parse_args(argv)
        given = parser.parse_args(argv, defaults=False)
        built = parser.instantiate(parsed)
    except TypeError:
        _fail("--config: a section of the file is not a mapping of settings")
    except (ArgumentError, ValueError, OverflowError, OSError, RecursionError) as error:
        _fail(_explain(parser, str(error)))
    config = _plain(RunConfig(**{item.name: built[item.name] for item in fields(RunConfig)}))
    if config.target.name_or_path == _EMBEDDED and not os.path.exists(_EMBEDDED):  # in another folder
        config.target.name_or_path = str(ROOT / _EMBEDDED)
    _check_values(config)
    config = _one_length(argv, config)
    if not config.speculator.warm_start:
        return config
    from train.initialise import with_settings_of_start  # imports torch

    try:
        config = with_settings_of_start(config, vars(given.speculator))
    except (UserError, OSError) as error:
        _fail(str(error))
    return config if given.get("loss") else replace(config, loss=LossConfig(**_loss_of(config.speculator)))


def _loss_of(head: HeadOptions) -> dict[str, float]:
    """Return the `loss` section of our recipe for a head's architecture and method; {} without such a recipe."""
    from train.initialise import head_class

    def method(options: HeadOptions) -> tuple[str, str]:
        return options.architecture, head_class(options).config_class.method(options.options)

    for file in sorted(CONFIGS.glob("*.yaml")):
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
        if "speculator" in recipe and method(HeadOptions(**recipe["speculator"])) == method(head):
            return recipe.get("loss", {})
    return {}
