"""train.py with two data loaders, which a run has on GPUs only."""

import sys

from speculator.errors import start
from train import interrupts

if __name__ == "__main__":
    start()
    interrupts.install()
    from train import run, stages
    from train.command_line import parse

    on_cpu = stages.arguments

    def arguments(**fields):
        made = on_cpu(**fields)
        made.dataloader_num_workers = 2
        return made

    stages.arguments = arguments
    sys.exit(run.main(parse(sys.argv[1:])))
