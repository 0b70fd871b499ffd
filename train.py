"""`accelerate launch train.py [--config FILE] [--section.key value ...]`: parse, then run."""

import sys

from speculator.errors import start
from train import interrupts

if __name__ == "__main__":
    start()  # first: the pipe of `install` would take the number of a stream that is closed
    interrupts.install()  # before all that takes time
    from train.command_line import parse

    config = parse(sys.argv[1:])
    # Only now: importing torch takes seconds, and a mistyped key should not.
    from train.run import main

    sys.exit(main(config))
