"""The processes of a run: how they join and end, what of the machine they use, and which of them reports an error."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from data import batches
from speculator.device import cores, has_accelerator
from speculator.errors import UserError, refuse
from speculator.target.sharding import TIMEOUT
from speculator.terminal import log
from train import interrupts

_WRAPPINGS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
_INSTEAD = "a target in shards is --target.parallel fsdp or tp, the head's moments in shards --shard_optimizer true"
_PATIENCE = 10.0  # seconds in which a launcher notices that a process ended, and ends the others of its machine
Answer = TypeVar("Answer")
_BROKEN = re.compile(r"closed by peer|reset by peer|Broken pipe|remote process|network error|likely closed")


def join() -> PartialState:
    """Join the run's processes (this one alone without a launcher), and return accelerate's state of this one.

    The recipe alone decides about precision and compilation, so those of accelerate's own configuration are dropped.
    Raises a UserError if accelerate is configured to shard the head.
    """
    for variable, what in _WRAPPINGS.items():
        asked = os.environ.get(variable, "").lower() in ("1", "true")
        refuse((asked, f"accelerate is set to {what}: start with a file of configs/accelerate; {_INSTEAD}"))
    os.environ |= {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}
    return batches.state(timeout=TIMEOUT)


@contextmanager
def one_process_reports() -> Iterator[None]:
    """Hold back the error of a block in all but one process per machine, so that one of them reports why a run ends.

    The launcher ends all processes once one has ended with its error. So a failing process waits 10 s for that, and
    only then raises
    - its error, if it is not its machine's first process: most errors hit all processes
    - a UserError, if it lost the connection to another process: that one's error is the cause
    A process to which both apply waits 20 s. The other errors, and all of a single process, are raised at once.
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
                "names it; the same command resumes from the newest checkpoint"
            ) from None
        raise


def of_first(ask: Callable[[], Answer]) -> Answer:
    """Call `ask` in the first process, and return its answer in all: nodes may see different files on a shared disk."""
    return broadcast_object_list([ask() if PartialState().is_main_process else None])[0]


def leave() -> None:
    """Destroy the process group, whose threads would abort the interpreter if they outlived it."""
    if torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()


def log_unused_gpus(state: PartialState) -> None:
    """Print how to use all GPUs if one process sees several."""
    count = torch.accelerator.device_count() if has_accelerator() else 0
    if state.num_processes == 1 and count > 1:
        log(
            f"{count} GPUs are visible, one process uses one; "
            f"`accelerate launch --multi_gpu --num_processes {count} train.py` uses all"
        )


def use_all_cores() -> None:
    """Undo the one intra-op thread that accelerate's launcher forces on a CPU run."""
    if not has_accelerator():
        torch.set_num_threads(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
