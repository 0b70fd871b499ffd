"""Build the head to train: random weights, the target's own matrices, or a trained head."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from speculator.checkpoints import config_of, head_folder, load_any
from speculator.checkpoints.loading import bind
from speculator.checkpoints.native import declared_fields
from speculator.errors import UserError, refuse, removed
from speculator.heads import ARCHITECTURES, Speculator, SpeculatorConfig
from speculator.target.base import TrainingTarget
from speculator.target.sharding import whole
from train.config import HeadOptions, RunConfig
from train.sizes import longest
from train.vocabulary import count_tokens, most_frequent, unused_token

if TYPE_CHECKING:
    from train.settle import Run

_SHARED_OPTIONS = ("n_predict", "inner_dim", "draft_vocab_size")
"""Config fields of every architecture that `HeadOptions` names."""


def with_settings_of_start(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Return the config with the architecture, sizes and options of a warm start's head where the user gave none.

    Without a warm start it is unchanged. A UserError is raised if what is given contradicts the head.

    Args:
        given: names of the fields of `HeadOptions` that the user set.
    """
    options = config.speculator
    if not options.warm_start:
        return config
    start = config_of(head_folder(options.warm_start, options.warm_start_revision))
    names = {head.config_class.model_type: name for name, head in ARCHITECTURES.items()}
    found = {name: getattr(start, name) or 0 for name in _SHARED_OPTIONS}
    found["architecture"] = names[start.model_type]
    if "architecture" in given and options.architecture != found["architecture"]:
        raise UserError(
            f"speculator.warm_start: {options.warm_start} holds a head of architecture {found['architecture']}, "
            f"not the {options.architecture} configured"
        )
    own = {name: getattr(start, name) for name in start.own_options()}
    unset = [name for name in start.target_options if getattr(start, name) is None]  # they follow from the target
    known = own.keys() - {*unset, *_free(start)}
    fixed = [name for name in _SHARED_OPTIONS if name in given and name not in _free(start)]
    if start.draft_vocab_size is None and options.draft_vocab_size >= start.vocab_size:  # all tokens, as with 0
        fixed = [name for name in fixed if name != "draft_vocab_size"]
    asked = {name: value for name in fixed if (value := getattr(options, name))}
    asked |= {name: value for name, value in options.options.items() if name in known}
    wrong = {name: value for name, value in asked.items() if value not in (None, getattr(start, name))}
    if wrong:
        has = " and ".join(f"{name} {getattr(start, name)}" for name in wrong)
        raise UserError(
            f"{options.warm_start} has {has}, but this run's head has {' and '.join(map(str, wrong.values()))}"
        )
    left: dict[str, Any] = {name: value for name, value in found.items() if name not in given}
    return dataclasses.replace(config, speculator=dataclasses.replace(options, **left, options=own | options.options))


def _free(start: SpeculatorConfig) -> tuple[str, ...]:
    """Return the names of the config's fields in which a run may differ from the head that it starts from."""
    # Weights that can draft to any depth fit any number of steps.
    return start.extensions if start.max_speculative_tokens is not None else (*start.extensions, "n_predict")


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


def new_head(run: Run, target: TrainingTarget, rows: datasets.Dataset, length: int) -> Speculator:
    """Return the run's head with float32 weights, and with the target's matrices where it has none of its own.

    The weights are those of `start_of`, copies of the target's matrices, or random by the run's seed.

    Args:
        rows: training rows; their most frequent tokens become the draft vocabulary, if one is configured.
        length: number of tokens in a training row.
    """
    config, options, made = run.config, run.config.speculator, copy.deepcopy(run.head)
    made.base_model_name_or_path = config.target.name_or_path
    made.base_model_adapter = config.target.adapter
    made.base_model_fingerprint = target.fingerprint
    made.trained_length = length
    made.training_data = config.data.sources
    where = start_of(config)
    start = None if where is None else load_any(where)
    if start is not None:
        # Binding fills in options, and drops an embedding that is the target's: the new head follows what is left.
        stored = {name: getattr(start.config, name) for name in options.options}
        bind(start, target, str(where))
        for name, value in options.options.items():
            if value == stored[name] and (bound := getattr(start.config, name)) is not None:
                setattr(made, name, bound)
        made.trained_length = max(made.trained_length, start.config.trained_length or 0)
    # Whatever has drawn random numbers before, a resumed run starts from the same head.
    torch.manual_seed(config.seed)
    chosen = options.options.get("mask_token_id") is not None
    if target.tokenizer and start is None and "mask_token_id" in made.own_options() and not chosen:
        counts = count_tokens(rows, target.vocab_size, with_loss=False)
        made.mask_token_id = unused_token(target.tokenizer, counts, target.eos_token_ids)
    head = head_class(options)(made)
    if head.draft_tokens is not None:
        counts = count_tokens(rows, target.vocab_size)
        head.draft_tokens.copy_(most_frequent(counts, len(head.draft_tokens), target.eos_token_ids))
    if start is not None:
        copy_weights(head, start, options, where)
        _reach(head.config)
    elif made.starts_from_target(options.initialise == "target"):
        head.initialise_from(target.embedding_matrix(), whole(target.output_layer().weight))
    return bind(head, target)


def _reach(head: SpeculatorConfig) -> None:
    """Let a head's config state as long a context as it trains on: vLLM drafts no further, and others write 2,048."""
    stated, rope = (getattr(head, name, None) for name in ("max_position_embeddings", "rope_parameters"))
    # Other kinds of rope compute something else for another length.
    if stated and (rope or {}).get("rope_type", "default") == "default":
        head.max_position_embeddings = max(stated, head.trained_length or 0)  # type: ignore[attr-defined]


def for_rows(head: Speculator, target: TrainingTarget, rows: datasets.Dataset) -> Speculator:
    """Set a head's `trained_length` to cover these rows, give it the target's matrices that it lacks, and return it."""
    head.config.trained_length = max(head.config.trained_length or 0, longest(rows))
    _reach(head.config)
    return bind(head, target)


def head_class(options: HeadOptions) -> type[Speculator]:
    """Return the class of the configured architecture; raise a UserError for an unknown one."""
    if gone := removed(f"speculator.architecture {options.architecture}"):
        raise UserError(gone)
    if options.architecture not in ARCHITECTURES:
        raise UserError(
            f"speculator.architecture: unknown architecture {options.architecture}"
            + _nearest(options.architecture, ARCHITECTURES)
        )
    return ARCHITECTURES[options.architecture]


def head_config(options: HeadOptions, target: PreTrainedConfig) -> SpeculatorConfig:
    """Build the head's config; options that are 0 or null take the value of the target's text config.

    Raises a UserError that names the flag of a wrong option.
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
    kinds = declared_fields(config_class)
    for name, kind in kinds.items():
        value = chosen.get(name)
        if kind is float and type(value) is int:
            value = chosen[name] = float(value)
        # Not `isinstance`, for which true is an int too.
        fits = value is None or type(value) is kind
        refuse((not fits, f"--speculator.options.{name}: expected {kind.__name__}, got {value!r}"))
        if kind is list and value and any(type(element) is not int for element in value):  # of layers
            raise UserError(f"--speculator.options.{name}: expected a list of int, got {value!r}")
    try:
        return config_class.for_target(target, **{**given, **chosen})
    except (UserError, ValueError, TypeError, StrictDataclassError) as error:
        flags = {name: f"--speculator.options.{name}" for name in own}
        flags |= {name: f"--speculator.{name}" for name in _SHARED_OPTIONS}
        named = (flags[word] for word in re.findall(r"\w+", str(error)) if word in flags)
        raise UserError(f"{next(named, '--speculator')}: {error}") from None


def _nearest(name: str, known: Any) -> str:
    """Return the end of an error message: the valid name nearest to a wrong one, or all valid names."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


def without_memory(run: Run) -> Speculator:
    """Return the run's head on the meta device, which allocates no weights."""
    with torch.device("meta"):
        return head_class(run.config.speculator)(copy.deepcopy(run.head))


def parameters(run: Run) -> int:
    """Count the weights of the run's head."""
    return sum(parameter.numel() for parameter in without_memory(run).parameters())


def copy_weights(head: Speculator, start: Speculator, options: HeadOptions, where: str | Path | None) -> None:
    """Copy the weights and the draft vocabulary of a trained head; raise a UserError if its shape is another one.

    Parts that only the new head has, by the `extensions` of its config, keep their initial weights.

    Args:
        head: the new head, changed in place.
        start: the trained head.
        options: sizes and options of the new head; those named here must be the same in the trained one.
        where: its folder, for the error.
    """
    own, stored = head.state_dict(), start.state_dict()
    for name in (*_SHARED_OPTIONS, *options.options):
        found, expected = getattr(start.config, name), getattr(head.config, name)
        if found != expected and name not in _free(head.config):
            raise UserError(f"{where} has {name} {found}, but this run's head has {expected}")
    for name, tensor in stored.items():
        if name not in own or own[name].shape != tensor.shape:
            raise UserError(f"{where} has {name} {list(tensor.shape)}, which does not fit this run's head")
    # With the extensions of the trained head, the new head would have no tensor that is not stored.
    plain = copy.deepcopy(head.config)
    for name in plain.extensions:
        setattr(plain, name, getattr(start.config, name))
    with torch.device("meta"):
        needed = type(head)(plain).state_dict()
    if missing := [name for name in needed if name not in stored]:
        raise UserError(f"{where} has no {', '.join(missing)}, which this run's head needs")
    head.load_state_dict(own | stored)
