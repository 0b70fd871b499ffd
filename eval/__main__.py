"""`speculator eval [tune | compare | gate | lossless]`; --help explains the flags of each command."""

from __future__ import annotations

import sys

from speculator.__main__ import COMMANDS, run
from speculator.errors import start


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code (2: wrong input); without a command's name, `eval.run` measures."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and f"eval {argv[0]}" in COMMANDS:
        return run(f"eval {argv[0]}", argv[1:])
    return run("eval", argv)


if __name__ == "__main__":
    start()
    sys.exit(main())
