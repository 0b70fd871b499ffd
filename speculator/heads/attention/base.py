"""What heads with attention layers share: the shape that they take from the target, rope, norms, MLP and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from speculator.device import compute_dtype
from speculator.errors import UserError
from speculator.heads.base import Speculator, SpeculatorConfig

DEFAULT_AUX_LAYERS = 3
"""Number of auxiliary layers of a head that names none."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rope types that do not depend on the text's length."""


def default_aux_layers(layers: int) -> list[int]:
    """Return servers' default auxiliary layers, 2, L // 2 and L - 3; raise a UserError for fewer than 7 layers."""
    if layers < 7:
        raise UserError(f"a target of {layers} layers has no default aux_layers, which need 7: name them")
    return [2, layers // 2, layers - 3]


class AttentionConfig(SpeculatorConfig):
    """Shape of a head that attends to the target's auxiliary hidden states.

    Args:
        inner_dim: inner size of the MLP.
        num_attention_heads: H.
        num_key_value_heads: K, a divisor of H.
        head_dim: d.
        rms_norm_eps: epsilon of all norms.
        rope_parameters: as in a Llama config.
        max_position_embeddings: as in a Llama config; rope may depend on it.
        aux_layers: target layers to read, ascending, each as the number of layers before it; None for
            `default_aux_layers`.
    """

    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    aux_layers: list[int] | None = None
    target_options: ClassVar[tuple[str, ...]] = ("aux_layers",)

    def __post_init__(self, **kwargs):
        if self.num_attention_heads < 1 or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"{self.num_attention_heads} heads of {self.head_dim}: at least one, of an even size")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} heads are not a multiple of {self.num_key_value_heads}")
        if self.aux_layers is not None and (
            not self.aux_layers or self.aux_layers[0] < 0 or sorted(set(self.aux_layers)) != self.aux_layers
        ):
            raise ValueError(f"aux_layers {self.aux_layers} are not distinct layers in ascending order")
        super().__post_init__(**kwargs)
        kind = self.rope_parameters["rope_type"] if self.rope_parameters else "none"
        if kind not in ROPES:
            raise ValueError(f"rope of type {kind}; known: {', '.join(ROPES)}")
        if (part := (self.rope_parameters or {}).get("partial_rotary_factor", 1)) != 1:
            raise ValueError(f"partial_rotary_factor is {part}; the rope must rotate all dimensions of a head")
        self.validate_rope()  # such as yarn without a factor

    def describe(self) -> str:
        layers = " ".join(map(str, self.aux_layers)) if self.aux_layers else "by the target's depth"
        return (
            f"{self.n_predict} steps, {self.num_attention_heads} heads of {self.head_dim} over "
            f"{self.num_key_value_heads}, aux layers {layers}"
        )

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layers or range(DEFAULT_AUX_LAYERS))

    @classmethod
    def for_target(cls, target: PreTrainedConfig, **changes: Any) -> AttentionConfig:
        """Build a config with the target's sizes, heads and rope; `changes` override them.

        The rope is that of the target's full-attention layers, for text only. It is a plain one if the target's depends
        on the text's length, covers a part of each head, or is absent. Raises a UserError for a target without
        attention heads, or with too few layers for `aux_layers`.
        """
        heads = getattr(target, "num_attention_heads", None)
        if heads is None:
            raise UserError(
                f"{target.model_type} has no attention whose shape a {cls.model_type} could copy: train an mlp"
            )
        inner = getattr(target, "intermediate_size", None)
        rope = getattr(target, "rope_parameters", None) or {}
        rope = rope.get("full_attention") or rope
        if rope.get("rope_type") not in ROPES or rope.get("partial_rotary_factor", 1) != 1:
            rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta") or cls.default_theta}
        shape = {
            "vocab_size": target.vocab_size,
            "emb_dim": target.hidden_size,
            "inner_dim": inner if isinstance(inner, int) else 3 * target.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
            # vars: some families raise in getattr, because their layers differ.
            "head_dim": vars(target).get("head_dim") or target.hidden_size // heads,
            "rms_norm_eps": getattr(target, "rms_norm_eps", None) or cls.rms_norm_eps,
            # Servers give a head with M-RoPE the positions of images.
            "rope_parameters": {name: value for name, value in rope.items() if not name.startswith("mrope_")},
            "max_position_embeddings": getattr(target, "max_position_embeddings", None) or cls.max_position_embeddings,
        }
        layers = target.num_hidden_layers
        if "aux_layers" not in changes:
            shape["aux_layers"] = default_aux_layers(layers)
        made = cls(**{**shape, **changes})
        if made.aux_layers and made.aux_layers[-1] >= layers:
            raise UserError(f"aux_layers {made.aux_layers}: a target of {layers} layers has 0 to {layers - 1}")
        return made


class AttentionHead(Speculator):
    """Base of heads that attend to the target's auxiliary hidden states."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    @property
    def aux_layers(self) -> Sequence[int]:
        return tuple(self.config.aux_layers or ())

    def probe(self) -> tuple[Tensor, ...]:
        """Return auxiliary hidden states [1, 4, nD], tokens [1, 3 + N], and a matrix [V, D] for the target's."""
        hidden, tokens = super().probe()
        aux_hidden = torch.cat([hidden.roll(i, -1) for i in range(self.config.num_aux_layers)], -1)
        return aux_hidden, tokens, self.probe_matrix()


class Rope:
    """Computes cosines and sines [..., 1, d] of positions [...], with transformers' frequencies for the config."""

    def __init__(self, config: AttentionConfig):
        self.config = config
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [...] -> [..., 1, d] twice
        if positions.device not in self._frequencies:
            frequencies, scaling = self.frequencies()
            self._frequencies[positions.device] = frequencies.to(positions.device), scaling
        frequencies, scaling = self._frequencies[positions.device]
        # Angles in float32 even for a bfloat16 head: bfloat16 has no position 257, and would use that of 256.
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions[..., None, None].to(exact) * frequencies.to(exact)
        # Halves, as `rotate` pairs dimension i with i + d/2: both have the same angle.
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

    def frequencies(self) -> tuple[Tensor, float]:  # [d / 2]
        """Return the angle per position of each pair of dimensions, in radians, and the factor of cosine and sine."""
        size, rope = self.config.head_dim, dict(self.config.rope_parameters or {})
        if rope["rope_type"] == "default":
            return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size), 1.0
        llama = LlamaConfig(
            head_dim=size, rope_parameters=rope, max_position_embeddings=self.config.max_position_embeddings
        )
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](llama, torch.device("cpu"))


class Norm(nn.RMSNorm):
    """RMS norm computed in the weight's dtype, and returned in the input's; they differ under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def narrowed(x: Tensor) -> Tensor:
    """Return x in the dtype of products: that of autocast, which would cast x again for each product, or its own."""
    return x.to(compute_dtype(x))


class Attention(nn.Module):
    """Projections of attention: [..., `width`] to queries, keys and values [..., heads, d], and back to [..., D].

    Args:
        bias: the projections have a bias.
        qk_norm: queries and keys pass an RMS norm over d.
    """

    def __init__(self, config: AttentionConfig, width: int, bias: bool, qk_norm: bool):
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, config.emb_dim, bias=bias)
        if qk_norm:
            self.q_norm = Norm(self.size, config.rms_norm_eps)
            self.k_norm = Norm(self.size, config.rms_norm_eps)
        self.normed = qk_norm

    def query(self, u: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:  # [..., W] -> [..., H, d]
        query = self.q_proj(u).unflatten(-1, (self.heads, self.size))
        return rotate(self.q_norm(query) if self.normed else query, rope)

    def key_value(self, u: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # [..., K, d] twice
        key, value = (proj(u).unflatten(-1, (self.kv_heads, self.size)) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(key) if self.normed else key, rope), value


class MLP(nn.Module):
    """Gated MLP with SiLU, as in Llama, of inner size `config.inner_dim`."""

    def __init__(self, config: AttentionConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.emb_dim, config.inner_dim, bias=False)
        self.up_proj = nn.Linear(config.emb_dim, config.inner_dim, bias=False)
        self.down_proj = nn.Linear(config.inner_dim, config.emb_dim, bias=False)

    def forward(self, y: Tensor) -> Tensor:  # [..., D] -> [..., D]
        y = narrowed(y)
        return self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:  # [..., heads, d]
    """Apply rotary position embedding, in halves as Llama does; `rope` is the cosines and sines of `Rope`."""
    cos, sin = rope
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def attend(
    query: Tensor,  # [B, f, H, d]
    keys: Tensor,  # [B, K, M, d]
    values: Tensor,  # [B, K, M, e]
    seen: Tensor,  # [B, f, M] bool: the keys that each query attends to
    scale: float | None = None,  # factor of the scores; None: d ** -0.5
) -> Tensor:  # [B, f, H, e]
    """Compute grouped-query attention; heads that share a key head are stacked, so that no key is repeated."""
    batch, rows, heads, size = query.shape
    shared = keys.shape[1]
    # [B, f, H, d] -> [B, K, H/K * f, d]: with 8 heads on 2 key heads, the f queries of heads 0..3 follow each other.
    stacked = query.view(batch, rows, shared, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    # All heads see the same keys. The queries 0..f-1 of one head follow those of another, and so does the mask.
    mask = seen.repeat(1, heads // shared, 1)[:, None]
    out = nn.functional.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask, scale=scale)
    # The way back: [B, K, H/K * f, e] -> [B, K, H/K, f, e] -> [B, f, K, H/K, e] -> [B, f, H, e].
    return out.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)
