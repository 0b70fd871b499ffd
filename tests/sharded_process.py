"""One of several processes that hold a target together: reads, decodes and trains by it, and saves what came out.

Arguments: the target's folder, the output folder, and the kinds, as tp, fsdp or tp:2 with the size of a group.
"""

import gc
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from conftest import tiny_head
from torch import distributed
from transformers import set_seed

from speculator import Candidates, HeadDrafter, NgramDrafter, Sampling, Target, engine, generate
from train.checkpoint import newest
from train.config import LossConfig
from train.trainer import Collator, SpeculatorTrainer, arguments

PROMPTS = [[5, 6, 7, 8, 9, 10], [4, 11, 12], [7] * 9]


def rows_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:  # [B, S] both, of other sizes for each process
    generator = torch.Generator().manual_seed(rank)
    shape = (2 + rank % 2, 12 + rank)
    return torch.randint(300, shape, generator=generator), (torch.arange(shape[1]) > 5).long().repeat(shape[0], 1)


def read(target: Target, rank: int) -> list[torch.Tensor]:
    """The states of a process's own rows, the taps and logits."""
    with target.taps.recorded([0, 1]) as states:
        hidden = target.hidden(*rows_of(rank))
    return [hidden, states(hidden), target.logits(hidden)]


def decode(target: Target) -> list[list[list[int]]]:
    """Text of every kind of draft, greedy and sampled."""
    head = tiny_head(vocab_size=300).to(target.dtype)
    drafters = [None, NgramDrafter(3), HeadDrafter(head, 3), HeadDrafter(head, Candidates((3, 2)))]
    how = {"max_new_tokens": 16, "max_batch_size": 2, "eos_token_ids": ()}
    settings = [Sampling(), Sampling(1.0, seed=3)]
    return [generate(target, who, PROMPTS, sampling, **how).tokens for who in drafters for sampling in settings]


def trainer_of(
    target: Target, folder: Path, accumulation: int, steps: int = 3, count: int = 19, **settings
) -> SpeculatorTrainer:
    """A head's, on rows of unequal lengths; by default the third step is the end of the rows, and its batches short."""
    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(16, 24, (count,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(300, (length,), generator=generator).tolist()} for length in lengths]
    set_seed(0)
    return SpeculatorTrainer(
        model=tiny_head(vocab_size=300),
        target=target,
        loss=LossConfig(kl=1.0, cross_entropy=0.1),
        decode=lambda head: {"tokens_per_step": 1.0, "tokens_per_step_sampled": 1.0},
        args=arguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            lr_scheduler_type="constant",
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-2,
            eval_steps=2,
            save_steps=2,
            logging_steps=1,
            report_to="none",
        ),
        data_collator=Collator(3),
        train_dataset=rows,
        eval_dataset=rows[:8],
        **settings,
    )


def disagreeing(draw, rank: int):
    """What a process draws whose arithmetic is not the first one's."""
    return lambda probs, u: (draw(probs, u) + rank) % 300


def main(folder: str, output: str, *kinds: str) -> None:
    PartialState(cpu=True)
    rank, count = distributed.get_rank(), distributed.get_world_size()
    for kind in kinds:
        parallel, _, size = kind.partition(":")
        target = Target.load(folder, dtype="float64", parallel=parallel, parallel_size=int(size or 0))
        made = {"read": read(target, rank), "text": decode(target), "fingerprint": target.fingerprint}
        with torch.no_grad():
            made["heads"] = target.cache(1, 4).layers[0].keys.shape[1]
        draw = engine.draw
        engine.draw = disagreeing(draw, target.group.rank if target.group else 0)
        made["disagreeing"] = generate(target, None, PROMPTS, Sampling(1.0, seed=3), max_new_tokens=16).tokens
        engine.draw = draw
        if parallel == "tp":  # known to be wrong: a pass of rows that are not the same everywhere
            gathered = type(target.group).gathered
            type(target.group).gathered = lambda group, rows: rows.repeat(group.size, 1)
            tokens = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(rank))
            made["apart"] = target.hidden(tokens)
            type(target.group).gathered = gathered
        trainer = trainer_of(target, Path(output) / kind, 4 // count, shard_optimizer=parallel != "none")
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
    trainer = trainer_of(target, Path(output), accumulation, int(steps), 48, shard_optimizer=True)
    trainer.train(resume_from_checkpoint=(last := newest(Path(output))[0]) and str(last))
    del trainer
    gc.collect()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    go_on(*sys.argv[2:]) if sys.argv[1] == "go_on" else main(*sys.argv[1:])
