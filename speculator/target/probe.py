"""The probe at load: refuses models that can't be decoded exactly, and finds out what the others support."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from speculator.errors import UserError, refuse
from speculator.kernels.host_sync import has_host_sync
from speculator.target.attention.attention import ATTENTION, VARLEN, WINDOWS, attention, set_attention, using_attention
from speculator.target.attention.tree import TokenTree
from speculator.target.cache.kv_cache import KVCache
from speculator.target.encoder.encoder import EncoderInput, StatesOnly, Text
from speculator.target.packed import Layout, in_one_row, in_one_row_with_bounds, masked, one_per_row, packed

if TYPE_CHECKING:
    from speculator.target.base import TrainingTarget
    from speculator.target.in_process import InProcessTarget
    from speculator.target.model import Target

_log = logging.getLogger(__name__)
_PROBE = "speculator_probe"
_LENGTH = 16  # tokens of each of the probe's two texts
_FAR = 2**20  # the furthest position that is examined
# Largest `gap`, in standard deviations of the logits. Rounding stays below it (0.1 for 30 layers in bfloat16); a wrong
# mask or position does not (1 and more).
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}


@torch.no_grad()
def probe_training(target: InProcessTarget) -> None:
    """Compare the logits of hidden states with the model's own, for a text alone and for documents of one row.

    Sets `document_attention` and `output_matrix` of the target.

    Raises:
        UserError: the model's code needs more than hidden states for logits, or its logits differ or are not finite.
    """
    model, name = target.model, f"{target.name}: {type(target.model).__name__}"
    texts, allowed = _texts(target), tolerance(target.model)
    try:
        inputs = _inputs(target, texts)
        with using_attention(model, target.original_attention):
            own = target.aux_layers.prove(inputs).logits.float()
        hidden = target.hidden(texts, sources=_sources(target))
        logits = target.logits(hidden)
        output = model.get_output_embeddings()
        if output is not None and torch.equal(output(hidden).to(logits.device), logits):
            target.output_matrix = output
        if not target.encoder:
            target.document_attention = _choose_document_attention(target, texts, allowed)
    except AttributeError as error:  # its forward pass takes its body apart, as OPT's does
        raise UserError(
            f"{name} is not supported: its code does not compute logits from hidden states alone{_what_now(model)}"
        ) from error
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{name} can't be run: {error}{_what_now(model)}") from error
    worst = gap(logits.float(), own)
    refuse(
        (not own.isfinite().all(), not_finite(target)),
        (own.std() == 0, f"{target.name}: its logits are all the same: the weights are empty"),
        (
            not worst < allowed,
            f"{name} is not supported: the logits of its hidden states differ by {worst:.2g} standard "
            f"deviations{_what_now(model)}",
        ),
    )


@torch.no_grad()
def probe(target: Target) -> None:
    """Compare prefill, a rejected draft and verification of two texts of unequal length with the model's own logits.

    Sets `capturable` of the target. So short a probe can't show sliding windows and rotary factors that follow the
    longest text of a batch, so these are examined separately.

    Raises:
        UserError: the model can't be run through a KV cache, its logits differ, or autocast is on.
    """
    model, device, name = target.model, target.device, f"{target.name}: {type(target.model).__name__}"
    cast = torch.is_autocast_enabled(device.type)
    refuse((cast, f"{name}: under torch.autocast its products are not those of its dtype: decode outside of it"))
    allowed = tolerance(model)
    texts = _texts(target)
    lengths, accepted = torch.tensor([[8, 4], [1, 2]], device=device)
    longest = _LENGTH // 2

    def after(begins: Tensor, width: int, rows: Tensor = texts) -> Tensor:  # [2, _LENGTH, ...] -> [2, width, ...]
        return torch.stack([row[n : n + width] for row, n in zip(rows, begins.tolist(), strict=True)])

    try:
        # The reference: the model's own forward pass, with its own attention and without our cache, once.
        inputs = _inputs(target, texts)
        with using_attention(model, target.original_attention):
            own = model(**inputs, use_cache=False).logits.float()
        windows = read_windows(target, target.context_length)
        WINDOWS.update(windows)
        set_attention(model, ATTENTION)
        # Two rows of unequal length, 8 and 4 tokens, so that a row's padding or its neighbour's cache would show.
        cache = target.cache(2, 2 * _LENGTH)
        cache.read_sources([Text((), source) for source in _sources(target)])
        hidden = target.extend(cache, texts[:, :longest], counts=lengths.tolist())
        cache.commit(lengths)
        prefill = target.logits(hidden).float()
        cache.select(0, 2, longest)
        # A draft of 4 tokens, of which row 0 gets 1 right and row 1 gets 2. Its wrong tokens are the true ones plus 1.
        wrong = torch.arange(4, device=device) >= accepted[:, None]
        target.extend(cache, (after(lengths, 4) + wrong) % target.vocab_size)
        cache.commit(accepted)  # the rest of the draft is rejected
        cache.select(0, 2, longest + 1)
        # The rows have 9 and 6 tokens now. If the rejected tokens' keys were still visible, these logits would show it.
        begins = lengths + accepted
        single = target.logits(target.extend(cache, after(begins, 1))).float()
        rest = after(begins, _LENGTH - longest - 1)
        verified = target.logits(target.extend(cache, rest)).float()
        cache.bucket = 2  # as where steps are captured: with 1 the host reads the lengths, to group the rows by them
        syncs = has_host_sync(lambda: target.logits(target.extend(cache, rest)), device)
        one_device = len({weight.device for weight in model.parameters()}) == 1
        # What an encoder makes of a source goes into buffers that grow with the longest one.
        target.capturable = not syncs and one_device and not target.encoder
        in_tree = _in_tree(target, cache, after(begins, 3)) if target.encoder else None
        # What 16 tokens can't show is examined apart: rotary factors that depend on the longest text of the batch.
        moved = neighbours_matter(target, target.context_length)
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{name} can't be run through a KV cache: {error}{_what_now(model)}") from error
    rows = zip(("longer", "shorter"), prefill, own, lengths.tolist(), strict=True)
    passes = {f"the prefill of the {which} row": gap(row[:n], given[:n]) for which, row, given, n in rows}
    passes["the token after a rejected draft"] = gap(single, after(begins, 1, own))
    passes["the verification"] = gap(verified, after(begins, rest.shape[1], own))
    if in_tree is not None:
        passes["the tree"] = gap(in_tree, after(begins, 3, own))
    first = next((each for each, size in passes.items() if not size < allowed), "")
    window = getattr(target.config, "sliding_window", None)
    refuse(
        (isnan(moved), not_finite(target)),
        (
            bool(first),
            f"{name} can't be verified exactly: its logits with a preallocated cache differ by "
            f"{max(passes.values()):.2g} standard "
            f"deviations, first in {first}{_what_now(model)}",
        ),
        (
            not moved < allowed,
            f"{name} can't be verified exactly: its logits for a text depend on how long the batch's other texts are",
        ),
        (
            _has_window(target) and not any(windows.values()),
            f"{name} can't be verified exactly: none of its attention masks has its sliding window of {window} tokens",
        ),
    )


def _what_now(model: PreTrainedModel) -> str:
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


def _texts(target: InProcessTarget) -> Tensor:  # [2, _LENGTH]
    """Return the token ids of the probe's two texts; with an encoder, no token is the pad token."""
    texts = torch.arange(2 * _LENGTH, device=target.device).view(2, -1) * 7 % target.vocab_size
    if not target.encoder:
        return texts
    pad = target.config.pad_token_id  # which has no position in some families
    return texts if pad is None else (texts + (texts == pad)) % target.vocab_size


def _sources(target: InProcessTarget) -> list[EncoderInput]:
    """Return two sources of unequal length, so that attention to padding would show; [] without an encoder."""
    texts = _texts(target).flip(1).tolist()
    return [tuple(text[:n]) for text, n in zip(texts, (_LENGTH // 2, 3), strict=True)] if target.encoder else []


def _inputs(target: InProcessTarget, texts: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of the model's own forward pass over `texts` [2, _LENGTH], and any sources."""
    if not target.encoder:
        return {"input_ids": texts}
    given = target.encoder.arguments(texts, _sources(target))
    # Masks are given, because some families make theirs from pad tokens.
    masks = {"attention_mask": given["encoder_attention_mask"], "decoder_attention_mask": given["attention_mask"]}
    return {"encoder_outputs": StatesOnly(given["encoder_hidden_states"]), "decoder_input_ids": texts, **masks}


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


def read_windows(target: Target, length: int) -> dict[nn.Module, int | None]:
    """Return the sliding window of each attention layer, found by evaluating the model's masks over `length` positions.

    A window is in tokens; None: the layer attends to all. Layers whose mask is not made by transformers' mask functions
    are left out. Afterwards the model has an attention of the probe's, so the caller must set it again.
    """
    windows: dict[nn.Module, int | None] = {}

    # The mask function of each layer's kind is turned into one number, its window, and passed on as if it were the
    # mask: the attention function then gets it together with the layer.
    def mask(*, mask_function: Callable[..., Tensor], **kwargs: Any) -> Tensor:  # [1, 1, 1, 1]
        return torch.tensor(_window(mask_function, min(length, _FAR))).view(1, 1, 1, 1)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: Any, *args: Any, **kwargs: Any):
        if isinstance(given, Tensor) and given.numel() == 1:
            windows[module] = int(given) or None
        return attention(module, query, key, value, None, *args, **kwargs)

    AttentionInterface.register(_PROBE, attend)
    AttentionMaskInterface.register(_PROBE, mask)
    set_attention(target.model, _PROBE)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=target.device)
    target._body(input_ids=tokens, use_cache=False, **_no_source(target, tokens))
    return windows


def _no_source(target: InProcessTarget, tokens: Tensor) -> dict[str, Tensor]:
    """Return encoder states of zeros for a decoder's pass, where the result does not matter; {} without an encoder."""
    return {"encoder_hidden_states": target.encoder.dummy.expand(*tokens.shape, -1)} if target.encoder else {}


def _in_tree(target: Target, cache: KVCache, tokens: Tensor) -> Tensor:  # [2, 3] -> [2, 3, V]
    """Return the logits of three tokens per row, with a wrong sibling of the second, which none of them may see."""
    # Verify positions: 0 pending, 1 wrong, 2 right, 3 last. Tokens 0 and 1 hang on the pending one, and token 2 on
    # token 1, the right one; a token that sees the wrong one, or counts positions along the cache, gets other logits.
    tree = TokenTree()
    pending, right, last = tokens.split(1, 1)
    tree.tokens, tree.depth = torch.cat([(right + 1) % target.vocab_size, right, last], 1), 2
    tree.parents = torch.tensor([[-1, -1, 1]] * 2, device=tokens.device)
    logits = target.logits(target.extend(cache, torch.cat([pending, tree.tokens], 1), tree))
    return logits[:, [0, 2, 3]].float()


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


def _has_window(target: Target) -> bool:
    config = target.config
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    used = getattr(config, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    return bool(used and isinstance(window, int) and window < target.context_length)


def neighbours_matter(target: Target, length: int) -> float:
    """Return how far a row's hidden states move, in standard deviations, when another row is at the context's end.

    Rotary factors that follow the longest text of a batch move them. The text is short: only its positions are far,
    up to `length`, the context in tokens.
    """
    near = torch.arange(4, device=target.device).expand(2, -1)
    far = torch.stack([near[0], near[0] + min(length, _FAR) - 4])
    # Row 0 is the same in both batches. Row 1 moves to the context's end, which may switch longrope's factors for both.
    given = {"input_ids": near, "use_cache": False, **_no_source(target, near)}
    alone, batched = (target._body(**given, position_ids=at).last_hidden_state[0] for at in (near, far))
    return ((alone - batched).abs().max() / alone.std()).item()


def _choose_document_attention(target: InProcessTarget, texts: Tensor, allowed: float) -> tuple[Any, Layout] | None:
    """Return the first (attention, layout) that reads several documents in a row as if each were alone; None if none.

    `texts` [2, _LENGTH] are read as two documents per row. `allowed` is the largest `gap` between the logits and those
    of each document alone.
    """
    # Two documents of 8 tokens in a row of 16: their ids are False and True.
    half = _LENGTH // 2
    documents = torch.arange(_LENGTH, device=target.device).ge(half).expand_as(texts)
    alone = target.logits(target.hidden(texts.view(-1, half))).view(*texts.shape, -1).float()
    original = target.original_attention
    choices: list[tuple[Any, Layout]] = [(original, packed), (original, masked)]
    if "flash" in (original if isinstance(original, str) else original[""]):
        choices = [(original, in_one_row)]
    elif target.device.type == "cuda" and target.dtype.itemsize == 2:
        flash: list[tuple[Any, Layout]] = [(VARLEN, in_one_row_with_bounds)]
        choices[:0] = flash + [("flash_attention_2", in_one_row)] * is_flash_attn_2_available()
    if original == "eager" and target.device.type == "cuda":  # eager attention keeps the scores of all heads
        at = choices.index((original, packed))
        choices[at:at] = [("flex_attention", packed), ("flex_attention", masked)]
    choices.append((original, one_per_row))  # the slowest, for states that run through the row
    # The fastest first; a family that ignores the layout shows by its logits, one that lacks it by its error.
    for choice in choices:
        try:
            hidden = target.hidden_of_documents(texts, documents, *choice)
            if gap(target.logits(hidden).float(), alone) < allowed:
                return choice
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError):  # not supported by this family
            continue
    return None


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
