"""The one layer of the attention head (`speculator.heads.eagle3`), in the parts between which attention comes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from speculator.heads.eagle3_config import Eagle3SpeculatorConfig


class Rope:
    """Cosines and sines of positions, by transformers' own frequencies: made when they are first asked for."""

    def __init__(self, config: Eagle3SpeculatorConfig):
        self.config = config
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [...] -> [..., 1, d] twice
        if positions.device not in self._frequencies:
            frequencies, scaling = self._of_config()
            self._frequencies[positions.device] = frequencies.to(positions.device), scaling
        frequencies, scaling = self._frequencies[positions.device]
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions[..., None, None].to(exact) * frequencies.to(exact)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

    def _of_config(self) -> tuple[Tensor, float]:  # [d / 2]
        size, rope = self.config.head_dim, dict(self.config.rope_parameters or {})
        if rope["rope_type"] == "default":
            return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size), 1.0
        known = LlamaConfig(
            head_dim=size, rope_parameters=rope, max_position_embeddings=self.config.max_position_embeddings
        )
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](known, torch.device("cpu"))


class Norm(nn.RMSNorm):
    """In the weight's dtype, which under autocast is not the input's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Projections of a layer, [..., 2D] -> [..., heads, d] and back."""

    def __init__(self, config: Eagle3SpeculatorConfig):
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        wide, bias = 2 * config.emb_dim, config.attention_bias
        self.q_proj = nn.Linear(wide, self.heads * self.size, bias=bias)
        self.k_proj = nn.Linear(wide, self.kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(wide, self.kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, config.emb_dim, bias=bias)
        if config.qk_norm:
            self.q_norm = Norm(self.size, config.rms_norm_eps)
            self.k_norm = Norm(self.size, config.rms_norm_eps)
        self.normed = config.qk_norm

    def query(self, u: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:  # [..., 2D] -> [..., H, d]
        query = self.q_proj(u).unflatten(-1, (self.heads, self.size))
        return turned(self.q_norm(query) if self.normed else query, rope)

    def key_value(self, u: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # [..., K, d] twice
        key, value = (proj(u).unflatten(-1, (self.kv_heads, self.size)) for proj in (self.k_proj, self.v_proj))
        return turned(self.k_norm(key) if self.normed else key, rope), value


class MLP(nn.Module):
    def __init__(self, config: Eagle3SpeculatorConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.emb_dim, config.inner_dim, bias=False)
        self.up_proj = nn.Linear(config.emb_dim, config.inner_dim, bias=False)
        self.down_proj = nn.Linear(config.inner_dim, config.emb_dim, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Layer(nn.Module):
    """The one layer, in the parts between which attention comes."""

    def __init__(self, config: Eagle3SpeculatorConfig):
        super().__init__()
        self.input_layernorm = Norm(config.emb_dim, config.rms_norm_eps)
        self.hidden_norm = Norm(config.emb_dim, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.emb_dim, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.norm_before_residual = config.norm_before_residual

    def enter(self, embedded: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:  # [..., D] twice -> u, residual
        normed = self.hidden_norm(g)
        u = torch.cat([self.input_layernorm(embedded), normed], -1)
        return u, normed if self.norm_before_residual else g

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:  # [..., D], [..., H, d] -> [..., D]
        h = residual + self.self_attn.o_proj(attended.flatten(-2))
        return h + self.mlp(self.post_attention_layernorm(h))


def turned(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:  # [..., heads, d]
    """Rotary position embedding, in halves as Llama has it."""
    cos, sin = rope
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def attend(
    query: Tensor,  # [B, f, H, d]
    keys: Tensor,  # [B, K, M, d]
    values: Tensor,  # [B, K, M, d]
    seen: Tensor,  # [B, f, M]
) -> Tensor:  # [B, f, H, d]
    """Query heads that share a key head are laid end to end, so that no key is repeated."""
    batch, rows, heads, size = query.shape
    shared = keys.shape[1]
    stacked = query.view(batch, rows, shared, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = seen.repeat(1, heads // shared, 1)[:, None]
    out = nn.functional.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask)
    return out.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def attend_own(
    seen: Tensor,  # [R, M]
    query: Tensor,  # [R, H, d]
    keys: Tensor,  # [M, K, d] which rows share
    values: Tensor,  # [M, K, d]
    own_keys: Tensor,  # [i, R, K, d] of which each row sees its own only
    own_values: Tensor,  # [i, R, K, d]
) -> Tensor:  # [R, H, d]
    """One softmax over both: a column of scores for each own key, never a row of them for another row's."""
    shared, kv_heads, size = keys.shape
    grouped = query.view(len(query), kv_heads, -1, size) / math.sqrt(size)  # [R, K, g, d]
    scores = torch.einsum("rkgd,mkd->kgrm", grouped, keys).masked_fill(~seen, -torch.inf)
    own = torch.einsum("rkgd,irkd->kgri", grouped, own_keys)
    exact = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([scores, own], -1).softmax(-1, dtype=exact).to(values.dtype)
    out = torch.einsum("kgrm,mkd->rkgd", weights[..., :shared], values)
    return (out + torch.einsum("kgri,irkd->rkgd", weights[..., shared:], own_values)).flatten(1, 2)


class Rows(NamedTuple):
    """The query rows of a batch of texts, one after the other, and their blocks.

    Attributes:
        places: [R] in their texts, which are their positions.
        begins: [R] the first row of each one's document.
        parts: of each block its rows, its text, and which of the text's rows they see.
        window: how many positions a row sees; None for all.
    """

    places: Tensor
    begins: Tensor
    parts: list[tuple[slice, int, slice]]
    window: int | None

    @classmethod
    def of(
        cls,
        wanted: Tensor,  # [R] ascending, of the B * S rows
        begins: Tensor,  # [B, S]
        limit: int,
        window: int | None,
    ) -> Rows:
        """Blocks of at most `limit` rows times rows that they see, of one text each."""
        batch, length = begins.shape
        places, starts = wanted % length, begins.flatten()[wanted]
        at, first = places.tolist(), starts.tolist()
        size, parts, stop = max(1, limit // length), [], 0
        for text, count in enumerate((wanted // length).bincount(minlength=batch).tolist()):
            start, end = stop, stop + count
            while start < end:
                stop = min(start + size, end)
                # Of few widths, whatever is masked in them: freed scores of one block are room for the next.
                last = at[stop - 1] + 1
                width = min(1 << (last - first[start] - 1).bit_length(), length)
                parts.append((slice(start, stop), text, slice(max(0, last - width), max(last, width))))
                start = stop
        return cls(places, starts, parts, window)

    def seen(self, rows: slice, span: slice, step: int) -> Tensor:  # [R, M]
        """Which of a span of keys some rows see in a step: those of their document up to them, within the window."""
        slots = torch.arange(span.start, span.stop, device=self.places.device)
        places, begins = self.places[rows, None], self.begins[rows, None]
        if self.window is not None:
            begins = begins.maximum(places + step - self.window + 1)
        return (slots <= places) & (slots >= begins)


class BlockedAttention(torch.autograd.Function):
    """`attend_own` in blocks of rows. The backward pass makes each block anew, so that one block's scores exist."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, step: int, *tensors: Tensor) -> Tensor:
        """Of `attend_own`'s query [R, H, d], keys and values of B texts [B, S, K, d], and own keys and values."""
        ctx.rows, ctx.step = rows, step
        ctx.save_for_backward(*tensors)
        out = torch.empty_like(tensors[0])
        for part in rows.parts:
            out[part[0]] = BlockedAttention.block(
                rows, step, part, [x[i] for x, i in zip(tensors, _cut(part), strict=True)]
            )
        return out

    @staticmethod
    def block(rows: Rows, step: int, part: tuple[slice, int, slice], cut: list[Tensor]) -> Tensor:
        with torch.autocast(cut[0].device.type, enabled=False):
            return attend_own(rows.seen(part[0], part[2], step), *cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        exact = torch.promote_types(d_out.dtype, torch.float32)
        totals = [torch.zeros_like(x, dtype=exact) for x in ctx.saved_tensors]
        for part in ctx.rows.parts:
            cut = [x[i].detach().requires_grad_() for x, i in zip(ctx.saved_tensors, _cut(part), strict=True)]
            with torch.enable_grad():
                out = BlockedAttention.block(ctx.rows, ctx.step, part, cut)
            gradients = torch.autograd.grad(out, cut, d_out[part[0]])
            for total, i, gradient in zip(totals, _cut(part), gradients, strict=True):
                total[i] += gradient
        return None, None, *(total.to(x.dtype) for total, x in zip(totals, ctx.saved_tensors, strict=True))


def _cut(part: tuple[slice, int, slice]) -> tuple[Any, ...]:
    """Where a block lies in query, keys, values, own keys and own values."""
    rows, text, span = part
    return rows, (text, span), (text, span), (slice(None), rows), (slice(None), rows)
