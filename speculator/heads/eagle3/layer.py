"""The layer of EAGLE-3 (`speculator.heads.eagle3.model`), in the parts before and after attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from speculator.heads.eagle3.config import Eagle3SpeculatorConfig


class Rope:
    """Cosines and sines of positions, by transformers' own frequencies."""

    def __init__(self, config: Eagle3SpeculatorConfig):
        self.config = config
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [...] -> [..., 1, d] twice
        if positions.device not in self._frequencies:
            frequencies, scaling = self._from_config()
            self._frequencies[positions.device] = frequencies.to(positions.device), scaling
        frequencies, scaling = self._frequencies[positions.device]
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions[..., None, None].to(exact) * frequencies.to(exact)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

    def _from_config(self) -> tuple[Tensor, float]:  # [d / 2]
        size, rope = self.config.head_dim, dict(self.config.rope_parameters or {})
        if rope["rope_type"] == "default":
            return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size), 1.0
        llama = LlamaConfig(
            head_dim=size, rope_parameters=rope, max_position_embeddings=self.config.max_position_embeddings
        )
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](llama, torch.device("cpu"))


class Norm(nn.RMSNorm):
    """RMS norm computed in the weight's dtype, which differs from the input's under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Projections of attention, [..., 2D] -> [..., heads, d] and back."""

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
        return rotate(self.q_norm(query) if self.normed else query, rope)

    def key_value(self, u: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # [..., K, d] twice
        key, value = (proj(u).unflatten(-1, (self.kv_heads, self.size)) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(key) if self.normed else key, rope), value


class MLP(nn.Module):
    def __init__(self, config: Eagle3SpeculatorConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.emb_dim, config.inner_dim, bias=False)
        self.up_proj = nn.Linear(config.emb_dim, config.inner_dim, bias=False)
        self.down_proj = nn.Linear(config.inner_dim, config.emb_dim, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Layer(nn.Module):
    """The layer, in the parts before and after attention."""

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


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:  # [..., heads, d]
    """Apply rotary position embedding, in halves as Llama does."""
    cos, sin = rope
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def attend(
    query: Tensor,  # [B, f, H, d]
    keys: Tensor,  # [B, K, M, d]
    values: Tensor,  # [B, K, M, d]
    seen: Tensor,  # [B, f, M]
) -> Tensor:  # [B, f, H, d]
    """Grouped-query attention; heads that share a key head are stacked, so that no key is repeated."""
    batch, rows, heads, size = query.shape
    shared = keys.shape[1]
    stacked = query.view(batch, rows, shared, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = seen.repeat(1, heads // shared, 1)[:, None]
    out = nn.functional.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask)
    return out.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)
