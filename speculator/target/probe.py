"""What the probes at load compare and read: gaps between logits, contexts and windows. Targets run the probes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from speculator.target.attention.attention import attention, set_attention
from speculator.target.base import TrainingTarget

_log = logging.getLogger(__name__)
_PROBE = "speculator_probe"
FAR = 2**20
"""The furthest position that is examined."""
# Largest `gap`, in standard deviations of the logits. Rounding stays below it (0.1 for 30 layers in bfloat16); a wrong
# mask or position does not (1 and more).
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}


def what_now(model: PreTrainedModel) -> str:
    """Return the end of a message about a rejected family: the cause, if the model's source shows it, and a page."""
    own = not model._can_set_attn_implementation()
    cause = " (its layers compute attention in their own code, which ours can't replace)" if own else ""
    return f"{cause}; see docs/contributing/failed-probe.md"


def not_finite(target: TrainingTarget) -> str:
    """Return the message for a target whose states or logits are not finite."""
    if target.dtype == torch.float16:
        return (
            f"{target.name}: its states are not finite in float16, whose range is too small for them: load it in "
            "bfloat16 (--dtype bfloat16; train.py: --target.dtype bfloat16)"
        )
    return f"{target.name}: its logits are not finite: the weights are damaged"


def usable_context(config: Any) -> int | None:
    """Return the longest sequence, in tokens, whose logits are exact for a text config; None: it states no context.

    With YaRN it is the original context times the factor, where `max_position_embeddings` is about the original one.
    With chunked attention it is one chunk, and with longrope the original context.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "yarn" and length and original and length >= original:
        length = max(length, int(original * (rope.get("factor") or 1)))
    # Chunks are counted along the row, not along its documents: in rows of one chunk that makes no difference.
    chunk = config.attention_chunk_size if "chunked_attention" in (getattr(config, "layer_types", None) or ()) else None
    return min((each for each in (length, chunk, original_context(config)) if each), default=None)


def context_length(config: PreTrainedConfig, name: str) -> int:
    """Return the `usable_context`, or 2**31; a warning names the target if longrope limits it."""
    length = usable_context(config)
    if length and length == original_context(config) != getattr(config, "max_position_embeddings", None):
        _log.warning(
            f"{name}: the context is limited to {length} tokens: beyond that, longrope makes a text depend on the "
            "lengths of the other texts in its batch"
        )
    return length or 2**31


def original_context(config: PreTrainedConfig) -> int | None:
    """Return longrope's original context, beyond which factors depend on a batch's longest text; else None."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    found = [
        each.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for each in (rope, *rope.values())
        if isinstance(each, dict) and each.get("rope_type", each.get("type")) == "longrope"
    ]
    return min((length for length in found if length), default=None)


def read_windows(model: PreTrainedModel, length: int, run: Callable[[Tensor], Any]) -> dict[nn.Module, int | None]:
    """Return the sliding window of each attention layer, found by evaluating the model's masks over `length` positions.

    `run` is the forward pass of the model's body over tokens.

    A window is in tokens; None: the layer attends to all. Layers whose mask is not made by transformers' mask functions
    are left out. Afterwards the model has an attention of the probe's, so the caller must set it again.
    """
    windows: dict[nn.Module, int | None] = {}

    # The mask function of each layer's kind is turned into one number, its window, and passed on as if it were the
    # mask: the attention function then gets it together with the layer.
    def mask(*, mask_function: Callable[..., Tensor], **kwargs: Any) -> Tensor:  # [1, 1, 1, 1]
        return torch.tensor(_window(mask_function, min(length, FAR))).view(1, 1, 1, 1)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: Any, *args: Any, **kwargs: Any):
        if isinstance(given, Tensor) and given.numel() == 1:
            windows[module] = int(given) or None
        return attention(module, query, key, value, None, *args, **kwargs)

    AttentionInterface.register(_PROBE, attend)
    AttentionMaskInterface.register(_PROBE, mask)
    set_attention(model, _PROBE)
    run(torch.zeros(1, 2, dtype=torch.long, device=model.device))
    return windows


def _window(mask_function: Callable[..., Tensor], length: int) -> int:
    """Return how many of `length` positions a late one attends to, itself included; 0 if to all before it.

    Raises a ValueError if the mask is neither causal nor a sliding window. `mask_function` is one of transformers'.
    """
    # A sliding window gives its size at both positions (0 at the first if that sees everything), full attention gives 0
    # twice, and chunked attention gives two different counts.
    slots, first = torch.arange(length), torch.tensor(0)
    widths = []
    for position in (2 * length // 3, length - 1):
        seen = mask_function(first, first, torch.tensor(position), slots).expand(length)
        if seen.all() and position < length - 1:  # cross attention
            return 0
        count = int(seen.sum())
        if not count or not seen[position + 1 - count : position + 1].all():
            raise ValueError("its attention mask is neither causal nor a sliding window")
        widths.append(0 if count == position + 1 else count)
    if widths[0] not in (0, widths[1]):
        raise ValueError("its attention mask is neither causal nor a sliding window")
    return widths[1]


def has_window(config: Any, length: int) -> bool:
    """Return whether a text config has layers with a sliding window shorter than `length` tokens."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    used = getattr(config, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    return bool(used and isinstance(window, int) and window < length)


def tolerance(model: PreTrainedModel) -> float:
    """Return the largest `gap` that rounding explains in a model's dtype."""
    # Some quantised models round activations as coarsely as bfloat16.
    return _TOLERANCE[torch.bfloat16 if getattr(model, "is_quantized", False) else model.dtype]


def gap(logits: Tensor, expected: Tensor) -> float:  # [B, S, V] both
    """Return the root mean square difference at the worst position, in standard deviations of the expected logits.

    The largest difference of a single logit would grow with the vocabulary by rounding alone.
    """
    worst = (logits - expected).square().mean(-1).max().sqrt()
    return (worst / expected.std()).item()
