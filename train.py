"""`accelerate launch train.py [--config FILE] [--section.key value ...]`: parse, then run."""

import sys

from train.config import parse

if __name__ == "__main__":
    config = parse(sys.argv[1:])
    # Only now: importing torch takes seconds, and a mistyped key should not.
    from train.run import main

    sys.exit(main(config))
