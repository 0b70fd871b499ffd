"""Sizes of a run that follow from its target and its rows."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from train.config import RunConfig

_LONGEST = 4096
"""Tokens of a row if the run names none; few chats are longer."""


def with_sizes_of_target(config: RunConfig, target: PreTrainedConfig | None) -> RunConfig:
    """Fill in the row length, and leave out a draft vocabulary that the target's own does not exceed.

    Args:
        target: the target's config; None if it is unknown.
    """
    text = target.get_text_config() if target else None
    data, head = config.data, config.speculator
    if not data.seq_length:
        data = replace(data, seq_length=min(_LONGEST, getattr(text, "max_position_embeddings", None) or _LONGEST))
    if text is not None and head.draft_vocab_size >= text.vocab_size:
        head = replace(head, draft_vocab_size=0)
    return replace(config, data=data, speculator=head)
