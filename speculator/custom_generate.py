"""transformers' own `model.generate` with drafts: `model.generate(ids, custom_generate=speculative(drafter))`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    EosTokenCriteria,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speculator.decoding.cache import ATTENTION
from speculator.decoding.generate import generate
from speculator.decoding.sampling import Sampling
from speculator.drafters import Drafter, HeadDrafter
from speculator.errors import UserError
from speculator.heads import Speculator, load_head
from speculator.target import Target

# In the order in which `Sampling` applies them, with the name that it has for each.
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
# What `generate` makes of the prompt itself; anything else would change what the model computes.
_OWN_INPUTS = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position")


def speculative(
    drafter: Drafter | Speculator | str | Path,
    rule: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Callable[..., Tensor]:
    """A function for `custom_generate` of transformers' `generate`: the same text, or the same law, in fewer passes.

    Taken over from the call: max_new_tokens and max_length, EOS and pad ids, do_sample with temperature, top_k, top_p
    and min_p, attention_mask, num_return_sequences, and stop strings as
    `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`, looked for in the new text. Sampling is seeded from
    torch's generator. A row also ends at the model's context length. transformers hands a custom function neither
    `streamer` nor `assistant_model`: they do nothing.

    Args:
        drafter: a drafter, a head, or a head's folder.
        rule: the accept rule; default: the drafter's own.
        tokenizer: needed for stop strings alone.

    The function gives [B, S + new] as `generate` does: the prompts as they came, then the new tokens, padded on the
    right. It raises UserError for whatever else the call asks for: beams, penalties, constraints, other criteria or
    processors, scores. The model is left as it was.
    """
    known: tuple[Target, Drafter] | None = None

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,  # [B, S] padded on the left
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor:  # [B, S + new]
        nonlocal known
        _refuse_other_modes(generation_config)
        sampling = _sampling(logits_processor, generation_config)
        eos, stop_strings, max_length = _ends(stopping_criteria)
        mask = _mask(input_ids, model_kwargs)
        prompts = [row[kept].tolist() for row, kept in zip(input_ids, mask, strict=True)]
        with _borrowed(model):
            if known is None or known[0].model is not model:
                target = Target(model, tokenizer)  # type: ignore[arg-type]
                known = target, _drafter(drafter, target)
            target, drafts = known
            generation = generate(
                target,
                drafts,
                prompts,
                sampling,
                rule=rule,
                max_new_tokens=max(1, max_length - input_ids.shape[1]),
                stop_strings=stop_strings,
                eos_token_ids=eos,
            )
        return _padded(input_ids, generation.tokens, _pad_id(generation_config, stopping_criteria))

    return decode


@contextmanager
def _borrowed(model: PreTrainedModel) -> Iterator[None]:
    """Lend the model to a `Target`, which freezes it and changes its attention; afterwards it is as it was."""
    attention: Any = model.config._attn_implementation
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs}
    if parts:
        own = {name: part._attn_implementation for name, part in parts.items() if part is not None}
        attention = {"": attention, **own}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        model.set_attn_implementation(ATTENTION)
        yield
    finally:
        model.set_attn_implementation(attention)
        for parameter in trained:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


def _drafter(given: Drafter | Speculator | str | Path, target: Target) -> Drafter:
    if isinstance(given, str | Path):
        return HeadDrafter(load_head(given, target))
    if isinstance(given, Speculator):
        return HeadDrafter(given.to(target.device))  # type: ignore[arg-type]
    return given


def _refuse_other_modes(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if (config.num_beams or 1) > 1:
        raise UserError(f"speculative decoding has no beams: num_beams={config.num_beams}")
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UserError(f"speculative decoding can't do {mode.value.replace('_', ' ')}")
    if config.return_dict_in_generate:
        raise UserError("speculative decoding gives token ids alone: return_dict_in_generate=True")


def _sampling(processors: LogitsProcessorList, config: GenerationConfig) -> Sampling:
    """The call's settings, refusing what the draft and the target can't both be put through."""
    for processor in processors:
        if type(processor) not in _WARPERS:
            raise UserError(
                f"speculative decoding can't apply {type(processor).__name__}: only temperature, top_k, top_p and min_p"
            )
        if getattr(processor, "min_tokens_to_keep", 1) != 1 or getattr(processor, "filter_value", -torch.inf) > -1e30:
            raise UserError(f"{type(processor).__name__}: min_tokens_to_keep and filter_value must be the defaults")
    names = [_WARPERS[type(processor)] for processor in processors]
    if names != [name for name in _WARPERS.values() if name in names]:
        raise UserError(f"logits processors {', '.join(names)}: the order must be {', '.join(_WARPERS.values())}")
    if not config.do_sample:
        return Sampling()
    values = {name: getattr(processor, name) for name, processor in zip(names, processors, strict=True)}
    seed = int(torch.randint(2**62, ()))
    return Sampling(**{"temperature": 1.0, **values}, seed=seed)


def _ends(criteria: StoppingCriteriaList) -> tuple[set[int], list[str], int]:
    """EOS ids, stop strings and the greatest length, prompt and padding included."""
    eos: set[int] = set()
    strings: list[str] = []
    lengths: list[int] = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos.update(criterion.eos_token_id.tolist())
        elif type(criterion) is StopStringCriteria:
            strings += criterion.stop_strings
        elif type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        else:
            raise UserError(
                f"speculative decoding can't stop by {type(criterion).__name__}: only by length, EOS and stop strings"
            )
    return eos, strings, min(lengths, default=2**31)


def _mask(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:  # [B, S] bool
    """Where the prompts are no padding, refusing inputs besides the prompts."""
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise UserError("speculative decoding has a cache of its own: past_key_values can't be given")
    for name, value in model_kwargs.items():
        if name not in _OWN_INPUTS and value is not None:
            raise UserError(f"speculative decoding reads input_ids and attention_mask alone, not {name}")
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    positions = model_kwargs.get("position_ids")
    if positions is not None and (positions != mask.long().cumsum(-1) - 1)[mask.expand_as(positions)].any():
        raise UserError("speculative decoding counts positions itself: position_ids can't be given")
    return mask


def _pad_id(config: GenerationConfig, criteria: StoppingCriteriaList) -> int | None:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    first = [int(criterion.eos_token_id[0]) for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    return first[0] if first else None


def _padded(input_ids: Tensor, new: Sequence[list[int]], pad: int | None) -> Tensor:  # [B, S] -> [B, S + longest]
    width = max(map(len, new))
    if pad is None and any(len(row) < width for row in new):
        raise UserError("rows end at different lengths: give a pad_token_id to fill them up with")
    rows = [row + [pad or 0] * (width - len(row)) for row in new]
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], 1)
