"""The draft vocabulary: the most frequent tokens of the training text."""

from __future__ import annotations

from collections.abc import Iterable

import datasets
import numpy as np
import torch
from torch import Tensor


def count_tokens(rows: datasets.Dataset, vocab_size: int) -> Tensor:  # [V]
    """Count the tokens in the loss mask, or all tokens of rows without one."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in rows.with_format("arrow").iter(batch_size=1000):

        def column(name: str, table=table) -> np.ndarray:
            return table[name].combine_chunks().flatten().to_numpy()

        tokens = column("input_ids")
        if "loss_mask" in table.column_names:
            tokens = tokens[column("loss_mask") == 1]
        counts += np.bincount(tokens, minlength=vocab_size)
    return torch.from_numpy(counts)


def most_frequent(counts: Tensor, size: int, always: Iterable[int]) -> Tensor:  # [V] -> [size]
    """Choose the most frequent tokens and those of `always`, in ascending order; ties go to the lower id."""
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(counts.dtype).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def describe(draft_tokens: Tensor, rows: datasets.Dataset, vocab_size: int) -> str:
    """Describe the size of a draft vocabulary and its share of a text."""
    counts = count_tokens(rows, vocab_size)
    share = counts[draft_tokens].sum() / counts.sum()
    return f"{len(draft_tokens)} of {vocab_size} tokens, {share:.1%} of the text"
