"""Config of EAGLE-3 (`speculator.heads.eagle3.model`)."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from speculator.errors import UserError
from speculator.heads.unrolled import UnrolledConfig

DEFAULT_AUX_LAYERS = 3
"""Number of auxiliary layers of a head that names none."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rope types that do not depend on the text's length."""


def default_aux_layers(layers: int) -> list[int]:
    """Auxiliary layers that servers use for a head that names none: 2, L // 2, L - 3."""
    if layers < 7:
        raise UserError(f"a target of {layers} layers has no default aux_layers, which need 7: name them")
    return [2, layers // 2, layers - 3]


class Eagle3SpeculatorConfig(UnrolledConfig):
    """Shape of an `Eagle3Speculator`.

    Args:
        n_predict: steps unrolled in training, and the default length of a draft; it can draft deeper.
        inner_dim: inner size of the MLP.
        num_attention_heads: H.
        num_key_value_heads: K, a divisor of H.
        head_dim: d.
        rms_norm_eps: epsilon of all norms.
        rope_parameters: as in a Llama config.
        max_position_embeddings: as in a Llama config; rope may depend on it.
        sliding_window: number of positions that a token attends to, besides its own steps; None for all.
        attention_bias: q, k, v and o have a bias.
        qk_norm: RMS norm on each head's query and key, as in Qwen 3.
        norm_before_residual: the residual is the normed g.
        norm_before_fc: one RMS norm over all auxiliary hidden states.
        fc_norm: one RMS norm per auxiliary layer.
        norm_output: the next step reads the normed state.
        aux_layers: target layers to read, ascending, each as the number of layers before it; None for
            `default_aux_layers`.
        own_embedding: the checkpoint has an embedding; else the target's is shared.
    """

    model_type = "eagle3_speculator"

    n_predict: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = True
    norm_output: bool = True
    aux_layers: list[int] | None = None
    own_embedding: bool = False

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} heads are not a multiple of {self.num_key_value_heads}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are mutually exclusive: set one of them to false")
        if self.aux_layers is not None and (
            not self.aux_layers or self.aux_layers[0] < 0 or sorted(set(self.aux_layers)) != self.aux_layers
        ):
            raise ValueError(f"aux_layers {self.aux_layers} are not distinct layers in ascending order")
        super().__post_init__(**kwargs)
        kind = self.rope_parameters["rope_type"] if self.rope_parameters else "none"
        if kind not in ROPES:
            raise ValueError(f"rope of type {kind}; known: {', '.join(ROPES)}")

    def describe(self) -> str:
        layers = " ".join(map(str, self.aux_layers)) if self.aux_layers else "by the target's depth"
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "qk_norm")
        parts = [
            f"{self.n_predict} steps, {self.num_attention_heads} heads of {self.head_dim} over "
            f"{self.num_key_value_heads}, aux layers {layers}",
            *(flag for flag in (*flags, "own_embedding") if getattr(self, flag)),
            *([f"sliding window {self.sliding_window}"] if self.sliding_window else []),
        ]
        return ", ".join(parts)

    @property
    def max_speculative_tokens(self) -> None:
        return None

    @property
    def cached_values(self) -> int:
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def activation_bytes(self) -> int:  # most activations are recomputed
        return self.n_predict * (8 * self.emb_dim + 3 * self.inner_dim)

    def starts_from_target(self, requested: bool) -> bool:
        return True

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layers or range(DEFAULT_AUX_LAYERS))

    @classmethod
    def for_target(cls, target: PreTrainedConfig, **changes: Any) -> Eagle3SpeculatorConfig:
        """Build a config with the target's sizes, heads and rope; `changes` override them.

        The rope is that of the target's full-attention layers. It is a plain one if the target's depends on the text's
        length, covers a part of each head, or is absent.
        """
        heads = target.num_attention_heads
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
            "rope_parameters": dict(rope),
            "max_position_embeddings": target.max_position_embeddings,
        }
        layers = target.num_hidden_layers
        if "aux_layers" not in changes:
            shape["aux_layers"] = default_aux_layers(layers)
        made = cls(**{**shape, **changes})
        if made.aux_layers and made.aux_layers[-1] >= layers:
            raise UserError(f"aux_layers {made.aux_layers}: a target of {layers} layers has 0 to {layers - 1}")
        return made
