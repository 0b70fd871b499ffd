"""The MTP layer: a decoder layer of the target's own family, with attention by a given function (`Attend`)."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModel, PreTrainedConfig, PreTrainedModel

from speculator.errors import UserError, first_line

ATTENTION = "speculator_mtp"
Attend = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]
"""Attention of queries [B, T, H, d], keys [B, T, K, d] and values [B, T, K, e] of one pass, with the factor of the
scores and the sliding window: [B, T, H, e]. It decides which other keys a position sees."""
_attend: ContextVar[Attend] = ContextVar("_attend")


def empty_decoder(config: dict[str, Any]) -> PreTrainedModel:
    """Build a model without an output matrix, in float32 with initial weights, from a config such as `block_of`'s.

    The head takes its layers, norm class and rotary embedding. Raises a UserError for an unsupported family.
    """
    try:
        text = CONFIG_MAPPING[config["model_type"]](**config)
        decoder = AutoModel.from_config(text, dtype=torch.float32)
        decoder.set_attn_implementation(ATTENTION)
        decoder.norm, decoder.rotary_emb  # noqa: B018 (used, with the layers)
        if len(decoder.layers) != config["num_hidden_layers"]:
            raise ValueError("its layers are not counted by num_hidden_layers")
        if any(name.endswith(".indexer") for name, _ in decoder.named_modules()):
            raise ValueError("its attention chooses keys by an indexer, which has keys of its own")
    except Exception as error:  # whatever the family's code needs
        raise UserError(
            f"no MTP layer can be built of a decoder layer of {config['model_type']}: {first_line(error)}"
        ) from None
    return decoder


class MTPLayer(nn.Module):
    """One MTP layer: it norms and projects [embedding, state], then runs a decoder layer; `norm` is applied outside."""

    def __init__(self, block: nn.Module, norm: type[nn.Module], size: int, eps: float):
        super().__init__()
        self.enorm, self.hnorm, self.norm = norm(size, eps=eps), norm(size, eps=eps), norm(size, eps=eps)  # type: ignore[call-arg]
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = block

    def forward(
        self,
        embedded: Tensor,  # [B, T, D]
        state: Tensor,  # [B, T, D]
        rope: Any,
        positions: Tensor,  # [B, T]
        attend: Attend,
    ) -> Tensor:  # [B, T, D]
        """Return the layer's output before its final norm."""
        z = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], -1))
        # transformers' layer passes no argument of ours to its attention function, which reads this variable instead.
        running = _attend.set(attend)
        try:
            y = self.block(
                z, position_embeddings=rope, attention_mask=None, position_ids=positions, past_key_values=None
            )
        finally:
            _attend.reset(running)
        return y[0] if isinstance(y, tuple) else y


class Rotary:
    """The family's rotary embedding, created per device. It is no submodule, so a checkpoint does not contain it."""

    def __init__(self, config: PreTrainedConfig, kind: type[nn.Module]):
        self.config, self.kind = config, kind
        rope = getattr(config, "rope_parameters", None) or {}
        self.by_type = all(isinstance(value, dict) for value in rope.values()) and bool(rope)
        self._made: dict[torch.device, Any] = {}

    def __call__(self, x: Tensor, positions: Tensor) -> Any:  # [B, T, D], [B, T]
        """Return the `position_embeddings` argument of the decoder layer; x gives the dtype and device."""
        if x.device not in self._made:
            self._made[x.device] = self.kind(config=self.config).to(x.device)
        which = {"layer_type": self.config.layer_types[0]} if self.by_type else {}
        return self._made[x.device](x, positions, **which)


# transformers calls it with these arguments by name, so they stay as they are
def attention(
    module: nn.Module,
    query: Tensor,  # [B, H, T, d]
    key: Tensor,  # [B, K, T, d]
    value: Tensor,  # [B, K, T, e]
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' layers: it calls the `Attend` that `MTPLayer.forward` has set."""
    if softcap is not None or s_aux is not None:
        raise UserError("MTP layers whose attention has sinks or soft-capped scores are not supported")
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return _attend.get()(
        query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window
    ), None


AttentionInterface.register(ATTENTION, attention)
