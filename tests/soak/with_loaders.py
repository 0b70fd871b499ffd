"""train.py with two data loaders, which a run has on GPUs only."""

import sys

from speculator.errors import start
from train import interrupts

if __name__ == "__main__":
    start()
    interrupts.install()
    from train import run
    from train.command_line import parse
    from train.states import batch

    on_cpu = batch.DataLoader
    batch.DataLoader = lambda *positional, **named: on_cpu(*positional, **named | {"num_workers": 2})
    sys.exit(run.main(parse(sys.argv[1:])))
