"""A trained head from its folder, checked against the target that it is to draft for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from speculator.errors import UserError
from speculator.heads.mlp import MLPSpeculator
from speculator.target import Target


def load_head(folder: str | Path, target: Target) -> MLPSpeculator:
    """Load a head in the target's dtype, on its device.

    Raises:
        UserError: no head there, missing, surplus or damaged tensors, or a head for another hidden size or vocabulary.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder}: no config.json there, so not a speculator's folder")
    try:
        loaded: Any = MLPSpeculator.from_pretrained(folder, dtype=target.dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"can't load the speculator {folder}: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from None
    head, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise UserError(f"{folder}: {kind.replace('_keys', '')} tensors: {', '.join(map(str, sorted(info[kind])))}")
    config = head.config
    if config.emb_dim != target.hidden_size:
        raise UserError(
            f"{folder} reads hidden states of size {config.emb_dim}, but {target.name} has {target.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        raise UserError(f"{folder} drafts from {config.vocab_size} tokens, but {target.name} has {target.vocab_size}")
    return head.to(target.device)
