"""Rows of several documents, as a model's own attention reads each document as if alone.

Each layout gives the arguments of a model's forward pass for tokens [B, S], of which each document, one piece of a row,
has a number of its own in `documents` [B, S].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

Layout = Callable[[PreTrainedModel, Tensor, Tensor], dict[str, Any]]


def document_starts(documents: Tensor) -> Tensor:  # [B, S] -> [B, S] the place at which each one's document begins
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index.where(new, 0).cummax(1).values


def packed(model: PreTrainedModel, tokens: Tensor, documents: Tensor) -> dict[str, Any]:
    """Positions that begin at 0 in each document: [0, 1, 2, 0, 1] for the documents [7, 7, 7, 8, 8].

    Where they fall back to 0, transformers' masks separate what comes before from what comes after.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    return {"input_ids": tokens, "position_ids": index - document_starts(documents)}


def masked(model: PreTrainedModel, tokens: Tensor, documents: Tensor) -> dict[str, Any]:
    """Masks beside the positions, for families that make theirs without (gpt-oss, AFMoE)."""
    given = packed(model, tokens, documents)
    like = torch.empty(*tokens.shape, 0, dtype=model.dtype, device=tokens.device)
    masks = create_masks_for_generate(model.config, like, None, None, given["position_ids"])
    return {**given, "attention_mask": masks}


def in_one_row(model: PreTrainedModel, tokens: Tensor, documents: Tensor) -> dict[str, Any]:
    """One row of them all, since flash attention parts no documents in several."""
    return {name: each.reshape(1, -1) for name, each in packed(model, tokens, documents).items()}
