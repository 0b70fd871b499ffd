"""A target that several processes share for training, sharded by transformers itself.

The processes of a group each run the model's body equally often and in the same order; under tensor parallelism with
the rows of all of them. Every process holds the whole output matrix, so logits need no communication. Such a target is
not decoded: its processes would have to agree on every token.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig

from speculator.errors import UserError, refuse

TIMEOUT = timedelta(minutes=30)
"""Timeout of a collective: longer than one process takes to write a checkpoint while the others wait."""
SHARDED = ("tp", "fsdp")
"""Values of `parallel` that shard a target over processes."""
DECODE_INSTEAD = "decode it with a server such as vLLM, or in one process, with parallel device_map on all of its GPUs"
_GROUPS = "dp_replicate_size"


class _Replicas(DistributedConfig):
    """Device mesh of several groups, each of which holds a whole target."""

    @property
    def dp_size(self) -> int:
        return self.fsdp_size or 1


class Group:
    """Processes that share one target.

    Args:
        parallel: "tp": each holds a part of every layer's heads and columns; "fsdp": each holds a part of every layer's
            weights, and gathers a layer while it runs.
        size: processes per group, consecutive ones; 0: all.
    """

    def __init__(self, parallel: str, size: int = 0):
        world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        start = "torchrun --nproc_per_node N train.py, or accelerate launch --multi_gpu --num_processes N train.py"
        fields = DistributedConfig.__dataclass_fields__
        refuse(
            (world == 1, f"parallel {parallel} needs several processes: {start}"),
            (
                0 < size < world and _GROUPS not in fields,
                f"parallel_size {size}: this version of transformers can only shard over all {world} processes",
            ),
        )
        self.parallel, self.size = parallel, divided(world, size)
        self.count = world // self.size
        index, self.rank = divmod(distributed.get_rank(), self.size)
        members = [[*range(i * self.size, (i + 1) * self.size)] for i in range(self.count)]
        # Every process takes part in the creation of every group, its own or not.
        made = [distributed.new_group(each, timeout=TIMEOUT) for each in members]  # NCCL's default is 10 minutes
        self._processes = made[index]

    def config(self) -> DistributedConfig:
        """Return the config with which transformers loads this process's part of the model."""
        more: dict[str, Any] = {_GROUPS: self.count} if self.count > 1 else {}
        if self.parallel == "fsdp":
            return DistributedConfig(fsdp_size=self.size, **more)
        return (_Replicas if more else DistributedConfig)(tp_size=self.size, **more)

    def gathered(self, rows: Tensor) -> Tensor:  # [B, S] int -> [size * max B, max S]
        """Return the rows of all processes of the group, each part padded with 0 to the largest number and length."""
        rows = rows.long()
        # Processes may have fewer or shorter rows, and a collective needs equal shapes: the shapes go first.
        shapes = rows.new_empty(self.size, 2)
        distributed.all_gather(list(shapes), rows.new_tensor(rows.shape), group=self._processes)
        most, length = shapes.amax(0).tolist()
        filled = nn.functional.pad(rows, (0, length - rows.shape[1], 0, most - len(rows)))
        # Each process's part has the same number of rows: with 2 processes and at most 3 rows, 0..2 and 3..5.
        every = rows.new_empty(self.size * most, length)
        distributed.all_gather(list(every.chunk(self.size)), filled.contiguous(), group=self._processes)
        return every


def divided(world: int, size: int) -> int:
    """Return the number of processes per group: `size`, or all of the `world` if it is 0."""
    if size and (size < 2 or world % size):
        raise UserError(
            f"parallel_size {size}: {world} processes can't be divided into groups of {size}, at least 2 each"
        )
    return size or world


def check_heads(name: str, config: PreTrainedConfig, parts: int) -> None:
    """Raise a UserError if tensor parallelism can't divide a model's key heads into `parts` equal parts."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if heads is not None and heads % parts:
        raise UserError(
            f"{name}: {parts} processes can't share its {heads} key heads evenly: use another parallel_size, or "
            "parallel fsdp"
        )


def is_sharded(model: nn.Module) -> bool:
    """Return whether a forward pass needs other processes, which may run other rows at another pace."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def whole(weight: Tensor) -> Tensor:
    """Return a weight as a plain tensor, gathered if sharded (by all processes) and dequantised if quantised."""
    weight = weight.detach()
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    dequantize = getattr(weight, "dequantize", None) if type(weight) is not Tensor else None
    return weight if dequantize is None else dequantize()


def make_whole(module: nn.Module) -> None:
    """Gather the weights of a sharded module, which then runs without communication."""
    # transformers has replaced `forward` by one that gathers the output of a matrix cut by columns.
    vars(module).pop("forward", None)
    for name, weight in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(whole(weight), requires_grad=False))
