"""The layer of EAGLE-3 (`speculator.heads.eagle3.model`), in the parts before and after attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculator.heads.attention.base import MLP, Attention, Norm, narrowed
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig


class Eagle3Layer(nn.Module):
    """The layer: `enter` returns u, which attention projects, and the residual; `leave` adds attention and the MLP."""

    def __init__(self, config: Eagle3SpeculatorConfig):
        super().__init__()
        self.input_layernorm = Norm(config.emb_dim, config.rms_norm_eps)
        self.hidden_norm = Norm(config.emb_dim, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.emb_dim, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.emb_dim, config.attention_bias, config.qk_norm)
        self.mlp = MLP(config)
        self.norm_before_residual = config.norm_before_residual

    def enter(self, embedded: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:  # [..., D] twice -> [..., 2D], [..., D]
        normed = self.hidden_norm(g)
        u = torch.cat([narrowed(self.input_layernorm(embedded)), narrowed(normed)], -1)
        return u, normed if self.norm_before_residual else g

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:  # [..., D], [..., H, d] -> [..., D]
        h = residual + self.self_attn.o_proj(attended.flatten(-2))
        return h + self.mlp(self.post_attention_layernorm(h))
