"""A target that several processes hold together, sharded by transformers itself: who they are, how they stay in step.

The processes of a group hold one target. Each runs the model's body as often as the others do, in the same order: with
the same rows where texts are decoded, and under tensor parallelism always. So whatever a process decides that the next
pass depends on, the group's first process decides for all (`Group.broadcast`). The output matrix is whole in every
process: logits need nobody else.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig

from speculator.errors import UserError, refuse

_GROUPS = "dp_replicate_size"
Value = TypeVar("Value")


class _Replicas(DistributedConfig):
    """Several groups beside each other: nothing is sharded between them."""

    @property
    def dp_size(self) -> int:
        return self.fsdp_size or 1


class Group:
    """The processes that hold one target.

    Args:
        parallel: "tp", each holds a part of every layer's heads and columns; or "fsdp", each holds a part of every
            layer's weights, and has a layer whole while it runs.
        size: how many; 0: all. Neighbouring processes, by their numbers, are a group.

    Attributes:
        count: of groups.
        index: which of them this process is in.
        rank: of this process in it.

    Raises:
        UserError: there is one process alone, or they can't be divided so.
    """

    def __init__(self, parallel: str, size: int = 0):
        world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        start = "torchrun --nproc_per_node N train.py, or accelerate launch --multi_gpu --num_processes N train.py"
        fields = DistributedConfig.__dataclass_fields__
        refuse(
            (world == 1, f"parallel {parallel} needs several processes, and this is one alone: {start}"),
            (
                0 < size < world and _GROUPS not in fields,
                f"parallel_size {size}: this version of transformers shards a target over all {world} processes only",
            ),
        )
        self.parallel, self.size = parallel, divided(world, size)
        self.count = world // self.size
        self.index, self.rank = divmod(distributed.get_rank(), self.size)
        self._first = self.index * self.size
        made = [distributed.new_group([*range(i * self.size, (i + 1) * self.size)]) for i in range(self.count)]
        self._processes = made[self.index]

    @property
    def leads(self) -> bool:
        """Whether this process decides for the group."""
        return self.rank == 0

    def config(self) -> DistributedConfig:
        """What transformers loads the model by: each process reads its part."""
        more: dict[str, Any] = {_GROUPS: self.count} if self.count > 1 else {}
        if self.parallel == "fsdp":
            return DistributedConfig(fsdp_size=self.size, **more)
        return (_Replicas if more else DistributedConfig)(tp_size=self.size, **more)

    def broadcast(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """These integer tensors as the group's first process has them; of the same shapes in all, None stays None."""
        said = torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])
        distributed.broadcast(said, self._first, group=self._processes)
        parts = iter(said.split([tensor.numel() for tensor in tensors if tensor is not None]))
        return tuple(None if tensor is None else next(parts).view(tensor.shape) for tensor in tensors)

    def broadcast_object(self, value: Value) -> Value:
        """This picklable value as the group's first process has it."""
        said: list[Any] = [value]
        distributed.broadcast_object_list(said, self._first, group=self._processes)
        return said[0]

    def gathered(self, rows: Tensor) -> Tensor:  # [B, S] int, of own sizes -> [size * most B, most S]
        """Every process's rows one below the other, filled up with 0 to the largest."""
        rows = rows.long()
        shapes = rows.new_empty(self.size, 2)
        distributed.all_gather(list(shapes), rows.new_tensor(rows.shape), group=self._processes)
        most, length = shapes.amax(0).tolist()
        filled = nn.functional.pad(rows, (0, length - rows.shape[1], 0, most - len(rows)))
        every = rows.new_empty(self.size * most, length)
        distributed.all_gather(list(every.chunk(self.size)), filled.contiguous(), group=self._processes)
        return every


def share(group: Group | None, process: int, processes: int) -> tuple[int, int]:
    """(index, count) among those that work on rows of their own: groups, or processes where there is no group."""
    return (process, processes) if group is None else (group.index, group.count)


def divided(world: int, size: int) -> int:
    """Of so many processes those that hold a target together; 0: all.

    Raises:
        UserError: they can't be divided so.
    """
    if size and (size < 2 or world % size):
        raise UserError(
            f"parallel_size {size}: {world} processes can't be divided into groups of {size}, at least 2 each"
        )
    return size or world


def check_heads(name: str, config: PreTrainedConfig, parts: int) -> None:
    """Refuse a model whose heads can't be divided into so many parts, as tensor parallelism does.

    Raises:
        UserError: they can't.
    """
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if heads is not None and heads % parts:
        raise UserError(
            f"{name}: its {heads} key heads can't be divided among {parts} processes: take another parallel_size, or "
            "parallel fsdp"
        )


def whole(weight: Tensor) -> Tensor:
    """A weight as numbers alone: out of its shards, for which the whole group has to ask, and not quantised."""
    weight = weight.detach()
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    dequantize = getattr(weight, "dequantize", None) if type(weight) is not Tensor else None
    return weight if dequantize is None else dequantize()


def make_whole(module: nn.Module) -> None:
    """Let a module of a sharded model have its weights whole, and run without the group."""
    vars(module).pop("forward", None)  # what gathers its output
    for name, weight in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(whole(weight), requires_grad=False))
