"""The head that a run's settings ask for: its class, its config, and the trained head that it starts from."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from speculator.checkpoints import config_of, head_folder, load_any
from speculator.checkpoints.native import declared_fields
from speculator.errors import UserError, refuse, removed
from speculator.heads import ARCHITECTURES, Speculator, SpeculatorConfig
from train.options.config import HeadOptions, RunConfig

SHARED_OPTIONS = ("n_predict", "inner_dim", "draft_vocab_size")
"""Config fields of every architecture that `HeadOptions` names."""


def start_folder(options: HeadOptions) -> Path:
    """Return the folder of `speculator.warm_start`; of a hub id, that in the hub's cache."""
    assert options.warm_start
    return head_folder(options.warm_start, options.warm_start_revision)


def with_settings_of_start(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Return the config with the architecture, sizes and options of a warm start's head where the user gave none.

    `given` names the fields of `HeadOptions` that the user set; `Start.check` tells whether they contradict the head.
    """
    options = config.speculator
    if not options.warm_start:
        return config
    start = config_of(start_folder(options))
    found = {name: getattr(start, name) or 0 for name in SHARED_OPTIONS} | {"architecture": _architecture(start)}
    left: dict[str, Any] = {name: value for name, value in found.items() if name not in given}
    if options.architecture == found["architecture"] or "architecture" in left:
        left["options"] = {name: getattr(start, name) for name in start.own_options()} | options.options
    return dataclasses.replace(config, speculator=dataclasses.replace(options, **left))


def _architecture(config: SpeculatorConfig) -> str:
    return next(name for name, head in ARCHITECTURES.items() if head.config_class.model_type == config.model_type)


@dataclass
class Start:
    """The trained head that a run starts from."""

    name: str  # as the settings name it
    config: SpeculatorConfig  # its config as stored; options that follow from a target may be None
    _head: Speculator | None

    @classmethod
    def of(cls, name: str, folder: Path) -> Start:
        """Read a head with its weights; a UserError is raised if they are damaged."""
        head = load_any(folder)
        return cls(name, copy.deepcopy(head.config), head)

    def take(self) -> Speculator:
        """Return the head, in its stored dtype on the CPU; it is kept no longer."""
        assert self._head is not None
        head, self._head = self._head, None
        return head

    def check_architecture(self, options: HeadOptions) -> None:
        """Raise a UserError if the run's head has another architecture."""
        found = _architecture(self.config)
        if options.architecture != found:
            raise UserError(
                f"speculator.warm_start: {self.name} holds a head of architecture {found}, "
                f"not the {options.architecture} configured"
            )

    def check(self, config: RunConfig, head: SpeculatorConfig, target: PreTrainedConfig | None) -> None:
        """Raise a UserError if the run's head can't have these weights, as far as both configs tell.

        `target` is the target's text config; None: it is unknown, so sizes that follow from it are not compared.
        """
        own, target_name = self.config, config.target.name_or_path
        if target is not None and own.emb_dim != head.emb_dim:
            raise UserError(
                f"{self.name} reads hidden states of size {own.emb_dim}, but {target_name} has {head.emb_dim}"
            )
        if target is not None and own.vocab_size != head.vocab_size:
            raise UserError(
                f"{self.name} is for a vocabulary of {own.vocab_size} tokens, but {target_name} has {head.vocab_size}"
            )
        # What follows from the target is None in some layouts, until the head is bound to it.
        unset = {*free(own), *(name for name in own.target_options if getattr(own, name) is None)}
        names = [name for name in (*SHARED_OPTIONS, *config.speculator.options) if name not in unset]
        if wrong := [name for name in names if getattr(own, name) != getattr(head, name)]:
            has = " and ".join(f"{name} {getattr(own, name)}" for name in wrong)
            asked = " and ".join(str(getattr(head, name)) for name in wrong)
            raise UserError(f"{self.name} has {has}, but this run's head has {asked}")


def shipped_folder(config: RunConfig) -> Path | None:
    """Return the target's folder if the head starts from the layers that ship with it, else None."""
    options, target = config.speculator, config.target
    ships = options.initialise == "target" and head_class(options).config_class.ships_with_target
    return head_folder(target.name_or_path, target.revision) if ships and not options.warm_start else None


def free(start: SpeculatorConfig) -> tuple[str, ...]:
    """Return the names of the config's fields in which a run may differ from the head that it starts from."""
    # Weights that can draft to any depth fit any number of steps.
    return start.extensions if start.max_speculative_tokens is not None else (*start.extensions, "n_predict")


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
    """Build the head's config: an option of 0 or null follows the target's text config; a wrong one is a UserError."""
    config_class = head_class(options).config_class
    given = {name: value for name in SHARED_OPTIONS if (value := getattr(options, name))}
    own = config_class.own_options()
    for name in options.options:
        if name not in own:
            raise UserError(
                f"--speculator.options.{name}: architecture {options.architecture} has no such option"
                + _nearest(name, own)
            )
    chosen = {name: value for name, value in options.options.items() if value is not None}
    for name, kind in declared_fields(config_class).items():
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
        flags |= {name: f"--speculator.{name}" for name in SHARED_OPTIONS}
        named = (flags[word] for word in re.findall(r"\w+", str(error)) if word in flags)
        raise UserError(f"{next(named, '--speculator')}: {error}") from None


def _nearest(name: str, known: Any) -> str:
    """Return the end of an error message: the valid name nearest to a wrong one, or all valid names."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


def without_memory(config: SpeculatorConfig) -> Speculator:
    """Return a head with this config on the meta device, which allocates no weights."""
    with torch.device("meta"):
        return ARCHITECTURES[_architecture(config)](copy.deepcopy(config))
