"""Tables of the reference that come from the code: flags of the commands, settings of a run, GPUs of `--plan`.

A page has a line such as `<!-- generated: flags eval -->`, which `fill` replaces when Sphinx reads the page.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

_MARK = re.compile(r"^<!-- generated: (\w+) ?(.*?) -->$", re.MULTILINE)


def setup(app: Any) -> dict[str, bool]:
    """Register this module as an extension of Sphinx."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True}


def fill(app: Any, page: str, source: list[str]) -> None:
    """Replace the marks of a page."""
    source[0] = _MARK.sub(lambda mark: TABLES[mark[1]](mark[2]), source[0])


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of `train.py`, or of a command of `speculator`."""
    if command == "train.py":
        return import_module("train.command_line").build_parser()
    if command == "server-command":
        return import_module("train.server_command").build_parser()
    return import_module("speculator.__main__").build_parser(command.removeprefix("speculator "))


def flags(command: str) -> str:
    """Table of a command's flags."""
    actions = [action for action in parser_of(command)._actions if action.dest != "help"]
    return _table(["flag", "meaning"], map(_flag, actions))


def _flag(action: argparse.Action) -> list[str]:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        name = f"{name} {action.metavar or action.dest.upper()}"
    choices = f": {', '.join(f'`{choice}`' for choice in action.choices)}" if action.choices else ""
    return [f"`{name}`", "**Required:** " * action.required + _text(action.help) + choices]


def settings(section: str) -> str:
    """Table of the settings of a section of a run's config, or of those outside all sections."""
    config = import_module("train.config")
    sections = set(config.section_names())
    rows = [
        [f"`--{action.dest}`", _default(action.default), _text(action.help)]
        for action in parser_of("train.py")._actions
        if action.option_strings
        and action.dest not in sections | {"help", "config", "print_config"}
        and action.dest.rpartition(".")[0] == section
    ]
    return _table(["setting", "default", "meaning"], rows)


def gpus(_: str) -> str:
    """Table of the GPUs that `--plan` knows."""
    header = ["name", "memory, GB", "bandwidth, TB/s", "TFLOP/s in 16 bits", "TFLOP/s in float32"]
    return _table(header, ([name, *map(str, gpu)] for name, gpu in import_module("train.gpus").GPUS.items()))


def _default(value: Any) -> str:
    return "" if value is None or value is False else f"`{value}`"


def _text(help_: str | None) -> str:
    text = " ".join((help_ or "").replace("%%", "%").split())
    return re.sub(r"([|<*])", r"\\\1", text)


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    def lines() -> Iterator[str]:
        for cells in (header, ["---"] * len(header), *rows):
            yield f"| {' | '.join(cells)} |"

    return "\n".join(lines())


TABLES: dict[str, Callable[[str], str]] = {"flags": flags, "settings": settings, "gpus": gpus}
