"""The inputs and outputs of a head's training form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from speculator.acceptance import Acceptance

IGNORE = -100
"""The label where there is nothing to predict."""
Metric = tuple[Tensor, Tensor]
"""A sum and the count to divide it by, after both are added up over batches and processes."""
Term = tuple[Tensor, Tensor]
"""Features [K, I] and a matrix [V_d, I]; logits are the sum of the terms' products (a low-rank bias is a term)."""


@dataclass
class TrainingBatch:
    """Packed rows, with what the frozen target computed for them.

    Attributes:
        input_ids: [B, L]
        document_ids: [B, L] the same number throughout a document.
        hidden: [B, L, D] hidden states after the target's final norm, in the target's dtype.
        states: [B, L, nD] hidden states that the head reads, float32: those of its `aux_layers`, side by side, or
            `hidden` for a head without.
        targets: `SpeculatorConfig.training_targets` of the rows.
        normalisers: [B, L] logsumexp of the logits of each state of `hidden`; None: the loss computes what it needs.
    """

    input_ids: Tensor
    document_ids: Tensor
    hidden: Tensor
    states: Tensor
    targets: dict[str, Any]
    normalisers: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        return self.targets["labels"]


class TokenLosses(NamedTuple):
    """Loss and hits of every label, for N steps of K rows."""

    objective: Tensor  # scalar: the weighted sum of the losses; the only part with a gradient
    loss: Tensor  # [N, K]; 0 where a label is IGNORE
    hits: Tensor  # [N, K] 1 where the likeliest token is the label
    overlap: Tensor | None  # [N, K] chance that a sampled draft is accepted; None if it was not computed


def step_metrics(
    loss: Tensor,  # [N, ...]
    hits: Tensor,  # [N, ...] 1 where the likeliest token is the label
    overlap: Tensor | None,  # [N, ...] chance that a sampled draft token is accepted
    count: Tensor,  # [N] labels of each draft position
    drafts: Tensor,  # [...] 1 for a draft with labels, else 0
    by_row: Callable[[Tensor], Tensor],  # [...] -> [B] sums of a batch's rows
) -> dict[str, Metric]:
    """Return metrics by name, as (sum, count) pairs [N] with one number per draft position.

    - "loss", "accuracy" (of the likeliest token) and "overlap": sums over the labels of each draft position.
    - "prefix_accuracy": number of labels where this and all earlier tokens of the draft are right.
    - "prefix_overlap": sum of the chances that this and all earlier tokens of the draft are accepted.
    - "rows": six sums [6] over rows, from which `forecast_error` computes a standard error.

    The training log calls all but "rows" `position{i}/NAME`. All inputs must be 0 where there is no label. Without
    `overlap` its two metrics are left out.
    """

    def total(x: Tensor) -> Metric:
        return x.flatten(1).sum(1), count

    # Products along the draft: hits 1 1 0 1 of four positions give 1 1 0 0, as a decoder stops at the first miss.
    metrics = {"loss": total(loss), "accuracy": total(hits), "prefix_accuracy": total(hits.cumprod(0))}
    accepted = hits.cumprod(0).sum(0).float()
    if overlap is not None:
        metrics |= {"overlap": total(overlap), "prefix_overlap": total(overlap.cumprod(0))}
        accepted = (accepted + overlap.cumprod(0).sum(0)) / 2  # the mean of temperatures 0 and 1
    a, n = by_row(accepted).double(), by_row(drafts.to(accepted)).double()
    sums = torch.stack([(a * a).sum(), (a * n).sum(), (n * n).sum(), a.sum(), n.sum(), (n > 0).sum()])
    return metrics | {"rows": (sums, torch.ones_like(sums))}


def walked(
    hits: Tensor,  # [N, B, S] 1 where the likeliest token is the label
    labels: Tensor,  # [B, N, S]
) -> Metric:  # [N], [N]
    """Return the steps of greedy decoding that accept the token at each position, and all steps, if the target wrote x.

    A mean over positions is higher: an easy stretch has many positions, and decoding passes it in few steps.
    """
    found, depth = Acceptance(), len(hits)
    accepted = hits.cumprod(0).sum(0).int().tolist()
    known = (labels != IGNORE).int().cumprod(1).sum(1).tolist()
    for row, limits in zip(accepted, known, strict=True):
        t = 0
        while t < len(row):
            # The text ends in an accepted draft: decoding would leave the step out, too.
            if limits[t] and not row[t] == limits[t] < depth:
                found.count(row[t])
            t += row[t] + 1  # the accepted tokens, and the target's own
    accepted_by_position = torch.tensor(found.per_position(depth), dtype=hits.dtype, device=hits.device)
    return accepted_by_position, hits.new_full((depth,), found.steps)


def forecast_error(sums: Sequence[float]) -> float | None:
    """Return the standard error of the tokens accepted per draft, from `step_metrics`' "rows".

    The tokens of a row are not independent, so rows are the sample: with a accepted tokens of n drafts in each of R
    rows and r = sum a / sum n, it is sqrt(R / (R - 1) sum (a - r n)^2) / sum n. None for fewer than two rows.
    """
    aa, an, nn, a, n, rows = sums
    if rows < 2:
        return None
    r = a / n
    return math.sqrt(max(0.0, aa - 2 * r * an + r * r * nn) * rows / (rows - 1)) / n


class Drafts(NamedTuple):
    """Which labels belong to one draft.

    Attributes:
        slots: [N, K] index of each label in `shape`, flattened.
        shape: drafts, tokens of a draft.
        reach: largest distance, in columns of K, between the first and the last label of a draft.
    """

    slots: Tensor
    shape: tuple[int, ...]
    reach: int


class TokenLoss(Protocol):
    """The configured mix of losses, computed chunk by chunk so that few logits exist at a time."""

    def step_weights(self, steps: int) -> Tensor:  # [N]
        """Return the weight of each draft position in the objective (`loss.head_decay`)."""
        ...

    def __call__(
        self,
        logits: Sequence[Sequence[Term]],  # terms of each of N steps
        labels: Tensor,  # [N, K] rows of the matrices; IGNORE where there is none, negative where no row has it
        hidden: Tensor,  # [K, D] target states that predict the labels; any number of them with `predictors`
        weights: Tensor,  # [N, 1] or [N, K] how many times each label counts in the objective
        draft_tokens: Tensor | None = None,  # [V_d] token of each row; None: the whole vocabulary
        # [K] on the CPU: row of `hidden` that predicts each label, equal ones side by side
        predictors: Tensor | None = None,
        drafts: Drafts | None = None,  # what `loss.d_pace` weighs together
        normalisers: Tensor | None = None,  # logsumexp of the logits of each row of `hidden`; None: unknown
    ) -> TokenLosses: ...
