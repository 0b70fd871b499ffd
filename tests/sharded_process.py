"""One of several processes that hold a target together: reads, decodes and trains by it, and saves what came out.

Arguments: the target's folder, the output folder, a head's tuned folder, the number of rows to train on, and the kinds,
as tp, fsdp or tp:2 with the size of a group; none: the target is whole in each process.
"""

import gc
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import PartialState
from conftest import alternating_drafter, tiny_head
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import set_seed

from speculator import (
    Candidates,
    EarlyExitDrafter,
    FixedTree,
    HeadDrafter,
    HybridDrafter,
    NgramDrafter,
    Sampling,
    Target,
    generate,
)
from speculator.checkpoints.loading import load_drafter
from speculator.drafters import tuning
from speculator.drafters.costs import entry_to_json
from speculator.target.sharding import Group
from train.checkpoint import newest
from train.config import LossConfig
from train.trainer import Collator, SpeculatorTrainer, arguments

PROMPTS = [[5, 6, 7, 8, 9, 10], [4, 11, 12], [7] * 9]
LOGGED = 3  # steps per log line of `go_on`, which saves every two steps
SAMPLED = Sampling(1.0, seed=3)


def rows_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:  # [B, S] both, of other sizes for each process
    generator = torch.Generator().manual_seed(rank)
    shape = (2 + rank % 2, 12 + rank)
    return torch.randint(300, shape, generator=generator), (torch.arange(shape[1]) > 5).long().repeat(shape[0], 1)


def read(target: Target, rank: int) -> list[torch.Tensor]:
    """The states of a process's own rows, the taps and logits."""
    with target.aux_layers.recorded([0, 1]) as states:
        hidden = target.hidden(*rows_of(rank))
    for _ in range(rank):  # as a process with more labels does
        target.logits(hidden)
    return [hidden, states(hidden), target.logits(hidden)]


def decode(target: Target, rank: int = 0) -> dict[str, list[list[int]]]:
    """Text of every kind of draft, sampled, and the default one greedily.

    Args:
        rank: of processes that hold the target together; the arithmetic of all but the first is wrong.
    """
    head = tiny_head(vocab_size=300).to(target.dtype)
    for weight in head.parameters() if rank else []:
        weight.data = weight.data.roll(rank, 0)
    drafters = {
        "none": None,
        "across requests": NgramDrafter(3, memory=64),
        "chain": HeadDrafter(head, 3),
        "tree": HeadDrafter(head, Candidates((3, 2))),
        "fixed tree": HeadDrafter(head, FixedTree([(0,), (1,), (0, 0)])),
        "early exit": EarlyExitDrafter(target, 1, 2 if target.recurrent else Candidates((2, 1))),
        "hybrid": HybridDrafter(HeadDrafter(head, 2), NgramDrafter(2)),
        "auto": alternating_drafter(head),
    }
    how = {"max_new_tokens": 8, "max_batch_size": 2, "eos_token_ids": ()}
    with wrong(rank):
        made = {name: generate(target, drafter, PROMPTS, SAMPLED, **how).tokens for name, drafter in drafters.items()}
        return made | {"greedy": generate(target, drafters["chain"], PROMPTS, **how).tokens}


@contextmanager
def wrong(rank: int):
    """Logits are another token's, and large enough to decide against the noise."""
    logits = Target.logits
    Target.logits = lambda target, hidden: logits(target, hidden).roll(rank, -1) * (1 + 100 * rank)
    yield
    Target.logits = logits


def costs_of(target: Target, folder: str, rank: int) -> list[dict]:
    """Measure step costs: the processes' clocks differ, and only the first one's leaves time for all sizes."""
    tuning.SECONDS = 0.0 if rank else 60.0
    drafter = load_drafter(folder, target, temperatures=[0.0], batch_size=2)
    generate(target, drafter, PROMPTS, max_new_tokens=6)
    return [entry_to_json(entry) for entry in drafter.cost.entries]


def trainer_of(
    target: Target,
    folder: Path,
    accumulation: int,
    count: int,
    steps: int | None = None,
    logging_steps: int = 1,
    **settings,
) -> SpeculatorTrainer:
    """A head's, on rows of unequal lengths, eight for a step; by default up to their end."""
    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(16, 24, (count,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(300, (length,), generator=generator).tolist()} for length in lengths]
    set_seed(0)
    head = tiny_head(vocab_size=300)
    return SpeculatorTrainer(
        model=head,
        target=target,
        loss=LossConfig(kl=1.0, cross_entropy=0.1),
        decode=lambda head: {"acceptance_length": 1.0, "acceptance_length_sampled": 1.0},
        args=arguments(
            output_dir=str(folder),
            max_steps=steps or -(-count // 8),
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            lr_scheduler_type="constant",
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-2,
            eval_steps=2,
            save_steps=2,
            logging_steps=logging_steps,
            report_to="none",
        ),
        data_collator=Collator(head.config),
        train_dataset=rows,
        eval_dataset=rows[:8],
        **settings,
    )


def held(target: Target) -> int:
    """Bytes of the weights that this process has of its target."""
    weights = {id(weight): weight for weight in target.model.parameters()}.values()
    tensors = [*weights, *target.model.buffers()]
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def main(folder: str, output: str, head_folder: str, rows: str, *kinds: str) -> None:
    PartialState(cpu=True)
    rank, count = distributed.get_rank(), distributed.get_world_size()
    for kind in kinds:
        parallel, _, size = kind.partition(":")
        target = Target.load(folder, dtype="float64", parallel=parallel, parallel_size=int(size or 0))
        made = {"bytes": held(target), "read": read(target, rank), "fingerprint": target.fingerprint}
        if target.group is not None:
            made["text"] = decode(target, target.group.rank)
            made["costs"] = costs_of(target, head_folder, target.group.rank)
            broadcast, Group.broadcast = Group.broadcast, lambda group, *tensors: tensors
            with wrong(target.group.rank):
                made["each by itself"] = generate(target, None, PROMPTS, SAMPLED, max_new_tokens=8).tokens
            Group.broadcast = broadcast
        with torch.no_grad():
            made["heads"] = target.cache(1, 4).layers[-1].keys.shape[1]
        if parallel == "tp":  # known to be wrong: a pass of rows that are not the same everywhere
            gathered, Group.gathered = Group.gathered, lambda group, rows: rows.repeat(group.size, 1)
            made["apart"] = target.hidden(torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(rank)))
            Group.gathered = gathered
        sharded = parallel != "none"
        trainer = trainer_of(target, Path(output) / kind, 4 // count, int(rows), shard_optimizer=sharded)
        trainer.train()
        made["head"] = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
        made["log"] = trainer.state.log_history
        optimizer = trainer.optimizer.optimizer
        made["moments"] = len(getattr(optimizer, "optim", optimizer).state)
        torch.save(made, Path(output) / f"{kind}.{rank}.pt")
        distributed.barrier()
        del trainer, target
    gc.collect()
    distributed.destroy_process_group()


def go_on(folder: str, output: str, steps: str) -> None:
    """Train up to so many steps, from what other numbers of processes left."""
    PartialState(cpu=True)
    target = Target.load(folder)
    accumulation = 4 // distributed.get_world_size()
    trainer = trainer_of(target, Path(output), accumulation, 48, int(steps), LOGGED, shard_optimizer=True)
    trainer.train(resume_from_checkpoint=(last := newest(Path(output))[0]) and str(last))
    del trainer
    gc.collect()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    go_on(*sys.argv[2:]) if sys.argv[1] == "go_on" else main(*sys.argv[1:])
