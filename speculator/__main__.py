"""`speculator`, or `python -m speculator`: train a draft head, measure it, and use it.

    train           train a head
    server-command  print the line that starts a server for training, and check the server
    data            prepare, generate or view training data
    eval            measure a head: report, tune, compare, gate, lossless
    generate        continue prompts or chat
    serve           start a server with OpenAI's API
    adapt           train the head on the server's answers, and load it there if it is faster
    inspect         describe a head's folder
    export          write a head in another checkpoint layout
    dequantise      write the model of a GGUF file as a folder, for servers that read no GGUF
    push            upload a head to the Hugging Face hub

`speculator COMMAND --help` lists the flags.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from speculator.about import DISTRIBUTION, version_line
from speculator.errors import OneLineParser, run_command, start
from speculator.terminal import working
from speculator.workshop import make_importable

COMMANDS = {name: f"speculator.cli.{name}" for name in ("generate", "serve", "inspect", "export")}
COMMANDS |= {name: f"speculator.cli.{name}" for name in ("dequantise", "push")}
COMMANDS |= {f"data {name}": f"data.cli.{name}" for name in ("prepare", "generate", "view")}
COMMANDS |= {f"eval {name}": f"eval.{name}" for name in ("tune", "compare", "gate", "lossless")}
COMMANDS |= {"eval": "eval.run", "adapt": "train.adapt"}
"""Commands and their modules, which have `run(arguments)`.

The module `flags` next to each has a function of its name, which adds the flags to a parser.
"""
PACKAGES = {"train": "train.__main__", "data": "data.__main__", "eval": "eval.__main__"}
"""Packages that start as `python -m PACKAGE` too, and their modules, which have `main(argv)`."""
_MAINS = {**PACKAGES, "server-command": "train.server_command"}
_SPEAKING = ("generate", "serve", "adapt")
"""Commands that print while they work."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line (default: the process's); return its exit code: 2 after wrong input, with a line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(prog="speculator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="print version, commit, torch and device")
    parser.add_argument("command", choices=(*_MAINS, *(name for name in COMMANDS if name.split()[0] not in _MAINS)))
    if not argv:
        parser.print_help()
        return 0
    command = parser.parse_args(argv[:1]).command
    if command in _MAINS:
        return _import(_MAINS[command], command).main(argv[1:])
    return run(command, argv[1:])


def build_parser(command: str) -> OneLineParser:
    """Return the parser of one of `COMMANDS`. The libraries that its work needs are not imported: they take seconds."""
    package, _, name = COMMANDS[command].rpartition(".")
    add_flags = getattr(_import(f"{package}.flags", command), name)
    parser = OneLineParser(prog=f"speculator {command}", description=inspect.getdoc(add_flags))
    add_flags(parser)
    return parser


def run(command: str, argv: list[str]) -> int:
    """Parse the flags of one of `COMMANDS`, run it, and return its exit code."""
    arguments = build_parser(command).parse_args(argv)
    title = command if command.split()[0] in PACKAGES else "speculator"
    with nullcontext() if command in _SPEAKING else working(command):
        work = _import(COMMANDS[command], command)  # here, where Ctrl-C ends the process at once
        return run_command(title, lambda: work.run(arguments))


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.exit(run_command(parser.prog, lambda: print(version_line())))


def _import(name: str, command: str) -> Any:
    """Import the module `name`, which takes seconds; exit with code 2 if a package of the extra `train` is missing."""
    if name.startswith("speculator."):
        return import_module(name)
    make_importable()
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        print(
            f"speculator {command}: the package {error.name} is missing: pip install '{DISTRIBUTION}[train]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def console() -> None:
    """Entry point of the script `speculator`."""
    start()
    sys.exit(main())


if __name__ == "__main__":
    console()
