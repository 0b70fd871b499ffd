"""`accelerate launch train.py [--config FILE] [--section.key value ...]`: parse, then run."""

import sys

from speculator.errors import start

if __name__ == "__main__":
    start()  # first: the pipe of `install` would take the number of a stream that is closed
    from train.__main__ import main

    sys.exit(main())
