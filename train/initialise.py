"""Build the head to train: random weights, the target's own matrices, or a trained head."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import datasets
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PreTrainedConfig

from speculator.checkpoints import head_folder, load_any, recognise
from speculator.checkpoints.loading import bind
from speculator.errors import UserError
from speculator.heads import ARCHITECTURES, Speculator, SpeculatorConfig
from speculator.target.sharding import whole
from speculator.target.training import TrainingTarget
from train.config import HeadOptions, RunConfig
from train.sizes import longest
from train.vocabulary import count_tokens, most_frequent, unused_token

_SHARED_OPTIONS = ("n_predict", "inner_dim", "draft_vocab_size")
"""Config fields of every architecture that `HeadOptions` names."""


def with_settings_of_start(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Take the architecture, the sizes and the options that are not given from the head of a warm start.

    Args:
        given: names of the fields of `HeadOptions` that the user set.
    """
    options = config.speculator
    if not options.warm_start:
        return config
    folder = head_folder(options.warm_start, options.warm_start_revision)
    recognised = recognise(folder)
    names = {head.config_class.model_type: name for name, head in ARCHITECTURES.items()}
    start = load_any(folder).config
    found = {name: getattr(start, name) or 0 for name in _SHARED_OPTIONS}
    found["architecture"] = names[recognised.head.config_class.model_type]
    if "architecture" in given and options.architecture != found["architecture"]:
        raise UserError(
            f"speculator.warm_start: {options.warm_start} holds a head of architecture {found['architecture']}, "
            f"not the {options.architecture} configured"
        )
    for name in ("inner_dim", "draft_vocab_size"):
        if name in given and getattr(options, name) not in (0, found[name]):
            asked = getattr(options, name)
            raise UserError(f"{options.warm_start} has {name} {found[name]}, but this run's head has {asked}")
    left = {name: value for name, value in found.items() if name not in given}
    own = {name: getattr(start, name) for name in start.own_options()} | options.options
    return dataclasses.replace(config, speculator=dataclasses.replace(options, **left, options=own))


def start_of(config: RunConfig) -> str | Path | None:
    """Return the folder of the trained head that a run starts from; None: it starts from new weights.

    Layers that ship with the target start from its folder, if `initialise` is "target".
    """
    options, target = config.speculator, config.target
    if options.warm_start:
        return head_folder(options.warm_start, options.warm_start_revision)
    if options.initialise == "target" and head_class(options).config_class.ships_with_target:
        return head_folder(target.name_or_path, target.revision)
    return None


def new_head(config: RunConfig, target: TrainingTarget, rows: datasets.Dataset) -> Speculator:
    """Create the configured head with float32 weights, whatever the target's dtype.

    Args:
        rows: training rows; their most frequent tokens become the draft vocabulary, if one is configured.
    """
    options = config.speculator
    about: dict[str, Any] = {
        "base_model_name_or_path": config.target.name_or_path,
        "base_model_adapter": config.target.adapter,
        "base_model_fingerprint": target.fingerprint,
        "trained_length": 0 if target.encoder else config.data.seq_length,  # pairs may be much shorter
        "training_data": config.data.sources,
    }
    where = start_of(config)
    start = None if where is None else load_any(where)
    if start is not None:
        # Binding fills in options, and drops an embedding that is the target's: the new head follows what is left.
        stored = {name: getattr(start.config, name) for name in options.options}
        bind(start, target, str(where))
        own = {
            name: getattr(start.config, name) if value == stored[name] else value
            for name, value in options.options.items()
        }
        options = dataclasses.replace(options, options=own)
        longest_before = start.config.trained_length or 0
        about["trained_length"] = max(about["trained_length"], longest_before)
    # Whatever has drawn random numbers before, a resumed run starts from the same head.
    torch.manual_seed(config.seed)
    if target.tokenizer and start is None and "mask_token_id" in head_class(options).config_class.own_options():
        counts = count_tokens(rows, target.vocab_size, with_loss=False)
        about["mask_token_id"] = unused_token(target.tokenizer, counts, target.eos_token_ids)
    head = head_class(options)(head_config(options, target.config, **about))
    if head.draft_tokens is not None:
        counts = count_tokens(rows, target.vocab_size)
        head.draft_tokens.copy_(most_frequent(counts, len(head.draft_tokens), target.eos_token_ids))
    if start is not None:
        copy_weights(head, start, options, where)
    elif head.config.starts_from_target(options.initialise == "target"):
        head.initialise_from(target.embedding_matrix(), whole(target.output_layer().weight))
    return for_rows(head, target, rows) if target.encoder else bind(head, target)


def for_rows(head: Speculator, target: TrainingTarget, rows: datasets.Dataset) -> Speculator:
    """Return a trained head, bound to the target, with a `trained_length` that covers these rows."""
    head.config.trained_length = max(head.config.trained_length or 0, longest(rows))
    return bind(head, target)


def head_class(options: HeadOptions) -> type[Speculator]:
    """Return the class of the configured architecture; raise a UserError for an unknown one."""
    if options.architecture not in ARCHITECTURES:
        raise UserError(
            f"speculator.architecture: unknown architecture {options.architecture}"
            + _nearest(options.architecture, ARCHITECTURES)
        )
    return ARCHITECTURES[options.architecture]


def head_config(options: HeadOptions, target: PreTrainedConfig, **more: Any) -> SpeculatorConfig:
    """Build the head's config; options that are 0 or null take the value of the target's text config.

    `more` are further fields of the config. Raises a UserError that names the flag of a wrong option.
    """
    config_class = head_class(options).config_class
    given = {name: value for name in _SHARED_OPTIONS if (value := getattr(options, name))}
    own = config_class.own_options()
    for name in options.options:
        if name not in own:
            raise UserError(
                f"--speculator.options.{name}: architecture {options.architecture} has no such option"
                + _nearest(name, own)
            )
    chosen = {name: value for name, value in options.options.items() if value is not None}
    try:
        return config_class.for_target(target, **{**more, **given, **chosen})
    except (UserError, ValueError, TypeError, StrictDataclassError) as error:
        flags = {name: f"--speculator.options.{name}" for name in own}
        flags |= {name: f"--speculator.{name}" for name in _SHARED_OPTIONS}
        named = (flags[word] for word in re.findall(r"\w+", str(error)) if word in flags)
        raise UserError(f"{next(named, '--speculator')}: {error}") from None


def check_options(options: HeadOptions) -> SpeculatorConfig:
    """Refuse options that no target could make valid, before the target is loaded.

    Returns the config of the head for some target.
    """
    if options.warm_start:
        recognise(head_folder(options.warm_start, options.warm_start_revision))
    # Larger than any target, so that only values which no target could have are refused.
    stand_in = LlamaConfig(num_hidden_layers=2**16, vocab_size=2**31)
    return head_config(dataclasses.replace(options, draft_vocab_size=0), stand_in)


def _nearest(name: str, known: Any) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


def parameters(options: HeadOptions, target: PreTrainedConfig) -> int:
    """Count the weights of the configured head without allocating it."""
    with torch.device("meta"):
        head = head_class(options)(head_config(options, target))
    return sum(parameter.numel() for parameter in head.parameters())


def copy_weights(head: Speculator, start: Speculator, options: HeadOptions, where: str | Path | None) -> None:
    """Copy the weights and the draft vocabulary of a trained head; raise a UserError if its shape is another one.

    Args:
        head: the new head, changed in place.
        start: the trained head.
        where: its folder, for the error.
    """
    names = ["vocab_size", "emb_dim", *_SHARED_OPTIONS, *options.options]
    if head.config.max_speculative_tokens is None:
        names.remove("n_predict")  # its weights fit any number of steps
    for name in names:
        found, expected = getattr(start.config, name), getattr(head.config, name)
        if found != expected:
            raise UserError(f"{where} has {name} {found}, but this run's head has {expected}")
    head.load_state_dict(start.state_dict())
