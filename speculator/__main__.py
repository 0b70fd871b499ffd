"""`python -m speculator`: use a trained head.

    generate    continue prompts or chat
    serve       start a server with OpenAI's API
    adapt       train the head on the server's answers, and load it there if it is faster
    inspect     describe a head's folder
    export      write a head in another checkpoint layout
    push        upload a head to the Hugging Face hub

`python -m speculator COMMAND --help` lists the flags.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from speculator.errors import OneLineParser, run_command, start

COMMANDS = ("generate", "serve", "adapt", "inspect", "export", "push")


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 2 after wrong input, with one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(
        prog="python -m speculator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    command = parser.parse_args(argv[:1]).command
    arguments = build_parser(command).parse_args(argv[1:])
    return run_command("speculator", lambda: arguments.run(arguments))


def build_parser(command: str) -> OneLineParser:
    """Build the parser of one command."""
    module = import_module(f"speculator.cli.{command}")  # takes seconds, so only the command that is asked for
    parser = OneLineParser(prog=f"python -m speculator {command}", description=module.HELP)
    parser.set_defaults(run=module.run)
    module.add_flags(parser)
    return parser


def console() -> None:
    """Entry point of the script `speculator`."""
    start()
    sys.exit(main())


if __name__ == "__main__":
    console()
