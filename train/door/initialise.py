"""Make the head to train: random weights, the target's own matrices, or a trained head."""

from __future__ import annotations

import copy
from pathlib import Path

import datasets
import torch

from speculator.checkpoints.loading import bind
from speculator.errors import UserError
from speculator.heads import Speculator, SpeculatorConfig
from speculator.target.base import TrainingTarget
from speculator.target.sharding import whole
from train.door.head import Start, head_class, shipped_folder, without_memory
from train.door.settle import Run
from train.door.sizes import longest
from train.door.vocabulary import count_tokens, most_frequent, unused_token


def new_head(run: Run, target: TrainingTarget, rows: datasets.Dataset, length: int) -> Speculator:
    """Return the run's head with float32 weights, and with the target's matrices where it has none of its own.

    The weights are those of a trained head, copies of the target's matrices, or random by the run's seed. A draft
    vocabulary, if configured, is the most frequent tokens of `rows`, which have `length` tokens each.
    """
    config, options, made = run.config, run.config.speculator, copy.deepcopy(run.head)
    # Elsewhere a relative path is no path, and may look like a hub id.
    made.base_model_name_or_path = _absolute(config.target.name_or_path)
    made.base_model_adapter = config.target.adapter and _absolute(config.target.adapter)
    made.base_model_fingerprint = target.fingerprint
    made.trained_length = length
    made.training_data = [_absolute(source) for source in config.data.sources]
    begin = run.start
    if folder := shipped_folder(config):
        begin = Start.of(str(folder), folder)
        begin.check(config, made, run.text)
    start = None if begin is None else begin.take()
    if begin is not None and start is not None:
        # Binding fills in options, and drops an embedding that is the target's: the new head follows what is left.
        stored = {name: getattr(start.config, name) for name in options.options}
        bind(start, target, begin.name)
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
    if begin is not None and start is not None:
        copy_weights(head, start, begin.name)
        _reach(head.config)
    elif made.starts_from_target(options.initialise == "target"):
        head.initialise_from(target.embedding_matrix(), whole(target.output_layer().weight))
    return bind(head, target)


def _absolute(source: str) -> str:
    """Return a path on this machine as an absolute one, with the weight of a source (`@0.5`) as it is."""
    path, *weight = source.rsplit("@", 1)
    if Path(source).exists():
        path, weight = source, []
    return "@".join([str(Path(path).resolve()), *weight]) if Path(path).exists() else source


def _reach(head: SpeculatorConfig) -> None:
    """Let a head's config state as long a context as it trains on: vLLM drafts no further, and others write 2,048."""
    stated, rope = (getattr(head, name, None) for name in ("max_position_embeddings", "rope_parameters"))
    # Other kinds of rope compute something else for another length.
    if stated and (rope or {}).get("rope_type", "default") == "default":
        head.max_position_embeddings = max(stated, head.trained_length or 0)  # type: ignore[attr-defined]


def copy_weights(head: Speculator, start: Speculator, where: str) -> None:
    """Copy a trained head's weights and draft vocabulary; raise a UserError, which names `where`, if its shape differs.

    Parts that only the new head has, by the `extensions` of its config, keep their initial weights.
    """
    own, stored = head.state_dict(), start.state_dict()
    for name, tensor in stored.items():
        if name not in own or own[name].shape != tensor.shape:
            raise UserError(f"{where} has {name} {list(tensor.shape)}, which does not fit this run's head")
    # With the extensions of the trained head, the new head would have no tensor that is not stored.
    plain = copy.deepcopy(head.config)
    for name in plain.extensions:
        setattr(plain, name, getattr(start.config, name))
    if missing := [name for name in without_memory(plain).state_dict() if name not in stored]:
        raise UserError(f"{where} has no {', '.join(missing)}, which this run's head needs")
    head.load_state_dict(own | stored)


def for_rows(head: Speculator, target: TrainingTarget, rows: datasets.Dataset) -> Speculator:
    """Set a head's `trained_length` to cover these rows, give it the target's matrices that it lacks, and return it."""
    head.config.trained_length = max(head.config.trained_length or 0, longest(rows))
    _reach(head.config)
    return bind(head, target)
