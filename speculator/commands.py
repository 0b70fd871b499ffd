"""Run a command that is one module: `build_parser()` defines its flags, and `run(arguments)` does the work."""

from __future__ import annotations

from importlib import import_module

from speculator.errors import run_command
from speculator.terminal import working


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
