"""What the pages take from the code: tables of flags, settings, GPUs and public names.

`python docs/generated.py` writes them into the pages, between lines such as `<!-- generated: flags eval -->` and
`<!-- end -->`. As an extension of Sphinx, this module adds what only the site shows: the navigation, and docstrings.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import chart

DOCS = Path(__file__).resolve().parent
MARK = re.compile(r"^(<!-- generated: (\w+) ?(.*?) -->\n)(?s:.*?)^(<!-- end -->)$", re.MULTILINE)
_SHARED_BY = 3
"""Commands that have a flag in common when the table of shared flags has it."""
_SECTIONS = {
    "Tutorials": ["tutorials/quickstart", "tutorials/*"],
    "Guides": ["guides/data", "guides/heads", "guides/hardware", "guides/targets", "guides/*"],
    "Reference": ["reference/*"],
    "Explanation": ["explanation/step", "explanation/*"],
    "Results": ["results"],
    "Contributing": ["contributing/index", "contributing/*"],
}
_MEMBERS = {
    "Target": "load",
    "Generation": "",
    "Engine": "request, submit, step, run, generate, replace_drafter",
    "Request": "cancel",
    "Drafter": "",
}
"""Names of which the site shows members, and which (empty: all)."""


def setup(app: Any) -> dict[str, bool]:
    """Register this module as an extension of Sphinx."""
    app.connect("source-read", extend)
    return {"parallel_read_safe": True}


def extend(app: Any, page: str, source: list[str]) -> None:
    """Add the navigation to the index, and docstrings to the page of Python's names."""
    if page == "index":
        source[0] += "".join(
            "\n```{toctree}\n:hidden:\n:glob:\n:caption: " + "\n".join([caption, "", *pages, "```\n"])
            for caption, pages in _SECTIONS.items()
        )
    if page == "reference/python":
        directives = "\n".join(map(_directive, public_names()))
        source[0] += "\n## Docstrings\n\n```{eval-rst}\n.. currentmodule:: speculator\n" + directives + "\n```\n"


def _directive(name: str) -> str:
    value = getattr(import_module("speculator"), name)
    kind = "exception" if name.endswith("Error") else "class" if isinstance(value, type) else "function"
    members = f"\n   :members: {_MEMBERS[name]}" if name in _MEMBERS else ""
    return f".. auto{kind}:: {name}{members}"


def filled(text: str) -> str:
    """Return the text of a page with its tables as the code has them now."""
    return MARK.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]](mark[3])}\n\n{mark[4]}", text)


def stale() -> dict[Path, str]:
    """Return the pages whose tables differ from the code, and the chart; each with the text that it should have."""
    wanted = {page: filled(page.read_text()) for page in sorted(DOCS.rglob("*.md"))} | {chart.CHART: chart.svg()}
    return {page: text for page, text in wanted.items() if page.read_text() != text}


def commands() -> list[str]:
    """Return the commands whose flags the reference lists, besides `speculator train`."""
    return [*import_module("speculator.__main__").COMMANDS, "server-command"]


def public_names() -> list[str]:
    """Return the names that the package exports."""
    return import_module("speculator").__all__


@cache
def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of `train.py`, or of a command of `speculator`."""
    if command == "train.py":
        return import_module("train.command_line").build_parser()
    if command == "server-command":
        return import_module("train.server_command").build_parser()
    return import_module("speculator.__main__").build_parser(command.removeprefix("speculator "))


def flags(command: str) -> str:
    """Table of a command's own flags, and the names of its shared ones."""
    rows, common = _flags(command), _shared()
    own = _table(["flag", "meaning"], [row for row in rows if row not in common])
    names = ", ".join(row[0].split()[0].strip("`").join("``") for row in rows if row in common)
    return f"{own}\n\nShared: {names}" if names else own


def shared(_: str) -> str:
    """Table of the flags that several commands share."""
    return _table(["flag", "meaning"], _shared())


@cache
def _shared() -> list[tuple[str, str]]:
    counts = Counter(row for command in commands() for row in _flags(command))
    return [row for row, count in counts.items() if count >= _SHARED_BY]


@cache
def _flags(command: str) -> list[tuple[str, str]]:
    return [_flag(action) for action in parser_of(command)._actions if action.dest != "help"]


def _flag(action: argparse.Action) -> tuple[str, str]:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    value = str(action.metavar or action.dest.upper())
    if action.option_strings and action.nargs != 0 and value != action.dest.upper():
        name = f"{name} {value}".replace("|", "\\|")  # a bare one would end the cell
    choices = f": {', '.join(f'`{choice}`' for choice in action.choices)}" if action.choices else ""
    return f"`{name}`", "**Required:** " * action.required + _text(action.help) + choices


def settings(names: str) -> str:
    """Table of the settings of a section of a run's config, or of two like ones; of those outside all sections ("")."""
    first, *others = names.split() or [""]
    declared = import_module("train.options.loader").options(import_module("train.options.config").RunConfig)
    rows: dict[str, list[str]] = {}
    for section in (first, *others):
        for dotted, option in declared.items():
            parent, _, name = dotted.rpartition(".")
            if parent == section and not option.is_section:
                default = _default(option.default)
                if name not in rows:
                    rows[name] = [f"`--{dotted}`", default, _text(option.help)]
                elif rows[name][1] != default:
                    rows[name][1] += f"; {section}: {default or 'none'}"
    return _table(["setting", "default", "meaning"], rows.values())


def gpus(_: str) -> str:
    """Table of the GPUs that `--plan` knows."""
    header = ["name", "memory, GB", "bandwidth, TB/s", "TFLOP/s in 16 bits", "TFLOP/s in float32"]
    return _table(header, ([name, *map(str, gpu)] for name, gpu in import_module("train.door.gpus").GPUS.items()))


def names(_: str) -> str:
    """Table of the names that the package exports."""
    documented = ((name, getattr(import_module("speculator"), name).__doc__ or "") for name in public_names())
    return _table(["name", "what it is"], ([f"`{name}`", _text(text.partition("\n")[0])] for name, text in documented))


def _default(value: Any) -> str:
    return "" if value is None or value is False else f"`{value}`"


def _text(help_: str | None) -> str:
    text = " ".join((help_ or "").replace("%%", "%").split())
    return re.sub(r"([|<*])", r"\\\1", text)


def _table(header: list[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"|{'|'.join(cells)}|" for cells in (header, ["---"] * len(header), *rows))


TABLES: dict[str, Callable[[str], str]] = {each.__name__: each for each in (flags, shared, settings, gpus, names)}

if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))
    for page, text in stale().items():
        page.write_text(text)
        print(page)
