"""The draft vocabulary: the most frequent tokens of the training text."""

from __future__ import annotations

from collections.abc import Iterable

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


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
