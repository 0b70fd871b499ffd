"""`speculator data`: turn text into rows of tokens.

    prepare     tokenise and pack sources into a folder of rows
    generate    let the target continue prompts, as training data for its draft head
    view        show rows as text, and which of their tokens have loss

`speculator data COMMAND --help` lists the flags.
"""

from __future__ import annotations

import argparse
import sys

from speculator.__main__ import COMMANDS, run
from speculator.errors import OneLineParser, start


def main(argv: list[str] | None = None) -> int:
    """Run a command of `speculator data` (default: `sys.argv`) and return its exit code: 2 after wrong input."""
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(
        prog="speculator data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=[name.split()[1] for name in COMMANDS if name.startswith("data ")])
    command = parser.parse_args(argv[:1]).command
    return run(f"data {command}", argv[1:])


if __name__ == "__main__":
    start()
    sys.exit(main())
