"""Speculative decoding inside transformers: `model.generate(ids, custom_generate=speculative(drafter))`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    EosTokenCriteria,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speculator.checkpoints import head_folder
from speculator.checkpoints.loading import bind, load_head
from speculator.decoding.engine import generate
from speculator.decoding.request import StopStrings
from speculator.decoding.sampling import Sampling
from speculator.drafters import Drafter, HeadDrafter
from speculator.drafters.tuning import adaptive_drafter, read_tuning
from speculator.errors import UserError
from speculator.heads import Speculator
from speculator.kernels.fused_norms import fuse_norms, restore_norms
from speculator.kernels.linear import pack_linears, unpack_linears
from speculator.target.attention.attention import ATTENTION, original_attention, set_attention
from speculator.target.encoder import positions
from speculator.target.model import Target
from speculator.target.text import Encoded, Text

# In the order in which `Sampling` applies them, with its name for each.
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
# Inputs that `generate` derives from the prompt; any other would change what the model computes.
_CACHES = ("cache", "past_key_values")  # the name since transformers 5.24, and before
_PROMPT_INPUTS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *_CACHES)


def speculative(
    drafter: Drafter | Speculator | str | Path,
    rule: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Callable[..., Tensor]:
    """Return a function for `custom_generate`: same output distribution as `generate`, fewer forward passes.

    These settings of the call apply: max_new_tokens, max_length, EOS and pad ids, do_sample with temperature, top_k,
    top_p and min_p, attention_mask, num_return_sequences. Pass stop strings as
    `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`. Sampling is seeded from torch's generator. A row also
    ends at the model's context length. transformers does not pass `streamer` and `assistant_model` on, so they have no
    effect. Other settings (beams, penalties, constraints, other criteria, scores) raise a UserError.

    Args:
        drafter: a drafter; a head, which drafts a chain of n_predict tokens; or a head's folder, which drafts
            adaptively (see `load_drafter`), or that chain if `rule` is given.
        rule: accept rule; default: the drafter's own.
        tokenizer: required for stop strings only.

    Calls in several threads wait for each other, except that those of an encoder-decoder model must not overlap:
    transformers runs the encoder first.

    The function returns [B, S + new], as `generate` does. The model is restored after each call, and its weights may
    change between calls in any way. On a CPU each call packs them again (`speculator.kernels.linear`), which takes as
    long as two to five plain steps.
    """
    borrowed = _BorrowedModel(tokenizer)

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,  # [B, S] padded on the left
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor:  # [B, S + new]
        mode = generation_config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise UserError(f"speculative decoding does not support {mode.value.replace('_', ' ')}")
        if generation_config.return_dict_in_generate:
            raise UserError("speculative decoding returns token ids only, so not with return_dict_in_generate=True")
        sampling = _sampling(logits_processor, generation_config)
        eos, stop_strings, max_length = _ends(stopping_criteria)
        sources = _sources(model_kwargs)
        mask = _mask(input_ids, model_kwargs)
        prompts = [row[kept].tolist() for row, kept in zip(input_ids, mask, strict=True)]
        if sources:
            prompts = [Text(prompt, source) for prompt, source in zip(prompts, sources, strict=True)]
        with borrowed.target(model) as target:
            generation = generate(
                target,
                borrowed.drafter(drafter, sampling, len(prompts), adaptive=rule is None),
                prompts,
                sampling,
                rule=rule,
                max_new_tokens=max(1, max_length - input_ids.shape[1]),
                stop_strings=StopStrings(stop_strings, tokenizer, from_prompt=True) if stop_strings else (),
                eos_token_ids=eos,
            ).check()  # one tensor holds all rows: it has no place for a failure
        return _padded(input_ids, generation.tokens, _pad_id(generation_config, stopping_criteria))

    return decode


_LOCKS: WeakKeyDictionary[PreTrainedModel, RLock] = WeakKeyDictionary()
"""For each model, held while a call changes it."""


class _BorrowedModel:
    """The user's model as a `Target`, created in the first call of `target` and in use during calls only.

    Between calls the model is as the user left it, and no copy of its weights is kept: nothing would tell that an
    optimizer or a merged adapter has changed them.

    Args:
        tokenizer: the target's tokenizer; None: what needs one is refused.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self._tokenizer = tokenizer
        self._target: Target | None = None
        self._modules: list[nn.Module] = []
        self._place: tuple[torch.device, torch.dtype] | None = None
        self._head: Speculator | None = None
        self._drafters: dict[tuple[float, int], Drafter] = {}

    @contextmanager
    def target(self, model: PreTrainedModel) -> Iterator[Target]:
        """Yield the model as a frozen `Target` with packed matrices and our attention; restore the model at the end."""
        # In another thread a second call would find the model half changed, and leave it so.
        with _LOCKS.setdefault(model, RLock()):
            # Another model than in the last call, another output layer or adapter, or the same one elsewhere: nothing
            # of the old one is kept.
            modules, place = list(model.modules()), (model.device, model.dtype)
            if self._modules != modules or self._place != place:
                self._target, self._head, self._drafters, self._place = None, None, {}, place
            is_target = model.config._attn_implementation == ATTENTION  # the user has it as a `Target` too
            attention = original_attention(model)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            training = [module for module in model.modules() if module.training]
            packed = pack_linears(model)
            fused = fuse_norms(model) if model.device.type == "cuda" else []
            try:
                if self._target is None:
                    self._target = Target(model, self._tokenizer)  # type: ignore[arg-type]
                    self._modules = modules
                model.eval().requires_grad_(False)
                set_attention(model, ATTENTION)
                self._target.count_by_row()
                yield self._target
            finally:
                unpack_linears(packed)
                restore_norms(fused)
                set_attention(model, ATTENTION if is_target else attention)
                if not is_target:
                    positions.remove(model)
                for parameter in trained:
                    parameter.requires_grad_(True)
                for module in training:
                    module.training = True

    def drafter(
        self, given: Drafter | Speculator | str | Path, sampling: Sampling, rows: int, adaptive: bool
    ) -> Drafter:
        """Return the drafter for `speculative`'s argument `given`, bound to the target that `target` yields.

        Args:
            given: a drafter, which is returned, a head or a head's folder.
            sampling: settings of the call. A folder's drafter is made once for greedy decoding, once for sampling.
            rows: batch size; a folder's drafter is made once for each power of two.
            adaptive: a folder's drafter drafts adaptively, not a chain of n_predict tokens.
        """
        assert self._target is not None
        if not isinstance(given, str | Path | Speculator):
            return given
        if isinstance(given, Speculator):
            bind(given, self._target)
            return HeadDrafter(given.to(self._target.device))  # type: ignore[arg-type]
        rows = 1 << (rows - 1).bit_length()
        key = (sampling.greedy, rows)
        if self._head is None:
            self._head = load_head(given, self._target)
        else:
            bind(self._head, self._target)  # it may have copied rows of the target's output matrix
        if key not in self._drafters:
            self._drafters[key] = HeadDrafter(self._head)
            if adaptive:
                tuning = read_tuning(head_folder(given), self._head)
                self._drafters[key] = adaptive_drafter(
                    self._head, self._target, tuning, temperatures=[sampling.temperature], batch_size=rows
                )
        return self._drafters[key]


def _sampling(processors: LogitsProcessorList, config: GenerationConfig) -> Sampling:
    """Return the settings of the call's logits processors, with a seed drawn from torch's generator.

    Raises a UserError for a processor or a setting that `Sampling` lacks, and for another order.
    """
    for processor in processors:
        if type(processor) not in _WARPERS:
            raise UserError(
                f"speculative decoding supports temperature, top_k, top_p and min_p, not {type(processor).__name__}"
                + "; the model's generation_config may ask for it: pass repetition_penalty=1.0"
                * isinstance(processor, RepetitionPenaltyLogitsProcessor)
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
    """Return EOS ids, stop strings and the maximum length in tokens, prompt and padding included.

    Without a limit the length is 2^31. Raises a UserError for any other criterion.
    """
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
                f"speculative decoding supports length, EOS and stop strings, not {type(criterion).__name__}"
            )
    return eos, strings, min(lengths, default=2**31)


def _sources(model_kwargs: dict[str, Any]) -> list[Encoded]:
    """Remove the encoder's states and mask from the inputs; return each row's states, unpadded ([]: no encoder)."""
    if (encoded := model_kwargs.pop("encoder_outputs", None)) is None:
        return []
    states, mask = encoded[0], model_kwargs.pop("attention_mask", None)  # [B, S, D], [B, S]
    kept = torch.ones(states.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    return [Encoded.of(row[own]) for row, own in zip(states, kept, strict=True)]


def _mask(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:  # [B, S] bool
    """Return the mask of prompt tokens, False at padding. Raises a UserError for inputs besides the prompts."""
    for name in _CACHES:
        cache = model_kwargs.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
            raise UserError(f"speculative decoding creates its own cache, so not with {name}")
    for name, value in model_kwargs.items():
        if name not in _PROMPT_INPUTS and value is not None:
            raise UserError(f"speculative decoding reads input_ids and attention_mask, not {name}")
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    positions = model_kwargs.get("position_ids")
    # With a mask of 0 0 1 1 1 the positions must be 0 1 2 at the ones; elsewhere they don't matter.
    if positions is not None and (positions != mask.long().cumsum(-1) - 1)[mask.expand_as(positions)].any():
        raise UserError("speculative decoding counts positions itself, so not with position_ids")
    return mask


def _pad_id(config: GenerationConfig, criteria: StoppingCriteriaList) -> int | None:
    """Return the config's padding id, else the first EOS id; None without both."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    first = [int(criterion.eos_token_id[0]) for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    return first[0] if first else None


def _padded(input_ids: Tensor, new: Sequence[list[int]], pad: int | None) -> Tensor:  # [B, S] -> [B, S + longest]
    """Append each row's new tokens, padded on the right; unequal lengths without `pad` raise a UserError."""
    width = max(map(len, new))
    if pad is None and any(len(row) < width for row in new):
        raise UserError("rows end at different lengths, which needs a pad_token_id")
    rows = [row + [pad or 0] * (width - len(row)) for row in new]
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], 1)
