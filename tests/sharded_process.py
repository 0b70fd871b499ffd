"""One of several processes that hold a target together: reads and trains by it, and saves what came out.

Arguments: the target's folder, the output folder, the number of rows to train on, and the kinds: tp, fsdp or tp:2 with
the size of a group; none: the target is whole in each process.
"""

import gc
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from conftest import tiny_head
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import set_seed

from speculator.target.in_process import InProcessTarget
from speculator.target.sharding import Group
from train.checkpoint import newest
from train.loop import Loop, Progress
from train.options.config import LossConfig, StageConfig
from train.states.batch import Collator, StageRows, StateSource

LOGGED = 3  # steps per log line of `go_on`, which saves every two steps


def rows_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:  # [B, S] both, of other sizes for each process
    generator = torch.Generator().manual_seed(rank)
    shape = (2 + rank % 2, 12 + rank)
    return torch.randint(300, shape, generator=generator), (torch.arange(shape[1]) > 5).long().repeat(shape[0], 1)


def read(target: InProcessTarget, rank: int) -> list[torch.Tensor]:
    """The states of a process's own rows, the taps and logits."""
    with target.aux_layers.recorded([0, 1]) as states:
        hidden = target.hidden(*rows_of(rank))
    for _ in range(rank):  # as a process with more labels does
        target.logits(hidden)
    return [hidden, states(hidden), target.logits(hidden)]


def loop_of(
    target: InProcessTarget,
    folder: Path,
    accumulation: int,
    count: int,
    steps: int | None = None,
    logging_steps: int = 1,
    sharded: bool = False,
) -> Loop:
    """A head's, on rows of unequal lengths, eight for a step; by default up to their end."""
    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(16, 24, (count,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(300, (length,), generator=generator).tolist()} for length in lengths]
    set_seed(0)
    head = tiny_head(vocab_size=300)
    stage = StageConfig(
        max_steps=steps or -(-count // 8),
        per_device_train_batch_size=2,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=0,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        eval_steps=2,
        save_total_limit=99,
        logging_steps=logging_steps,
    )
    source, loss = StateSource(target, head.aux_layers), LossConfig(kl=1.0, cross_entropy=0.1)
    rows = StageRows(rows, Collator(head.config), validation=rows[:8], evaluation_batch=2)
    return Loop(head, source, stage, loss, rows, folder, sharded=sharded)


def held(target: InProcessTarget) -> int:
    """Bytes of the weights that this process has of its target."""
    weights = {id(weight): weight for weight in target.model.parameters()}.values()
    tensors = [*weights, *target.model.buffers()]
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def main(folder: str, output: str, rows: str, *kinds: str) -> None:
    PartialState(cpu=True)
    rank, count = distributed.get_rank(), distributed.get_world_size()
    for kind in kinds:
        parallel, _, size = kind.partition(":")
        target = InProcessTarget.load(folder, dtype="float64", parallel=parallel, parallel_size=int(size or 0))
        made = {"bytes": held(target), "read": read(target, rank), "fingerprint": target.fingerprint}
        made["embedding_is_shared"] = isinstance(target.model.get_input_embeddings().weight, DTensor)
        if parallel == "tp":  # known to be wrong: a pass of rows that are not the same everywhere
            gathered, Group.gathered = Group.gathered, lambda group, rows: rows.repeat(group.size, 1)
            made["apart"] = target.hidden(torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(rank)))
            Group.gathered = gathered
        loop = loop_of(target, Path(output) / kind, 4 // count, int(rows), sharded=parallel != "none")
        made["log"] = loop.run().log_history
        made["head"] = {name: weight.detach() for name, weight in loop.head.named_parameters()}
        made["moments"] = len(getattr(loop.optimizer, "optim", loop.optimizer).state)
        torch.save(made, Path(output) / f"{kind}.{rank}.pt")
        distributed.barrier()
        del loop, target
    gc.collect()
    distributed.destroy_process_group()


def go_on(folder: str, output: str, steps: str) -> None:
    """Train up to so many steps, from what other numbers of processes left."""
    PartialState(cpu=True)
    target = InProcessTarget.load(folder)
    accumulation = 4 // distributed.get_world_size()
    loop = loop_of(target, Path(output), accumulation, 48, int(steps), LOGGED, sharded=True)
    if last := newest(Path(output))[0]:
        loop.resume(last, Progress.read(last))
    loop.run()
    del loop
    gc.collect()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    go_on(*sys.argv[2:]) if sys.argv[1] == "go_on" else main(*sys.argv[1:])
