"""`python -m data`: text into token rows.

    prepare     tokenise and pack sources into a folder of rows
    generate    let the target write the text that its speculator loss_mask from
    view        show rows, and which of their tokens are learnt

Each explains its flags with --help.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from speculator.errors import OneLineParser, run_command, start

COMMANDS = ("prepare", "generate", "view")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; gives the exit code. Wrong input is one line on stderr and 2."""
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(
        prog="python -m data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    command = parser.parse_args(argv[:1]).command
    # Only the one that runs: `generate` loads what a model needs, the others don't.
    module = import_module(f"data.cli.{command}")
    arguments = module.build_parser().parse_args(argv[1:])
    return run_command(f"data {command}", lambda: module.run(arguments))


if __name__ == "__main__":
    start()
    sys.exit(main())
