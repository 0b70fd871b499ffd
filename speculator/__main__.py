"""`python -m speculator`: the commands of someone who serves."""

from __future__ import annotations

import sys

from speculator.errors import OneLineParser, run_command, start


def main(argv: list[str] | None = None) -> int:
    """Run the command line; gives the exit code. Wrong input is one line on stderr and 2."""
    arguments = build_parser().parse_args(argv)
    return run_command("speculator", lambda: arguments.run(arguments))


def build_parser() -> OneLineParser:
    """The commands and their flags."""
    from speculator.cli import export, generate, inspect, push, serve  # takes seconds: after `start`

    parser = OneLineParser(prog="python -m speculator")
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {"generate": generate, "serve": serve, "export": export, "inspect": inspect, "push": push}
    for name, command in modules.items():
        own = commands.add_parser(name, help=command.HELP, description=command.HELP)
        own.set_defaults(run=command.run)
        command.add_flags(own)
    return parser


if __name__ == "__main__":
    start()
    sys.exit(main())
