"""`python -m speculator`: the commands generate, serve, export, inspect and push."""

from __future__ import annotations

import sys

from speculator.errors import OneLineParser, run_command, start


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 2, with one line on stderr, for wrong input."""
    arguments = build_parser().parse_args(argv)
    return run_command("speculator", lambda: arguments.run(arguments))


def build_parser() -> OneLineParser:
    """Build the parser of all commands."""
    from speculator.cli import export, generate, inspect, push, serve  # importing torch takes seconds

    parser = OneLineParser(prog="python -m speculator")
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {"generate": generate, "serve": serve, "export": export, "inspect": inspect, "push": push}
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        command.set_defaults(run=module.run)
        module.add_flags(command)
    return parser


def console() -> None:
    """Entry point of the script `speculator`."""
    start()
    sys.exit(main())


if __name__ == "__main__":
    console()
