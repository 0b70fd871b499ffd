"""What a model's own code does far out in its context, asked at load without processing long texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from speculator.target.attention import attention

_PROBE = "speculator_probe"
_FAR = 2**20  # positions; further out nothing is looked at


def original_context(config: PreTrainedConfig) -> int | None:
    """The length beyond which longrope changes every position's factors by the longest text of a batch; else None.

    (Dynamic NTK does so beyond `max_position_embeddings` alone, where a context ends anyway.)
    """
    rope: Any = getattr(config, "rope_parameters", None) or {}
    found = [
        each.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for each in (rope, *rope.values())
        if isinstance(each, dict) and each.get("rope_type", each.get("type")) == "longrope"
    ]
    return min((length for length in found if length), default=None)


def read_windows(model: PreTrainedModel, length: int) -> dict[nn.Module, int | None]:
    """The sliding window of each attention layer by the model's own masks, evaluated over the whole context.

    A layer whose mask does not come from transformers' mask functions is left out.

    Args:
        model: its attention implementation is changed.
        length: of its context.

    Raises:
        ValueError: a mask that is neither causal nor a window.
    """
    windows: dict[nn.Module, int | None] = {}

    def mask(*, mask_function: Callable[..., Tensor], **kwargs: Any) -> Tensor:  # [1, 1, 1, 1]
        return torch.tensor(_window(mask_function, min(length, _FAR))).view(1, 1, 1, 1)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: Any, *args: Any, **kwargs: Any):
        if isinstance(given, Tensor) and given.numel() == 1:
            windows[module] = int(given) or None
        return attention(module, query, key, value, None, *args, **kwargs)

    AttentionInterface.register(_PROBE, attend)
    AttentionMaskInterface.register(_PROBE, mask)
    model.set_attn_implementation(_PROBE)
    model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    return windows


def _window(mask_function: Callable[..., Tensor], length: int) -> int:
    """How many tokens, its own included, a mask lets a token see that has many before it; 0 where it sees them all."""
    slots, first = torch.arange(length), torch.tensor(0)
    widths = []
    for place in (2 * length // 3, length - 1):
        seen = mask_function(first, first, torch.tensor(place), slots).expand(length)
        count = int(seen.sum())
        if not count or not seen[place + 1 - count : place + 1].all():
            raise ValueError("its attention mask is neither causal nor a sliding window")
        widths.append(0 if count == place + 1 else count)
    if widths[0] not in (0, widths[1]):
        raise ValueError("its attention mask is neither causal nor a sliding window")
    return widths[1]


def neighbours_matter(body: nn.Module, length: int, device: torch.device) -> float:
    """How far, in standard deviations, a row's hidden states move when another row of the batch is at the end of the
    context: rotary factors that follow the longest text do that. Only the positions are far out, not the text.
    """
    near = torch.arange(4, device=device).expand(2, -1)
    far = torch.stack([near[0], near[0] + min(length, _FAR) - 4])
    alone, beside = (body(input_ids=near, position_ids=at, use_cache=False).last_hidden_state[0] for at in (near, far))
    return ((alone - beside).abs().max() / alone.std()).item()
