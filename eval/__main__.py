"""`speculator eval [tune | compare | gate | lossless]`; --help explains the flags of each command."""

from __future__ import annotations

import sys

from speculator.__main__ import run_module
from speculator.errors import start

COMMANDS = ("tune", "compare", "gate", "lossless")
"""Subcommands; without one, `eval.run` measures and reports."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code; wrong input is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in COMMANDS:
        return run_module(f"eval.{argv[0]}", f"eval {argv[0]}", argv[1:])
    return run_module("eval.run", "eval", argv)


if __name__ == "__main__":
    start()
    sys.exit(main())
