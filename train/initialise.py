"""What a head starts from: noise, its target's own matrices, or another head."""

from __future__ import annotations

import dataclasses
from typing import Any

import datasets
import torch
from huggingface_hub.errors import StrictDataclassError
from pyarrow import compute
from transformers import PreTrainedConfig

from speculator import heads
from speculator.checkpoints import load_any
from speculator.checkpoints.loading import bind
from speculator.errors import UserError, refuse
from speculator.heads import ARCHITECTURES, RecurrentHead, Speculator
from speculator.target.model import Target
from speculator.target.sharding import whole
from train.config import RunConfig, SpeculatorConfig
from train.vocabulary import count_tokens, most_frequent

_ABOUT = ("base_model_name_or_path", "base_model_adapter", "base_model_fingerprint", "trained_length", "training_data")


def new_head(config: RunConfig, target: Target, rows: datasets.Dataset) -> Speculator:
    """A head of the configured shape: float32 master weights, whatever the target's dtype.

    Args:
        rows: of the training text: its most frequent tokens are the draft vocabulary, if there is to be one.

    Raises:
        UserError: the head to start from can't be read, or has another shape; a shape that can't be.
    """
    wanted, model = config.speculator, target.model
    named = config.target.name_or_path, config.target.adapter
    about = (*named, target.fingerprint, config.data.seq_length, config.data.sources)
    more: dict[str, Any] = dict(zip(_ABOUT, about, strict=True))
    other = trained(wanted, target) if wanted.warm_start else None
    if other is not None:
        more |= {name: getattr(other.config, name) for name in _unsaid(wanted, other.config)}
    torch.manual_seed(config.seed)
    head = ARCHITECTURES[wanted.architecture][1](head_config(wanted, target.config, **more))
    if head.draft_tokens is not None:
        counts = count_tokens(rows, target.vocab_size)
        head.draft_tokens.copy_(most_frequent(counts, len(head.draft_tokens), target.eos_token_ids))
    if other is not None:
        from_head(head, other, wanted)
    elif wanted.initialise == "target" or wanted.architecture == "eagle3":
        head.initialise_from(whole(model.get_input_embeddings().weight), whole(model.get_output_embeddings().weight))
    return bind(head, target)


def for_rows(head: Speculator, target: Target, rows: datasets.Dataset) -> Speculator:
    """A trained head that is trained further, on rows that may be longer than those before."""
    tables = rows.with_format("arrow").iter(batch_size=1000)
    longest = max(compute.max(compute.list_value_length(table["input_ids"])).as_py() for table in tables)
    head.config.trained_length = max(head.config.trained_length or 0, longest)
    return bind(head, target)


def head_config(wanted: SpeculatorConfig, target: PreTrainedConfig, **more: Any) -> heads.SpeculatorConfig:
    """A head's config from the settings that its kind of head has; what is 0 or null there is left to the target.

    Raises:
        UserError: there is no such head.
    """
    config_class = ARCHITECTURES[wanted.architecture][0]
    said = {name: value for name in _said(wanted) if (value := getattr(wanted, name)) or value is False}
    try:
        return config_class.for_target(target, **said, **more)
    except (ValueError, StrictDataclassError) as error:
        raise UserError(f"speculator: {error}") from None


def _said(wanted: SpeculatorConfig) -> list[str]:
    """The settings that this kind of head has."""
    names = {field.name for field in dataclasses.fields(ARCHITECTURES[wanted.architecture][0])}
    return [field.name for field in dataclasses.fields(wanted) if field.name in names]


def idle(wanted: SpeculatorConfig) -> list[str]:
    """The settings that were changed though this kind of head does not have them."""
    known, usual = {*_said(wanted), "architecture", "initialise", "warm_start"}, SpeculatorConfig()
    names = [field.name for field in dataclasses.fields(wanted) if field.name not in known]
    return [name for name in names if getattr(wanted, name) != getattr(usual, name)]


def _unsaid(wanted: SpeculatorConfig, other: heads.SpeculatorConfig) -> list[str]:
    """What there is no setting for: it comes from the head to start from, not from the target."""
    base = {field.name for field in dataclasses.fields(heads.SpeculatorConfig)}
    names = [field.name for field in dataclasses.fields(other)]
    return [name for name in names if name not in base and name not in _said(wanted)]


def parameters(wanted: SpeculatorConfig, target: PreTrainedConfig) -> int:
    """How many parameters a head of this shape has, found without making it: from the third on each step adds alike."""

    def count(n_predict: int) -> int:
        with torch.device("meta"):
            head = ARCHITECTURES[wanted.architecture][1](
                head_config(dataclasses.replace(wanted, n_predict=n_predict), target)
            )
        return sum(parameter.numel() for parameter in head.parameters())

    if wanted.n_predict <= 3:
        return count(wanted.n_predict)
    return count(3) + (wanted.n_predict - 3) * (count(3) - count(2))


def trained(wanted: SpeculatorConfig, target: Target) -> Speculator:
    """The head to start from, of any checkpoint layout.

    Raises:
        UserError: nothing readable there, or another kind of head.
    """
    folder = str(wanted.warm_start)
    other, config_class = load_any(folder), ARCHITECTURES[wanted.architecture][0]
    theirs, ours = other.config.model_type, config_class.model_type
    refuse((theirs != ours, f"{folder} holds a {theirs}, not the {ours} configured"))
    return bind(other, target)


def from_head(head: Speculator, other: Speculator, wanted: SpeculatorConfig) -> None:
    """Copy a trained head into a fresh one: its weights, and the tokens that it drafts from.

    Raises:
        UserError: a head of another shape: the first field that differs is named.
    """
    names = ["vocab_size", "emb_dim", *_said(wanted)]
    if not isinstance(head, RecurrentHead):
        names.remove("n_predict")  # one layer makes any number of steps
    for name in names:
        theirs, ours = getattr(other.config, name), getattr(head.config, name)
        refuse((theirs != ours, f"{wanted.warm_start} has {name} {theirs}, but this run's head has {ours}"))
    head.load_state_dict(other.state_dict())
