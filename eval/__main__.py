"""`python -m eval`: acceptance and speed, tuning, comparing, losslessness. Each explains its flags with --help."""

from __future__ import annotations

import sys
from importlib import import_module

from speculator.errors import run_command, start

COMMANDS = ("tune", "compare", "lossless")
"""Beside the one without a name, `eval.run`."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; gives the exit code. Wrong input is one line on stderr and 2."""
    argv = sys.argv[1:] if argv is None else argv
    name = next((command for command in COMMANDS if argv[:1] == [command]), None)
    module = import_module(f"eval.{name or 'run'}")  # takes seconds: after `start`
    arguments = module.build_parser().parse_args(argv[1:] if name else argv)
    return run_command(f"eval {name}" if name else "eval", lambda: module.run(arguments))


if __name__ == "__main__":
    start()
    sys.exit(main())
