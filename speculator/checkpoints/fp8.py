"""Weights in float8 with scales in a file: one scale per block, per row, or per tensor; weight = number * scale."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from speculator.checkpoints.files import ForeignConfig
from speculator.errors import UserError

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
SUFFIXES = ("_scale_inv", "_scale")
"""Ends of the names of scales: DeepSeek's, and that of compressed-tensors and modelopt."""


def block_of(quantization: ForeignConfig) -> tuple[int, ...] | None:
    """Return the rows and columns that share a scale, as a `quantization_config` states them; None without blocks."""
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    stated = [quantization.get("weight_block_size"), *(each.get("block_structure") for each in weights)]
    return next((tuple(block) for block in stated if block), None)


def sizes_of(name: str, shape: torch.Size, scale: Tensor, block: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the sizes of the part that shares one scale: a block, a row, or the whole weight of this name and shape.

    `block` is the result of `block_of`. Raises a UserError if the scale's shape fits none of them. A weight [576, 7168]
    with blocks of 128 x 128 has scales [5, 56]: the last row of blocks has 64 rows.
    """
    per_row = tuple(shape[:-1])
    if scale.numel() == 1:
        return tuple(shape)
    if block is not None:
        sizes = (1,) * (len(shape) - 2) + block
        if tuple(scale.shape) == _counts(shape, sizes):
            return sizes
    if tuple(scale.shape) in (per_row, (*per_row, 1)):
        return (1,) * len(per_row) + (shape[-1],)
    stated = f"blocks of {' x '.join(map(str, block))}" if block else "no blocks"
    raise UserError(f"{name} {list(shape)} has scales {list(scale.shape)}, and quantization_config states {stated}")


def dequantise(tensor: Tensor, scale: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return float8 numbers times their scales, in bfloat16; `sizes_of` gives the sizes that share one scale."""
    return (tensor.float() * _expand(scale, tensor.shape, sizes)).to(torch.bfloat16)


def quantise(
    tensor: Tensor, scale: Tensor, sizes: tuple[int, ...], dtype: torch.dtype, powers: bool
) -> tuple[Tensor, Tensor]:
    """Return a weight as numbers of `dtype` and new scales of the stored scale's shape and dtype.

    Args:
        scale: the stored scale, of which only shape and dtype are used.
        sizes: result of `sizes_of`: the part of the weight that shares one scale.
        powers: scales must be powers of two, as they always are in float8_e8m0fnu.
    """
    counts, limit = _counts(tensor.shape, sizes), torch.finfo(dtype).max
    # The number of each element's block: with 2 x 3 blocks, the block in row 1 and column 2 is block 5.
    blocks = torch.zeros(tensor.shape, dtype=torch.long)
    for dim, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        own = torch.arange(tensor.shape[dim]) // size
        blocks = blocks * count + own.view(-1, *(1 for _ in tensor.shape[dim + 1 :]))
    largest = torch.zeros(prod(counts)).scatter_reduce_(0, blocks.flatten(), tensor.float().abs().flatten(), "amax")
    # The largest number of a block becomes the largest that the dtype has.
    made = (largest / limit).clamp_min(torch.finfo(torch.float32).tiny)
    if powers or scale.dtype == torch.float8_e8m0fnu:
        made = made.log2().ceil().exp2()
    made = made.view(scale.shape).to(scale.dtype)  # rounded before the numbers are divided by it
    return (tensor.float() / _expand(made, tensor.shape, sizes)).clamp(-limit, limit).to(dtype), made


def _counts(shape: torch.Size, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-length // size) for length, size in zip(shape, sizes, strict=True))


def _expand(scale: Tensor, shape: torch.Size, sizes: tuple[int, ...]) -> Tensor:
    """Repeat each scale over the part of a weight that shares it, of these sizes; return float32 of the given shape."""
    scale = scale.float().reshape(_counts(shape, sizes))
    for dim, (length, size) in enumerate(zip(shape, sizes, strict=True)):
        scale = scale.repeat_interleave(size, dim).narrow(dim, 0, length)
    return scale
