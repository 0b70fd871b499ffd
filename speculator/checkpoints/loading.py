"""A trained head from its folder, checked against the target that it is to draft for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speculator.checkpoints import head_folder, load_any
from speculator.drafters.head import HeadDrafter
from speculator.drafters.tuning import adaptive_drafter, read_tuning
from speculator.errors import UserError
from speculator.heads.base import Speculator
from speculator.kernels.linear import pack_linears
from speculator.target.base import TrainingTarget
from speculator.target.fingerprint import same_target, similar_target
from speculator.target.model import Target

_log = logging.getLogger(__name__)


def load_head(folder: str | Path, target: Target, revision: str | None = None) -> Speculator:
    """Load a head of any checkpoint layout for drafting: frozen, in the target's dtype, on its device.

    Args:
        folder: folder or hub id of the head.
        revision: branch, tag or commit of a hub id.

    Logs a warning if the head was trained for another target of the same sizes.
    """
    head: Any = load_any(head_folder(folder, revision))
    head.to(target.device, target.dtype).requires_grad_(False)
    bind(head, target, str(folder))
    config = head.config
    trained_for = config.base_model_fingerprint
    if trained_for and not same_target(trained_for, target.fingerprint):
        others = f"other weights ({config.base_model_name_or_path}) than those of {target.name}"
        if similar_target(trained_for, target.fingerprint):
            others = f"other weights of the same model than {target.name}, such as a quantised copy or a fine-tune"
        _log.warning(f"{folder} was trained for {others}: fewer drafts may be accepted; the text stays the target's")
    pack_linears(head)
    return head


def load_drafter(
    folder: str | Path,
    target: Target,
    *,
    num_speculative_tokens: int = 0,
    temperatures: Sequence[float] = (0.0, 1.0),
    batch_size: int = 1,
    memory: int = 0,
    revision: str | None = None,
) -> HeadDrafter:
    """Load a head that drafts adaptively: before each step the fastest of its drafts, n-gram lookup, both or neither.

    Acceptance and step costs come from the folder's `decoding.json`, see `speculator eval tune`. Costs that are unknown
    for this machine are measured, which takes up to six seconds once.

    Args:
        num_speculative_tokens: draft chains of so many tokens instead; 0: adaptively.
        temperatures: temperatures to measure step costs for.
        batch_size: the most rows that decode at a time.
        memory: number of tokens of other sequences that n-gram lookup searches, see `NgramDrafter`.
        revision: branch, tag or commit of a head on the hub.
    """
    head = load_head(folder, target, revision)
    if num_speculative_tokens:
        return HeadDrafter(head, num_speculative_tokens)
    tuning = read_tuning(head_folder(folder, revision), head)
    return adaptive_drafter(head, target, tuning, temperatures=temperatures, batch_size=batch_size, memory=memory)


def bind(head: Speculator, target: TrainingTarget, name: str = "the head") -> Speculator:
    """Give a head the target's matrices that it shares and its default auxiliary layers; return the head.

    Raises a UserError, which calls the head `name`, if hidden size, vocabulary or auxiliary layers don't fit.
    """
    config = head.config
    if config.emb_dim != target.hidden_size:
        raise UserError(
            f"{name} reads hidden states of size {config.emb_dim}, but {target.name} has {target.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"{name} is for a vocabulary of {config.vocab_size} tokens, but {target.name} has {target.vocab_size}"
        )

    head.bind(target.config, target.embedding_matrix(), target.output_layer())
    target.check_aux_layers(head.aux_layers)
    return head
