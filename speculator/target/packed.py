"""Layouts of several documents per row, so that a model's own attention separates them.

A layout is a function that returns the arguments of the model's forward pass for tokens [B, S]; `documents` [B, S]
numbers the contiguous documents of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

if TYPE_CHECKING:
    from typing_extensions import Required


class Arguments(TypedDict, total=False):
    """Keyword arguments of a model's forward pass over N rows of T tokens.

    Attributes:
        input_ids: [N, T] the tokens.
        position_ids: [N, T] positions, from 0 in each document.
        attention_mask: a mask, or a dict of masks by layer type.
        cu_seq_lens_q, cu_seq_lens_k: [documents + 1] int32, where each document of a single row begins, and T.
        max_length_q, max_length_k: upper bound of a document's length.
    """

    input_ids: Required[Tensor]
    position_ids: Required[Tensor]
    attention_mask: Any
    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int


Layout = Callable[[PreTrainedModel, Tensor, Tensor], Arguments]
"""Function from model, tokens [B, S] and document numbers [B, S] to arguments of the model's forward pass."""


def document_starts(documents: Tensor) -> Tensor:  # [B, S] -> [B, S]
    """Return the index in its row at which each token's document starts."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    # For the documents [7, 7, 8, 8, 8]: new is 1 0 1 0 0, times the index 0 0 2 0 0, whose running maximum is 0 0 2 2
    # 2.
    new = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index.where(new, 0).cummax(1).values


def packed(model: PreTrainedModel, tokens: Tensor, documents: Tensor) -> Arguments:  # [B, S] both
    """Return arguments with positions from 0 in each document (0 1 2 0 1 for 7 7 7 8 8), which separates them."""
    index = torch.arange(documents.shape[1], device=documents.device)
    return {"input_ids": tokens, "position_ids": index - document_starts(documents)}


def masked(model: PreTrainedModel, tokens: Tensor, documents: Tensor) -> Arguments:  # [B, S] both
    """Return the arguments of `packed` with masks by document: some families' own ignore positions (gpt-oss, AFMoE)."""
    given = packed(model, tokens, documents)
    like = torch.empty(*tokens.shape, 0, dtype=model.dtype, device=tokens.device)
    masks = create_masks_for_generate(model.config, like, None, None, given["position_ids"])
    return {**given, "attention_mask": masks}


def in_one_row(model: PreTrainedModel, tokens: Tensor, documents: Tensor) -> Arguments:  # [B, S] both
    """Return the arguments of `packed` with all rows in one, [1, B S], as flash attention separates documents."""
    given = packed(model, tokens, documents)
    return {"input_ids": given["input_ids"].reshape(1, -1), "position_ids": given["position_ids"].reshape(1, -1)}


def in_one_row_with_bounds(model: PreTrainedModel, tokens: Tensor, documents: Tensor) -> Arguments:  # [B, S] both
    """Return the arguments of `in_one_row` and the bounds of the documents, which layers hand to `varlen_attention`."""
    given = in_one_row(model, tokens, documents)
    # For the positions 0 1 0 1 2 the documents begin at 0 and 2, and the bounds are 0 2 5.
    begins = (given["position_ids"][0] == 0).nonzero()[:, 0]
    bounds = nn.functional.pad(begins, (0, 1), value=tokens.numel()).int()
    longest = max(2, tokens.shape[1])  # an upper bound; 1 would select another kernel
    return {**given, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def one_per_row(model: PreTrainedModel, tokens: Tensor, documents: Tensor) -> Arguments:  # [B, S] both
    """Return arguments with a row for each document, padded on the right, for models with a state along the row."""
    indices, width = indices_by_document(documents)
    rows = tokens.new_zeros(int(indices.max()) // width + 1, width)
    # `indices` [B, S] are unique, so this scatters every token to its place; the rest is padding.
    rows.view(-1)[indices] = tokens
    return {"input_ids": rows, "position_ids": torch.arange(width, device=tokens.device).expand_as(rows)}


def indices_by_document(documents: Tensor) -> tuple[Tensor, int]:  # [B, S] -> [B, S]
    """Return the index of each token in the flattened rows of `one_per_row`, and the width of these rows."""
    # For the documents [7, 7, 8, 8, 8] the offsets are 0 1 0 1 2, and the width is 3: row 0 gets two tokens, at 0 and
    # 1, and row 1 three, at 3, 4 and 5.
    offset = torch.arange(documents.shape[1], device=documents.device) - document_starts(documents)
    width = int(offset.max()) + 1
    # Every first token of a document begins a new row, counted over all rows of the batch.
    number = offset.eq(0).flatten().cumsum(0).view_as(offset) - 1
    return number * width + offset, width
