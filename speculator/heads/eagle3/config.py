"""Config of EAGLE-3 (`speculator.heads.eagle3.model`)."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from speculator.heads.attention.base import AttentionConfig
from speculator.heads.unrolled import UnrolledConfig


class Eagle3SpeculatorConfig(UnrolledConfig, AttentionConfig):
    """Shape of an `Eagle3Speculator`; see also `AttentionConfig`.

    Args:
        n_predict: steps unrolled in training, and the default length of a draft; it can draft deeper.
        sliding_window: number of positions that a token attends to, drafted ones and its own included; None for all.
        attention_bias: q, k, v and o have a bias.
        qk_norm: RMS norm on each head's query and key, as in Qwen 3.
        norm_before_residual: the residual is the normed g (see `speculator.heads.eagle3.model`).
        norm_before_fc: one RMS norm over all auxiliary hidden states, before they are projected.
        fc_norm: one RMS norm per auxiliary layer instead.
        norm_output: the next step reads the state after the final norm.
        own_embedding: the checkpoint has an embedding; else the target's is shared.
    """

    model_type = "eagle3_speculator"

    n_predict: int = 5
    sliding_window: int | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = True
    norm_output: bool = True
    own_embedding: bool = False

    def __post_init__(self, **kwargs):
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are mutually exclusive: set one of them to false")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window {self.sliding_window} is below 1: a token would see nothing")
        super().__post_init__(**kwargs)

    @classmethod
    def for_target(cls, target: PreTrainedConfig, **changes: Any) -> AttentionConfig:
        """As in `AttentionConfig`, but the number of heads divides the hidden size, as a Llama config requires.

        Where the target's does not, it is the hidden size over `head_dim`, as in the `speculators` library, or else the
        next smaller divisor; all heads then have keys of their own unless the target's number of key heads fits.
        """
        made = super().for_target(target, **changes)
        size, count = made.emb_dim, made.num_attention_heads
        if size % count == 0 or changes.get("qk_norm") or "num_attention_heads" in changes:
            return made
        fits = size % made.head_dim == 0
        heads = size // made.head_dim if fits else next(n for n in range(count, 0, -1) if size % n == 0)
        keys = heads if heads % made.num_key_value_heads else made.num_key_value_heads
        return super().for_target(target, **{"num_key_value_heads": keys, **changes, "num_attention_heads": heads})

    def describe(self) -> str:
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "qk_norm")
        parts = [
            super().describe(),
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

    def activation_bytes(self, length: int) -> int:  # most activations are recomputed
        return self.n_predict * (8 * self.emb_dim + 3 * self.inner_dim)

    def starts_from_target(self, requested: bool) -> bool:
        return True
