"""Make the head to train: its weights (random, the target's own matrices, or a trained head's) and draft vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from speculator.checkpoints.loading import bind
from speculator.errors import UserError
from speculator.heads import Speculator, SpeculatorConfig
from speculator.target.base import TrainingTarget
from speculator.target.sharding import whole
from train.door.head import Start, head_class, shipped_folder, without_memory
from train.door.settle import Run
from train.door.sizes import longest


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


def count_tokens(rows: datasets.Dataset, vocab_size: int, with_loss: bool = True) -> Tensor:  # [V]
    """Return how often each token occurs in the rows: with `with_loss` inside the loss mask, else anywhere."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in rows.with_format("arrow").iter(batch_size=1000):

        def column(name: str, table=table) -> np.ndarray:
            return table[name].combine_chunks().flatten().to_numpy()

        tokens = column("input_ids")
        if with_loss and "loss_mask" in table.column_names:
            tokens = tokens[column("loss_mask") == 1]
        counts += np.bincount(tokens, minlength=vocab_size)
    return torch.from_numpy(counts)


def most_frequent(counts: Tensor, size: int, always: Iterable[int]) -> Tensor:  # [V] -> [size]
    """Return `size` token ids, ascending: those of `always`, and the most frequent others; ties go to the lower id."""
    ranked = counts.clone()
    # Above every count: these tokens are chosen even if the text has none of them.
    ranked[list(always)] = torch.iinfo(counts.dtype).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def unused_token(tokenizer: PreTrainedTokenizerBase, counts: Tensor, ends: Iterable[int]) -> int:
    """Return a token id that text does not contain: the last of the V, if the tokenizer does not use it.

    Otherwise the last special token that the text lacks (`counts` [V]) and that ends no text (`ends`), or else the last
    token that it lacks.
    """
    unused = len(counts) - 1
    if unused >= len(tokenizer):
        return unused
    absent = set((counts == 0).nonzero()[:, 0].tolist()) - set(ends)
    special = absent & set(tokenizer.all_special_ids) | {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special and number in absent
    }
    return max(special or absent or {unused})


def describe(draft_tokens: Tensor, rows: datasets.Dataset, vocab_size: int) -> str:
    """Return a phrase for log lines: the size of a draft vocabulary (ids [V_d]), and its share of the rows' tokens."""
    counts = count_tokens(rows, vocab_size)
    share = counts[draft_tokens].sum() / counts.sum()
    return f"{len(draft_tokens)} of {vocab_size} tokens, {share:.1%} of the text"
