"""`python -m data`: text into rows to train on."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["generate"]:
        from data.commands.generate import main as generate

        return generate(argv[1:])
    print("data: no such command: generate", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
