"""Positions per row, for decoders that count one position for all rows of a batch.

A decoder that takes `position_ids` needs nothing. T5's kind adds a bias by distance to the scores, and BART's kind adds
a row of a table of positions to the embeddings; both count on from the length of the cache, which is one number.
Methods of the instances are replaced; without a write in progress they do what they did.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from speculator.target.attention.write import current


class _SeenError(Exception):
    """Raised in a decoder's forward pass to end it once we know which positions it looks up."""


def install(decoder: Any, length: int, other_than: int | None) -> None:
    """Replace methods of a decoder, so that each row has positions of its own, unless it takes `position_ids`.

    Args:
        length: number of positions to read from the decoder's table of positions, if it has one.
        other_than: the pad token. The table is read with another token, since some families give pads another position.
    """
    remove(decoder)
    if "position_ids" in signature(decoder.forward).parameters:
        return
    for module in decoder.modules():
        if hasattr(module, "compute_bias") and getattr(module, "has_relative_attention_bias", True):
            module.compute_bias = _by_distance(module.compute_bias)
    table = getattr(decoder, "embed_positions", None)
    if isinstance(table, nn.Module):
        table.forward = _by_row(table, decoder, length, 1 if other_than == 0 else 0)  # type: ignore[method-assign]


def remove(decoder: nn.Module) -> None:
    for module in decoder.modules():
        for name in ("compute_bias", "forward"):
            if getattr(vars(module).get(name), "per_row", False):
                delattr(module, name)


def _by_distance(own: Any) -> Any:
    """Return a `compute_bias` that during a write gives the bias of each distance [1, H, 1, n], 0 first; else `own`."""

    def compute_bias(query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0) -> Tensor:
        write = current()
        if write is None:
            return own(query_length, key_length, device, past_seen_tokens)
        # In a causal decoder the bias depends on the distance alone: that of the last of n tokens to all of them has
        # every distance, the largest first. `attention` looks up each row's own distances. [1, H, 1, n]
        return own(1, write.extent, device, write.extent - 1).flip(-1)

    compute_bias.per_row = True  # type: ignore[attr-defined]
    return compute_bias


def _by_row(table: nn.Module, decoder: Any, length: int, token: int) -> Any:
    """Return a `forward` of the table that during a write gives each row its own positions; else the table's own.

    The decoder reads positions 0..length - 1 once, with `token` at all of them.
    """
    own, seen = table.forward, []

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output.reshape(length, -1))
        raise _SeenError

    # The decoder itself asks for its positions 0..length - 1, and stops there.
    handle = table.register_forward_hook(record)
    try:
        decoder(input_ids=torch.full((1, length), token, device=decoder.device), use_cache=False)
    except _SeenError:
        pass
    finally:
        handle.remove()
    (rows,) = seen

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        write = current()
        if write is None:
            return own(*args, **kwargs)
        return rows[write.packed(write.positions.clamp(max=length - 1)).to(rows.device)]

    forward.per_row = True  # type: ignore[attr-defined]
    return forward
