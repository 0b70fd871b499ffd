"""The processes of a run: how they come together, and which of them speaks when one ends."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import PartialState

from speculator.errors import UserError, refuse
from train import interrupts

TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others in a collective: longer than one writes a checkpoint while the rest wait."""
_WRAPPINGS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
_INSTEAD = "a target in shards is --target.parallel fsdp or tp, the head's moments in shards --shard_optimizer true"
_PATIENCE = 10.0  # seconds in which a launcher sees that one has ended, and ends the others of its machine
_BROKEN = re.compile(r"closed by peer|reset by peer|Broken pipe|remote process|network error|likely closed")


def join() -> PartialState:
    """This process among those of the run; alone where no launcher started it.

    The group is made here, long before `TrainingArguments` come with a `ddp_timeout` of their own.

    Raises:
        UserError: the launcher asks for a wrapping that would take the head apart.
    """
    for variable, what in _WRAPPINGS.items():
        asked = os.environ.get(variable, "").lower() in ("1", "true")
        refuse((asked, f"accelerate is set to {what}: start with a file of configs/accelerate; {_INSTEAD}"))
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=TIMEOUT)


@contextmanager
def one_speaks() -> Iterator[None]:
    """Of the processes of a machine one says why a run ends, and the launcher names it.

    The launcher ends all once one has ended. So who has only lost the connection to another waits for that, without a
    word; so does, unless it is the machine's first, who fails, since most faults are everybody's.

    Raises:
        UserError: the connection to a process was lost and no launcher came: it ran on another machine.
    """
    try:
        yield
    except Exception as error:
        if not torch.distributed.is_initialized():
            raise
        lost = isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        if lost or not first:
            interrupts.wait_for_end(_PATIENCE * (lost + (not first)))
        if lost:
            raise UserError(
                f"rank {PartialState().process_index} lost the connection to another; where that one ran, its launcher "
                "names it; the same command goes on from the newest checkpoint"
            ) from None
        raise
