"""Attention masks, and the one attention function that every target runs, registered with transformers as `ATTENTION`.

The function attends over the KV cache that is being written (`speculator.target.kv_cache.current`). A token sees the
committed positions of its row and its ancestors among the new tokens: the earlier ones of a chain, or its path in a
tree. Without an open cache, as when the model is called directly, attention is causal.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from speculator.target.kv_cache import Write, current

ATTENTION = "speculator"
WINDOWS: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
"""Sliding windows of attention layers by their models' own masks, which not all families pass on to `attention`."""


@contextmanager
def attending(model: PreTrainedModel, implementation: Any) -> Iterator[None]:
    """A model attends through something else, as `set_attn_implementation` takes it, and then again through this."""
    try:
        model.set_attn_implementation(implementation)
        yield
    finally:
        model.set_attn_implementation(ATTENTION)


def own_attention(model: PreTrainedModel) -> Any:
    """What a model attends through, by sub-config where it has some; its default where that was changed before."""
    if model.config._attn_implementation == ATTENTION:
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:
            model.set_attn_implementation("eager")
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs}
    own: Any = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": model.config._attn_implementation, **own} if own else model.config._attn_implementation


def mask(
    write: Write, groups: int, window: int | None, dtype: torch.dtype
) -> Tensor | None:  # [R, 1, groups * width, extent]
    """Of a write: a token sees the positions of what comes before it, and its own.

    0 is added to the score of what is seen, -inf to that of what is not. None where every token sees every position.
    `groups` query heads share a key head and are laid end to end.
    """
    plain = write.lone and write.width == 1 and write.tree is None
    if plain and (window is None or write.extent <= window):
        return None
    if (groups, window, dtype) not in write.masks:
        slot = torch.arange(write.extent, device=write.lengths.device)
        if write.tree is None:
            seen = slot <= write.slots[:, :, None]
        else:
            count = write.block.shape[1]
            # A row that is not decoding may be longer: what it sees is nothing.
            block = write.block.clamp(max=write.extent - 1)
            seen = (slot < write.lengths[:, None, None]).repeat(1, write.width, 1)
            ancestors = write.tree.ancestors[:, count - write.width : count, :count]
            seen = seen.scatter(2, block[:, None].expand(-1, write.width, -1), ancestors)
        if window is not None:
            position = slot
            if write.tree is not None:
                depths = write.lengths[:, None] + write.tree.depths[:, :count]
                position = slot.repeat(len(block), 1).scatter(1, block, depths)[:, None]
            seen &= position > write.positions[:, :, None] - window
            seen |= ~seen.any(-1, keepdim=True)  # what a kernel gives a token that sees nothing may be no number
        write.masks[groups, window, dtype] = _bias(seen, dtype).repeat(1, groups, 1)[:, None]
    return write.masks[groups, window, dtype]


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What fused attention adds to the scores; made here it is made once for all layers."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def attention(
    module: nn.Module,
    query: Tensor,  # [B, Hq, T, Dh]
    key: Tensor,  # [B, H, M, Dh]
    value: Tensor,  # [B, H, M, Dh]
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention over the cache that is being written, or causal where none is.

    Query heads that share a key head are stacked along T, so grouped keys and values are never repeated.
    """
    write = current()
    sliding_window = WINDOWS.get(module, sliding_window)
    rows, query_heads, width, size = query.shape
    groups = query_heads // key.shape[1]
    if write is None:
        slot = torch.arange(key.shape[2], device=query.device)
        own = slot[-width:, None]
        seen = slot <= own
        if sliding_window is not None:
            seen &= slot > own - sliding_window
        bias: Tensor | None = _bias(seen, query.dtype).repeat(groups, 1)
    else:
        bias = mask(write, groups, sliding_window, query.dtype)
        bias = bias if bias is None else bias.to(query.device)  # a layer may be elsewhere
    stacked = query.reshape(rows, key.shape[1], groups * width, size)
    if softcap is None and s_aux is None:
        out = nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=bias, scale=scaling)
    else:
        out = _explicit(stacked, key, value, bias, scaling or size**-0.5, softcap, s_aux, groups)
    return out.reshape(rows, query_heads, width, size).transpose(1, 2), None


def _explicit(
    query: Tensor,  # [B, H, groups * T, Dh]
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [Hq] a logit that every softmax of the head counts, without a value of its own
    groups: int,
) -> Tensor:
    """What the fused function can't do: scores squashed by tanh (Gemma 2), attention sinks (gpt-oss)."""
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    rows, heads, stacked, _ = scores.shape
    sink = sinks.view(1, heads, groups, 1).expand(rows, -1, -1, stacked // groups).reshape(rows, heads, stacked, 1)
    return torch.cat([scores, sink], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value


AttentionInterface.register(ATTENTION, attention)
