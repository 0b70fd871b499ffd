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
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from speculator.errors import OneLineParser, run_command, start
from speculator.terminal import working
from speculator.workshop import make_importable

COMMANDS = {name: f"speculator.cli.{name}" for name in ("generate", "serve", "inspect", "export", "dequantise", "push")}
COMMANDS["adapt"] = "train.adapt"
"""Modules with `HELP`, `add_flags(parser)` and `run(arguments)`."""
WORKSHOP = {"train": "train.__main__", "data": "data.__main__", "eval": "eval.__main__"}
"""Packages whose commands have parsers of their own: modules with `main(argv)`."""
_MAINS = {**WORKSHOP, "server-command": "train.server_command"}
_SILENT = ("inspect", "export", "dequantise", "push")
"""Commands of `COMMANDS` that print nothing while they work."""
_DISTRIBUTION = "speculator-llm"


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 2 after wrong input, with one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(prog="speculator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"speculator {_version()}")
    parser.add_argument("command", choices=(*_MAINS, *COMMANDS))
    if not argv:
        parser.print_help()
        return 0
    command = parser.parse_args(argv[:1]).command
    if command in _MAINS:
        return _module(command).main(argv[1:])
    arguments = build_parser(command).parse_args(argv[1:])
    with working(command) if command in _SILENT else nullcontext():
        return run_command("speculator", lambda: arguments.run(arguments))


def _version() -> str:
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def _module(command: str) -> Any:
    """Import the module of one command, which takes seconds.

    Exits with code 2 and one line if a package of the extra `train` is missing, which some commands need.
    """
    name = {**_MAINS, **COMMANDS}[command]
    if name.startswith("speculator."):
        return import_module(name)
    make_importable()
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        print(
            f"speculator {command}: the package {error.name} is missing: pip install '{_DISTRIBUTION}[train]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def run_module(module: str, title: str, argv: list[str]) -> int:
    """Parse the flags of a command and run it; return its exit code: 2 after wrong input, with one line on stderr.

    Args:
        module: name of the command's module. Only this one is imported, because libraries take seconds.
        title: name of the command in its errors and progress lines.
    """
    command = import_module(module)
    arguments = command.build_parser().parse_args(argv)
    with working(title):
        return run_command(title, lambda: command.run(arguments))


def build_parser(command: str) -> OneLineParser:
    """Build the parser of one of `COMMANDS`."""
    module = _module(command)
    parser = OneLineParser(prog=f"speculator {command}", description=module.HELP)
    parser.set_defaults(run=module.run)
    module.add_flags(parser)
    return parser


def console() -> None:
    """Entry point of the script `speculator`."""
    start()
    sys.exit(main())


if __name__ == "__main__":
    console()
