"""The draft vocabulary: the most frequent tokens of the training text, so that an output matrix has fewer rows."""

from __future__ import annotations

from collections.abc import Iterable

import datasets
import numpy as np
import torch
from torch import Tensor


def count_tokens(rows: datasets.Dataset, vocab_size: int) -> Tensor:  # [V]
    """How often each token is one to learn: where a row's loss_mask is 1, or anywhere in rows without one."""
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
    """The most frequent tokens in ascending order, those of `always` among them; of equally frequent ones the first."""
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(counts.dtype).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def describe(draft_tokens: Tensor, rows: datasets.Dataset, vocab_size: int) -> str:
    """How many tokens these are, and which share of a text they make up."""
    counts = count_tokens(rows, vocab_size)
    share = counts[draft_tokens].sum() / counts.sum()
    return f"{len(draft_tokens)} of {vocab_size} tokens, {share:.1%} of the text"
