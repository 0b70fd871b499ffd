"""EAGLE-3's attention in training: one softmax over the text's keys up to a position and the position's own later keys.

Two implementations: torch's flash attention where `fused_dtype` allows it, and blocks of rows elsewhere. Neither keeps
scores for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speculator.device import compute_dtype, exact, send

flash_forward = torch.ops.aten._flash_attention_forward
flash_backward = torch.ops.aten._flash_attention_backward
_SCORES = {"cpu": 2**20}
_SCORES_ON_GPU = 2**25
"""Attention scores in memory at a time, by kind of device."""
_NUMBERS = 2**25
"""Elements of the queries whose own keys are processed at a time, in addition to flash attention."""


class Block(NamedTuple):
    """Query rows of the sequence with this index; they may attend to its positions in `span`."""

    rows: slice
    sequence: int
    span: slice

    def select(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this block's views of the five tensors of `joint_attention`, from the query to the own values."""
        query, keys, values, own_keys, own_values = tensors
        shared = [x[self.sequence, self.span] for x in (keys, values)]
        return [query[self.rows], *shared, own_keys[:, self.rows], own_values[:, self.rows]]


def scores_of_a_head(kind: str, heads: int) -> int:
    """Return the most attention scores of each head that may be in memory at a time; `kind` is the device's."""
    return _SCORES.get(kind, _SCORES_ON_GPU) // heads


def positions_with_label(positions: int, loss_mask: Tensor | None) -> Tensor:  # [B, S] -> [R]
    """Return the indices into B * S flattened positions that need features; None: all. One is always among them."""
    if loss_mask is None:
        return torch.arange(positions, device="cpu")
    found = loss_mask.flatten().nonzero()[:, 0]
    return (
        found if len(found) else torch.zeros(1, dtype=torch.long, device="cpu")
    )  # DDP needs a gradient for every weight


class QueryRows:
    """The positions of a batch whose features are computed, laid end to end; the others give keys and values only.

    Args:
        wanted: [R] ascending, indices into the B * S positions; on the CPU, so that nothing waits for a GPU.
        begins: [B, S] first position of each position's document, likewise.
        limit: most attention scores of a head that may be in memory at a time.
        window: number of positions that a row attends to, its own keys included; None for all.
        device: where the rows are computed (default: that of `wanted`).

    Attributes:
        wanted: [R] as given, on the device.
        positions: [R] position of each row in its sequence, on the device.
        sequences: [R] index of each row's sequence, on the device.
        starts: [R] first position of each row's document, on the device.
    """

    def __init__(
        self, wanted: Tensor, begins: Tensor, limit: int, window: int | None, device: torch.device | None = None
    ):
        self.begins, self.limit, self.window, self._device = begins, limit, window, device or wanted.device
        length = begins.shape[1]
        # Sequences lie end to end: with S = 100, index 107 is position 7 of sequence 1.
        self._on_host = wanted % length, wanted // length, begins.flatten()[wanted]
        self.wanted = self._sent(wanted)
        self.positions, self.sequences, self.starts = map(self._sent, self._on_host)

    def _sent(self, x: Tensor) -> Tensor:
        return x if x.device == self._device else send(x, self._device)

    def whole(self, x: Tensor, dim: int = 0) -> Tensor:  # [R, ...] -> [B * S, ...]
        """Scatter the rows, which are dimension `dim` of x, to all positions of the batch; the others are 0."""
        # With the rows 1 and 3 of 4 positions, [a b] becomes [0 a 0 b].
        shape = list(x.shape)
        shape[dim] = self.begins.numel()
        return x if len(self.wanted) == shape[dim] else x.new_zeros(shape).index_copy(dim, self.wanted, x)

    @cached_property
    def bounds(self) -> Tensor:  # [documents + 1] int32
        """Index at which each document begins among the B * S positions of the batch, and B * S at the end."""
        # A position whose document begins at itself. With documents of 3 and 5 tokens the begins are 0 0 0 3 3 3 3 3,
        # and the bounds 0, 3, 8.
        first = self.begins == torch.arange(self.begins.shape[1], device=self.begins.device)
        return self._sent(nn.functional.pad(first.flatten().nonzero()[:, 0], (0, 1), value=first.numel()).int())

    @cached_property
    def blocks(self) -> list[Block]:
        """All query rows in order, in blocks of one sequence each with at most `limit` scores per head (or one row)."""
        batch, length = self.begins.shape
        positions, sequences, starts = self._on_host
        at, first = positions.tolist(), starts.tolist()
        size, blocks, stop = max(1, self.limit // length), [], 0
        for sequence, count in enumerate(sequences.bincount(minlength=batch).tolist()):
            start, end = stop, stop + count
            while start < end:
                stop = min(start + size, end)
                # Few different widths, so that the allocator reuses the scores of earlier blocks.
                # From the first row's document to the last row: positions are ascending within a sequence.
                last = at[stop - 1] + 1
                width = min(1 << (last - first[start] - 1).bit_length(), length)
                blocks.append(Block(slice(start, stop), sequence, slice(max(0, last - width), max(last, width))))
                start = stop
        return blocks

    def seen(self, rows: slice, span: slice, step: int) -> Tensor:  # [R, M]
        """Return a mask of the text's keys that rows see at a step: from their document's start to their own position.

        A window reaches `step` positions less far back, because the row's own keys count in it.

        Args:
            rows: range of the query rows, of one sequence.
            span: range of the M positions of that sequence that are the mask's columns.
            step: index of the step; a row has as many own keys.
        """
        columns = torch.arange(span.start, span.stop, device=self.positions.device)
        positions, begins = self.positions[rows, None], self.starts[rows, None]
        if self.window is not None:
            # Step i of position t stands at t + i, so its window reaches i positions less far into the text: with a
            # window of 4, step 2 of position 9 stands at 11 and sees the text's 8 and 9.
            begins = begins.maximum(positions + step - self.window + 1)
        return (columns <= positions) & (columns >= begins)


def fused_dtype(keys: Tensor, kind: str) -> torch.dtype | None:  # [..., d]
    """Return the dtype in which flash attention runs for these keys on a kind of device; None if it doesn't."""
    device, size, dtype = keys.device, keys.shape[-1], compute_dtype(keys)
    fits = kind == "cuda" and dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256
    if fits and device.type == "cuda":  # not a traced step
        there = torch.backends.cuda.is_flash_attention_available() and torch.version.hip is None
        fits = there and torch.cuda.get_device_capability(device) >= (8, 0)
    return dtype if fits else None


def joint_attention(
    rows: QueryRows,
    step: int,
    fused: bool,
    query: Tensor,  # [R, H, d]
    keys: Tensor,  # [B, S, K, d]
    values: Tensor,  # [B, S, K, d]
    own_keys: Tensor,  # [step, R, K, d] each row attends to its own
    own_values: Tensor,  # [step, R, K, d]
) -> Tensor:  # [R, H, d]
    """Attend by one softmax over the text's keys that a query row sees and the row's own keys of steps 1 to `step`.

    With `fused`, flash attention computes the text's part where the window reaches into the text.
    """
    # Else flash attention would get a negative window. The mask of the blocks then hides the whole text.
    near = rows.window is None or step < rows.window  # the window still reaches into the text
    form = FusedAttention if fused and near else BlockedAttention
    return form.apply(rows, step, query, keys, values, own_keys, own_values)


class FusedAttention(torch.autograd.Function):
    """Flash attention over the text's keys, combined with the own keys by their log-sum-exps.

    In a softmax over both, p = exp(s - lse) and ds = p * (d_out . v - d_out . out) for every key, with the joint lse
    and out. Flash attention's backward pass computes these from the lse and out that it is given.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: QueryRows, step: int, query: Tensor, keys: Tensor, values: Tensor, *own: Tensor
    ) -> Tensor:
        given, options = _flash(rows, step, query)
        with _no_autocast(query):
            shared = rows.whole(query), keys.flatten(0, 1), values.flatten(0, 1)
            out, lse, *noise, _ = flash_forward(*shared, *given, False, **options)
            if len(query) < len(out):
                out, lse = out[rows.wanted], lse[:, rows.wanted]
            for part in _pieces(query) if step else ():
                own_keys, own_values = (exact(x[:, part]) for x in own)
                scores = _own_scores(exact(query[part]), own_keys)  # [R, K, g, i]
                # lse is [H, R] with head h = k * g + j, as `_own_scores` groups the query heads: [R, K, g].
                before = lse[:, part].T.reshape(scores.shape[:-1])
                # Two softmaxes become one: with sums a and b of exp(scores), the text's part shrinks by a / (a + b),
                # which is exp(before - joint), and each own key has the weight exp(score - joint).
                joint = torch.logaddexp(before, scores.logsumexp(-1))
                added = torch.einsum("rkgi,irkd->rkgd", (scores - joint[..., None]).exp(), own_values)
                kept = out[part].view_as(added) * (before - joint).exp()[..., None]
                out[part], lse[:, part] = (kept + added).flatten(1, 2), joint.flatten(1).T
        ctx.rows, ctx.step = rows, step
        ctx.save_for_backward(query, keys, values, *own, out, lse, *noise)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, step = ctx.rows, ctx.step
        query, keys, values, own_keys, own_values, out, lse, *noise = ctx.saved_tensors
        d_out = d_out.contiguous()
        given, options = _flash(rows, step, query)
        with _no_autocast(query):
            shared = rows.whole(query), keys.flatten(0, 1), values.flatten(0, 1)
            result = rows.whole(out), rows.whole(lse, 1)
            # The joint out and lse in place of flash attention's own: its gradients of the text's keys are then those
            # of the whole softmax, and the own keys' part of d_query is added below.
            d_query, *d_shared = flash_backward(rows.whole(d_out), *shared, *result, *given, *noise, **options)
            if len(query) < len(d_query):
                d_query = d_query[rows.wanted]
            d_own = torch.empty_like(own_keys), torch.empty_like(own_values)
            for part in _pieces(query) if step else ():
                k, v = exact(own_keys[:, part]), exact(own_values[:, part])
                scores = _own_scores(exact(query[part]), k)
                p = (scores - lse[:, part].T.reshape(scores.shape[:-1])[..., None]).exp()
                q, o, d = (exact(x[part]).view(*scores.shape[:-1], -1) for x in (query, out, d_out))
                # The gradient of a softmax: ds = p (d_out . v - d_out . out), with the joint p and out.
                ds = torch.einsum("rkgd,irkd->rkgi", d, v) - (d * o).sum(-1, keepdim=True)
                ds = ds * p / math.sqrt(query.shape[-1])
                d_query[part] += torch.einsum("rkgi,irkd->rkgd", ds, k).flatten(1, 2)
                d_own[0][:, part] = torch.einsum("rkgi,rkgd->irkd", ds, q)
                d_own[1][:, part] = torch.einsum("rkgi,rkgd->irkd", p, d)
        return None, None, d_query, *(x.view_as(y) for x, y in zip(d_shared, (keys, values), strict=True)), *d_own


def _flash(rows: QueryRows, step: int, query: Tensor) -> tuple[tuple[Any, ...], dict[str, float | None]]:
    """Return positional and keyword arguments that the forward and the backward call of flash attention share."""
    longest = max(2, rows.begins.shape[1])  # an upper bound; 1 would select another kernel
    # Positions to the left of t that step i still sees: with a window of 4, three at step 0 and one at step 2.
    left = None if rows.window is None else rows.window - 1 - step
    options = {"scale": 1 / math.sqrt(query.shape[-1]), "window_size_left": left}
    return (rows.bounds, rows.bounds, longest, longest, 0.0, True), options


def _pieces(query: Tensor) -> list[slice]:
    """Split the rows of a query [R, H, d] into ranges, so that the float32 copies of own keys stay small."""
    # Rows whose queries have `_NUMBERS` elements together: H * d each.
    size = max(1, _NUMBERS // query[0].numel())
    return [slice(start, start + size) for start in range(0, len(query), size)]


def _own_scores(query: Tensor, own_keys: Tensor) -> Tensor:  # [R, H, d], [i, R, K, d] -> [R, K, g, i]
    # Query head h = k * g + j reads key head k, as in torch's flash attention: 8 heads on 2 key heads have g = 4.
    grouped = query.view(len(query), own_keys.shape[2], -1, query.shape[-1])
    return torch.einsum("rkgd,irkd->rkgi", grouped, own_keys) / math.sqrt(query.shape[-1])


def _no_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


def attend_own(
    seen: Tensor,  # [R, M] bool: the shared keys that each row attends to
    query: Tensor,  # [R, H, d]
    keys: Tensor,  # [M, K, d] shared by the rows
    values: Tensor,  # [M, K, d]
    own_keys: Tensor,  # [i, R, K, d] each row attends to its own
    own_values: Tensor,  # [i, R, K, d]
) -> Tensor:  # [R, H, d]
    """Attend by one softmax over shared and own keys; each own key adds one column of scores."""
    shared, kv_heads, size = keys.shape
    grouped = query.view(len(query), kv_heads, -1, size) / math.sqrt(size)  # [R, K, g, d]
    # Scores of the text [K, g, R, M] and of the own keys [K, g, R, i], side by side in one softmax.
    scores = torch.einsum("rkgd,mkd->kgrm", grouped, keys).masked_fill(~seen, -torch.inf)
    own = torch.einsum("rkgd,irkd->kgri", grouped, own_keys)
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([scores, own], -1).softmax(-1, dtype=wide).to(values.dtype)
    out = torch.einsum("kgrm,mkd->rkgd", weights[..., :shared], values)
    return (out + torch.einsum("kgri,irkd->rkgd", weights[..., shared:], own_values)).flatten(1, 2)


class BlockedAttention(torch.autograd.Function):
    """`attend_own` in blocks of rows; the backward pass recomputes each block to keep one block's scores in memory."""

    @staticmethod
    def forward(ctx: Any, rows: QueryRows, step: int, *tensors: Tensor) -> Tensor:
        """Attend with a query [R, H, d] to keys and values of B sequences [B, S, K, d] and to own keys and values."""
        ctx.rows, ctx.step = rows, step
        ctx.save_for_backward(*tensors)
        out = torch.empty_like(tensors[0])
        for block in rows.blocks:
            out[block.rows] = BlockedAttention.attend(rows, step, block, block.select(tensors))
        return out

    @staticmethod
    def attend(rows: QueryRows, step: int, block: Block, tensors: list[Tensor]) -> Tensor:
        with _no_autocast(tensors[0]):
            return attend_own(rows.seen(block.rows, block.span, step), *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        wide = torch.promote_types(d_out.dtype, torch.float32)
        saved = ctx.saved_tensors  # once: inside a checkpoint a second read fails
        totals = [torch.zeros_like(x, dtype=wide) for x in saved]
        for block in ctx.rows.blocks:
            # Recomputed, not saved: one block's scores are in memory at a time.
            given = [x.detach().requires_grad_() for x in block.select(saved)]
            with torch.enable_grad():
                out = BlockedAttention.attend(ctx.rows, ctx.step, block, given)
            gradients = torch.autograd.grad(out, given, d_out[block.rows])
            # `select` returns views of the totals, so blocks add up what they share: many rows read the same key.
            for total, gradient in zip(block.select(totals), gradients, strict=True):
                total += gradient
        return None, None, *(total.to(x.dtype) for total, x in zip(totals, saved, strict=True))
