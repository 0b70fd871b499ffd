"""`python -m eval`: what `eval.command` says."""

from __future__ import annotations

import sys

from speculator.errors import start


def main(argv: list[str] | None = None) -> int:
    """Run the command line; gives the exit code. Wrong input is one line on stderr and 2."""
    from eval import command  # takes seconds: after `start`

    return command.main(argv)


if __name__ == "__main__":
    start()
    sys.exit(main())
