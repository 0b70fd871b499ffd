"""Attention masks, and the one attention function of all decoding targets, registered with transformers as `ATTENTION`.

`VARLEN` is for training on packed documents.

The function attends over the KV cache that is being written (`speculator.target.attention.write.current`). A token sees
the committed positions of its row, and its ancestors among the new tokens. Without such a cache attention is causal.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from speculator.target.attention.write import CacheWrite, current

ATTENTION, VARLEN = "speculator", "speculator_varlen"
WINDOWS: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
"""Sliding window of each attention layer in tokens, None if it has none; not all families pass it to `attention`."""
_SCORES = 2**26
"""Scores that `_explicit` holds at a time. With their copies they take below 1 GB, and a kernel's launch takes a small
part of the time. All scores of 8,192 tokens with 64 heads would take 52 GB."""


def avoid_cudnn(device: torch.device) -> None:
    if device.type == "cuda":
        # From torch 2.11 on, cuDNN comes first for masks in bfloat16. It builds a plan of 20 to 50 ms for every new
        # shape and keeps it for ever, and on B200 it changes texts of models with few key heads (pytorch#193893).
        torch.backends.cuda.enable_cudnn_sdp(False)


def set_attention(model: PreTrainedModel, implementation: Any) -> None:
    """Set a model's attention implementation in all of its parts: a name, or a dict of names by sub-config."""
    model.set_attn_implementation(implementation)
    # transformers 5.17 leaves out parts that have a copy of the model's config: T5's encoder and decoder.
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part.config) is type(model.config):
            part.config._attn_implementation_internal = model.config._attn_implementation


@contextmanager
def using_attention(model: PreTrainedModel, implementation: Any) -> Iterator[None]:
    """Use another attention (a name, or names by sub-config) inside the block, then `ATTENTION` again."""
    try:
        set_attention(model, implementation)
        yield
    finally:
        set_attention(model, ATTENTION)


def original_attention(model: PreTrainedModel) -> Any:
    """Return the attention implementation that a model came with: a name, or a dict of names by sub-config.

    If the model already uses `ATTENTION`, this switches it to "sdpa", or "eager" if it has no sdpa, and returns that.
    """
    if model.config._attn_implementation == ATTENTION:
        try:
            set_attention(model, "sdpa")
        except ValueError:
            set_attention(model, "eager")
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs}
    given = [model.config, *(part for part in parts.values() if part is not None)]
    if any(getattr(each, "attn_logit_softcapping", None) and each._attn_implementation == "sdpa" for each in given):
        set_attention(model, "eager")  # sdpa has no soft-capping, and transformers 5.17 takes it all the same
    original: Any = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": model.config._attn_implementation, **original} if original else model.config._attn_implementation


def mask(
    write: CacheWrite,
    groups: int,
    window: int | None,
    dtype: torch.dtype,
    by_distance: Tensor | None = None,  # [1, Hq, 1, n]
) -> Tensor | None:  # [R, 1 or H, groups * width, extent]
    """Return the bias on attention scores: 0 for visible positions, -inf for others; None if all are visible.

    The `groups` query heads that share a key head are laid end to end.

    Args:
        write: the tokens that are being written.
        groups: query heads per key head.
        window: sliding window in tokens; None: no limit.
        by_distance: a bias for each distance of n tokens, 0 first, such as T5's; it is added.
    """
    # A single row that decodes one token sees everything that is read, so the fused kernel may go without a mask.
    plain = write.single_row and write.width == 1 and write.tree is None
    if plain and (window is None or write.extent <= window) and by_distance is None:
        return None
    given, bias = write.masks.get((groups, window, dtype), (None, None))
    if bias is None or given is not by_distance:
        # All layers with the same window share one mask, which the first of them builds.
        columns = torch.arange(write.extent, device=write.lengths.device)
        if write.tree is None:
            # A chain: positions in the cache are those in the sequence. The token at 7 sees 0..7; what lies beyond is
            # padding, a later token, or left from a rejected draft.
            seen = columns <= write.cache_positions[:, :, None]
        else:
            count = write.block.shape[1]
            # A tree is not causal in the cache: a token's cousins lie before it. Committed positions are visible to all
            # new tokens, and of the new ones only the ancestors and the token itself. With 5 committed tokens and the
            # parents [-1, -1, 0], token 2 (verify position 3) sees 0..4, then 5 (pending), 6 (its parent) and 8
            # (itself), not 7.
            block = write.block.clamp(max=write.extent - 1)  # an idle row may be longer
            seen = (columns < write.lengths[:, None, None]).repeat(1, write.width, 1)
            # The rows of `ancestors` that this pass writes: a tree may be written in several passes, level by level.
            ancestors = write.tree.ancestors[:, count - write.width : count, :count]
            seen = seen.scatter(2, block[:, None].expand(-1, write.width, -1), ancestors)
        # Sequence position of each cache column: the same, except for a tree's tokens.
        position = columns
        if write.tree is not None and (window is not None or by_distance is not None):
            depths = write.lengths[:, None] + write.tree.depths[:, :count]
            position = columns.repeat(len(block), 1).scatter(1, block, depths)[:, None]
        if window is not None:
            # The token at p sees p - window + 1 .. p: with a window of 4, position 9 sees 6..9. A window counts
            # positions of the sequence. In a tree these are not the cache's: cousins share one, so the new columns get
            # the row's length plus their depth.
            seen &= position > write.positions[:, :, None] - window
            seen |= ~seen.any(-1, keepdim=True)  # kernels may return NaN for a token that sees nothing
        bias = _bias(seen, dtype)
        if by_distance is None:
            # [R, width, extent] -> [R, 1, groups * width, extent]: all heads see the same.
            bias = bias.repeat(1, groups, 1)[:, None]
        else:  # the token at 7 is 7, 6, .., 0 away from 0..7
            distance = (write.positions[:, :, None] - position).clamp(0, by_distance.shape[-1] - 1)
            by_head = by_distance[0, :, 0].to(dtype)[:, distance].transpose(0, 1)  # [R, Hq, width, extent]
            bias = (by_head + bias[:, None]).reshape(len(bias), -1, groups * write.width, write.extent)
        write.masks[groups, window, dtype] = by_distance, bias
    return bias


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:  # [...] bool -> [...]
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


# transformers calls it with these arguments by name, so they stay as they are
def attention(
    module: nn.Module,
    query: Tensor,  # [B, Hq, T, Dh]
    key: Tensor,  # [B, H, M, Dh]
    value: Tensor,  # [B, H, M, Dh]
    attention_mask: Tensor | None,  # ignored
    dropout: float = 0.0,  # ignored
    scaling: float | None = None,  # None: Dh ** -0.5
    sliding_window: int | None = None,  # in tokens; None: no limit. `WINDOWS` comes first
    softcap: float | None = None,  # see `_explicit`
    s_aux: Tensor | None = None,  # [Hq] attention sinks, see `_explicit`
    position_bias: Tensor | None = None,  # [1, Hq, 1, n] by distance, see `mask`
    **kwargs,
) -> tuple[Tensor, None]:  # [B, T, Hq, Dh]
    """Compute scaled dot-product attention over the cache that is being written, or causal attention without one.

    Packed rows (`speculator.target.attention.write.Packing`) are unpacked here alone. On a CPU the tokens attend part
    by part (`CacheWrite.parts`); where shapes must be few, all do together, padded.
    """
    write = current()
    if write is not None and write.cross.holds(key):
        # A token sees the whole source of its row, wherever the token is.
        own = write.padded(query.transpose(1, 2)).transpose(1, 2)
        bias = write.cross.bias if write.cross.bias is None else write.cross.bias.to(query.device)
        return write.packed(_fused(own, key, value, bias, scaling, softcap, s_aux)), None
    options = (WINDOWS.get(module, sliding_window), scaling, softcap, s_aux, position_bias)
    packed = write is not None and write.packing is not None
    if write is None or not (packed or write.parts):
        return _attend(write, query, key, value, *options), None
    query = query.transpose(1, 2)
    if not write.parts:
        return write.packed(_attend(write, write.padded(query).transpose(1, 2), key, value, *options)), None
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    for part in write.parts:
        keys, values = (x[part.rows, :, : part.write.extent] for x in (key, value))
        own = part.of(query, packed).transpose(1, 2)
        part.of(out, packed).copy_(_attend(part.write, own, keys, values, *options))
    return out, None


def _attend(
    write: CacheWrite | None,  # None: causal attention without a cache
    query: Tensor,  # [B, Hq, T, Dh]
    key: Tensor,  # [B, H, M, Dh]
    value: Tensor,  # [B, H, M, Dh]
    sliding_window: int | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    position_bias: Tensor | None,
) -> Tensor:  # [B, T, Hq, Dh]
    """Return attention of unpacked rows in one call; for the other arguments, see `attention`."""
    width, groups = query.shape[2], query.shape[1] // key.shape[1]
    if write is None:
        columns = torch.arange(key.shape[2], device=query.device)
        # No cache: the queries are the last `width` of the keys.
        own = columns[-width:, None]
        seen = columns <= own
        if sliding_window is not None:
            seen &= columns > own - sliding_window
        bias: Tensor | None = _bias(seen, query.dtype).repeat(groups, 1)
    else:
        bias = mask(write, groups, sliding_window, query.dtype, position_bias)
        bias = bias if bias is None else bias.to(query.device)  # layers may be on several devices
    return _fused(query, key, value, bias, scaling, softcap, s_aux)


def _fused(
    query: Tensor,  # [B, Hq, T, Dh]
    key: Tensor,  # [B, H, M, Dh]
    value: Tensor,  # [B, H, M, Dh]
    bias: Tensor | None,  # on the stacked scores, see `mask`; None: all positions are visible
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:  # [B, T, Hq, Dh]
    """Return attention by torch's fused function, or by `_explicit`; grouped keys and values are never repeated."""
    rows, query_heads, width, size = query.shape
    groups = query_heads // key.shape[1]
    # [B, Hq, T, d] -> [B, H, groups * T, d]: with 8 query heads on 2 key heads, the queries of heads 0..3 follow each
    # other as 4 T rows of key head 0. Repeating the keys instead would read the cache four times.
    stacked = query.reshape(rows, key.shape[1], groups * width, size)
    if softcap is None and s_aux is None:
        out = nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=bias, scale=scaling)
    else:
        out = _explicit(stacked, key, value, bias, scaling or size**-0.5, softcap, s_aux, groups)
    return out.reshape(rows, query_heads, width, value.shape[-1]).transpose(1, 2)


def _explicit(
    query: Tensor,  # [B, H, groups * T, Dh]
    key: Tensor,  # [B, H, M, Dh]
    value: Tensor,  # [B, H, M, Dh]
    bias: Tensor | None,  # added to the scores; None: all positions are visible
    scaling: float,
    softcap: float | None,  # scores are limited to softcap * tanh(score / softcap)
    sinks: Tensor | None,  # [Hq] a logit in the softmax of each query head, without a value
    groups: int,  # query heads per key head, stacked along the queries' T
) -> Tensor:  # [B, H, groups * T, Dh]
    """Compute soft-capped scores (Gemma 2) and attention sinks (gpt-oss), at most `_SCORES` scores at a time."""
    rows, heads, stacked, _ = query.shape
    sink = None
    if sinks is not None:
        # Head h of key head k is at index k * groups + g, the order in which `attention` stacked the queries.
        sink = sinks.view(1, heads, groups, 1).expand(rows, -1, -1, stacked // groups).reshape(rows, heads, stacked, 1)
    if bias is not None:  # that of cross attention is the same for all queries
        bias = bias.expand(*bias.shape[:-2], stacked, -1)
    size = max(1, _SCORES // (rows * heads * key.shape[2]))
    blocks = []
    for first in range(0, stacked, size):
        own = slice(first, first + size)
        scores = query[:, :, own] @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[..., own, :]
        if sink is not None:
            # A sink takes part in the softmax and has no value: its column is dropped after the normalisation.
            scores = torch.cat([scores, sink[:, :, own]], -1)
        blocks.append(scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype) @ value)
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


# transformers calls it with these arguments by name, so they stay as they are
def varlen_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, N, Dh]
    key: Tensor,  # [1, H, N, Dh]
    value: Tensor,  # [1, H, N, Dh]
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,  # [documents + 1] int32, where each document begins, and N
    max_length_q: int | None = None,  # upper bound of a document's length
    **kwargs,
) -> tuple[Tensor, None]:  # [1, N, Hq, Dh]
    """Compute causal attention within each of many documents in a row, by torch's own flash attention: GPUs only.

    `attention_mask` and `dropout` are ignored. A dense mask would cost several times as much: most of it is hidden, and
    it needs repeated keys. Raises a ValueError without `cu_seq_lens_q`, or with soft-capping or sinks.
    """
    if cu_seq_lens_q is None or softcap is not None or s_aux is not None:
        raise ValueError("flash attention needs the bounds of the documents, and has neither soft-capping nor sinks")
    packed = [x.transpose(1, 2)[0] for x in (query, key, value)]  # [N, heads, Dh]
    window = WINDOWS.get(module, sliding_window)
    # A window of 4 includes the token itself, so it reaches 3 to the left.
    options = {"scale": scaling, "window_size_left": None if window is None else window - 1}
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    out, *_ = torch.ops.aten._flash_attention_forward(*packed, *bounds, 0.0, True, False, **options)
    return out[None], None


AttentionInterface.register(ATTENTION, attention)
AttentionInterface.register(VARLEN, varlen_attention)
