"""`speculator train`, and what `accelerate launch train.py` runs: parse, then train."""

from __future__ import annotations

import sys

from train import interrupts


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code; wrong input is one line on stderr and exit code 2."""
    interrupts.install()  # before all that takes time
    from train.command_line import parse

    config = parse(sys.argv[1:] if argv is None else argv)
    # Only now: importing torch takes seconds, and a mistyped key should not.
    from train.run import main as run

    return run(config)


if __name__ == "__main__":
    from speculator.errors import start

    start()
    sys.exit(main())
