"""What a head starts from: noise, its target's own matrices, or another head."""

from __future__ import annotations

import dataclasses

import datasets
import torch
from torch import Tensor, nn

from speculator.checkpoints import load_any
from speculator.errors import UserError
from speculator.heads import ARCHITECTURES, Speculator
from speculator.target import Target
from train.config import RunConfig, SpeculatorConfig
from train.vocabulary import count_tokens, most_frequent

_NOISE = 0.3
_NOT_SHAPE = ("architecture", "draft_vocab_size", "initialise", "warm_start")


def new_head(config: RunConfig, target: Target, rows: datasets.Dataset) -> Speculator:
    """A head of the configured shape: float32 master weights, whatever the target's dtype.

    Args:
        rows: of the training text: its most frequent tokens are the draft vocabulary, if there is to be one.

    Raises:
        UserError: the head to start from can't be read, or has another shape.
    """
    torch.manual_seed(config.seed)
    shape = {name: value for name, value in dataclasses.asdict(config.speculator).items() if name not in _NOT_SHAPE}
    config_class, head_class = ARCHITECTURES[config.speculator.architecture]
    head = head_class(
        config_class(
            vocab_size=target.vocab_size,
            emb_dim=target.hidden_size,
            base_model_name_or_path=config.target.name_or_path,
            base_model_fingerprint=target.fingerprint,
            trained_length=config.data.seq_length,
            training_data=config.data.sources,
            draft_vocab_size=config.speculator.draft_vocab_size or None,
            **shape,
        )
    )
    if head.draft_tokens is not None:
        counts = count_tokens(rows, target.vocab_size)
        head.draft_tokens.copy_(most_frequent(counts, len(head.draft_tokens), target.eos_token_ids))
    if config.speculator.warm_start:
        from_head(head, config.speculator.warm_start)
    elif config.speculator.initialise == "target":
        from_target(head, target)
    return head


def parameters(shape: SpeculatorConfig, vocab_size: int, hidden_size: int) -> int:
    """How many parameters a head of this shape has, found without making it: from the third on each step adds alike."""
    config_class, head_class = ARCHITECTURES[shape.architecture]

    def count(n_predict: int) -> int:
        with torch.device("meta"):
            head = head_class(
                config_class(
                    vocab_size=vocab_size,
                    emb_dim=hidden_size,
                    inner_dim=shape.inner_dim,
                    n_predict=n_predict,
                    tie_weights=shape.tie_weights,
                    draft_vocab_size=shape.draft_vocab_size or None,
                )
            )
        return sum(parameter.numel() for parameter in head.parameters())

    if shape.n_predict <= 3:
        return count(shape.n_predict)
    return count(3) + (shape.n_predict - 3) * (count(3) - count(2))


def from_head(head: Speculator, folder: str) -> None:
    """Copy a trained head, of any checkpoint layout, into a fresh one: its weights, and the tokens that it drafts from.

    Raises:
        UserError: nothing readable there, or a head of another shape: the first field that differs is named.
    """
    other = load_any(folder)
    if other.config.model_type != head.config.model_type:
        raise UserError(f"{folder} holds a {other.config.model_type}, not the {head.config.model_type} configured")
    shape = ("vocab_size", "emb_dim", "inner_dim", "n_predict", "tie_weights", "scale_input", "draft_vocab_size")
    for name in shape:
        theirs, ours = getattr(other.config, name), getattr(head.config, name)
        if theirs != ours:
            raise UserError(f"{folder} has {name} {theirs}, but this run's head has {ours}")
    head.load_state_dict(other.state_dict())


@torch.no_grad()
def from_target(head: Speculator, target: Target) -> None:
    """Copy the target's token geometry into a fresh head, at the scale that the head's own initialisation has.

    Embedding and output rows are those of the target, of the output those of the draft vocabulary; the first projection
    is near the identity, so that head 0 sees the hidden state in the basis that its output matrix reads.

    Args:
        head: of the target's width: inner_dim equal to emb_dim.
        target: the model that the head is to draft for.
    """
    config = head.config

    def rescaled(weight: Tensor) -> Tensor:
        return weight / weight.std() * config.inner_dim**-0.5

    for module in head.modules():
        if isinstance(module, nn.Embedding):
            module.weight.copy_(rescaled(target.model.get_input_embeddings().weight))
    output = target.model.get_output_embeddings().weight
    drafted = output if head.draft_tokens is None else output[head.draft_tokens.to(output.device)]
    for i in range(head.n_predict):
        head.output(i).weight.copy_(rescaled(drafted))
    first = head.entry.weight
    first.mul_(_NOISE).add_(torch.eye(config.inner_dim))
