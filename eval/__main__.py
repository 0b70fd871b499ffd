"""`speculator eval [tune | compare | gate | lossless]`; --help explains the flags of each command."""

from __future__ import annotations

import sys
from importlib import import_module

from speculator.errors import run_command, start
from speculator.terminal import working

COMMANDS = ("tune", "compare", "gate", "lossless")
"""Subcommands; without one, `eval.run` measures and reports."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code; wrong input is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    name = next((command for command in COMMANDS if argv[:1] == [command]), None)
    module = import_module(f"eval.{name or 'run'}")  # takes seconds, so after `start`
    arguments = module.build_parser().parse_args(argv[1:] if name else argv)
    title = f"eval {name}" if name else "eval"
    with working(title):
        return run_command(title, lambda: module.run(arguments))


if __name__ == "__main__":
    start()
    sys.exit(main())
