"""A trained head from its folder, checked against the target that it is to draft for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from speculator.checkpoints import load_any
from speculator.errors import UserError
from speculator.heads.base import Speculator
from speculator.target.fingerprint import same_target
from speculator.target.linear import pack_linears
from speculator.target.model import Target
from speculator.target.sharding import whole

_log = logging.getLogger(__name__)


def load_head(folder: str | Path, target: Target) -> Speculator:
    """Load a head of any checkpoint layout for drafting: frozen, in the target's dtype, on its device.

    Logs a warning if the head was trained for another target of the same sizes.
    """
    head: Any = load_any(folder)
    head.to(target.device, target.dtype).requires_grad_(False)
    bind(head, target, str(folder))
    config = head.config
    trained_for = config.base_model_fingerprint
    if trained_for and not same_target(trained_for, target.fingerprint):
        _log.warning(
            f"{folder} was trained for other weights ({config.base_model_name_or_path}) than those of {target.name}: "
            "fewer drafts will be accepted; the text stays the target's"
        )
    pack_linears(head)
    return head


def bind(head: Speculator, target: Target, name: str = "the head") -> Speculator:
    """Give a head its target's embedding and default auxiliary layers, after a check of the sizes; return the head."""
    config = head.config
    if config.emb_dim != target.hidden_size:
        raise UserError(
            f"{name} reads hidden states of size {config.emb_dim}, but {target.name} has {target.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"{name} is for a vocabulary of {config.vocab_size} tokens, but {target.name} has {target.vocab_size}"
        )

    head.bind(target.config, whole(target.model.get_input_embeddings().weight))
    target.aux_layers.check(head.aux_layers, target.name)
    return head
