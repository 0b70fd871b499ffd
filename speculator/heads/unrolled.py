"""Heads that are trained at every position of the text, unrolled for N steps from each.

Alignment, 0-based, with a row x of L tokens, hidden states h and S = L - 2:

    step i at position t reads h_t and x[t+1 .. t+1+i] and predicts x[t+2+i]

The target's own distribution of x[u+1] comes from h_u, u = t+1+i, in the same forward pass. For L = 8, N = 2:

    t         0  1  2  3  4  5
    step 0    x2 x3 x4 x5 x6 x7   distribution from h1 .. h6
    step 1    x3 x4 x5 x6 x7 -    distribution from h2 .. h6

The last positions have no label at the deeper steps, which read padding there. Losses are laid out by u, so that each
distribution is computed once and used by all steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speculator.device import send
from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.heads.training import IGNORE, Drafts, Metric, TokenLoss, TrainingBatch, step_metrics, walked


@dataclass
class HostIndices:
    """Labels and documents of a batch on the CPU. Indices are computed from them there, so the host need not wait.

    Attributes:
        labels: [B, N, S] as of `align`.
        documents: [B, L] the same number throughout a document.
    """

    labels: Tensor
    documents: Tensor


class UnrolledConfig(SpeculatorConfig):
    @property
    def min_training_length(self) -> int:
        return self.n_predict + 2

    def training_targets(
        self, input_ids: Tensor, document_ids: Tensor, loss_mask: Tensor, seeds: Sequence[int]
    ) -> dict[str, Any]:
        labels = align(input_ids, document_ids, loss_mask, self.n_predict)
        return {"labels": labels, "on_host": HostIndices(labels, document_ids)}


class UnrolledHead(Speculator):
    """Head that is trained at every position: a subclass implements `unrolled` and `output`."""

    config_class = UnrolledConfig

    @abstractmethod
    def unrolled(
        self,
        states: Tensor,  # [B, S, nD] the states that the head reads
        tokens: Tensor,  # [B, S+N-1] x[1], x[2], ..: step i of position t reads tokens[:, t + i]
        documents: Tensor | None = None,  # [B, S] document of each position, on the CPU; None: one document a row
        loss_mask: Tensor | None = None,  # [B, S] positions where features are needed, on the CPU; None: all
    ) -> list[Tensor]:  # N x [B, S, I]
        """Compute the features that the output matrix reads at each step, teacher-forced: steps read the text's tokens.

        Entry [i][b, t] belongs to step i at position t, whose logits predict tokens[b, t + i + 1].
        """

    @abstractmethod
    def output(self, index: int) -> nn.Linear:  # I -> V_d
        """Output matrix of a step; it has no bias."""

    def token_matrices(self) -> list[Tensor]:
        return [*super().token_matrices(), *(self.output(i).weight for i in range(self.n_predict))]

    def forward(self, batch: TrainingBatch, loss: TokenLoss) -> dict[str, Metric]:
        host = on_host(batch)
        length = host.labels.shape[-1]
        features = self.unrolled(
            # S = L - 2 positions. With 8 tokens those are t = 0..5: step 0 of the last one reads h5 and x6, and its
            # label is x7.
            batch.states[:, :length],
            # Position t reads x[t+1] first, since the target itself samples that. Step i reads one token further, so
            # the last position needs N - 1 more; beyond its first step it has no label, so any token will do.
            nn.functional.pad(batch.input_ids[:, 1:-1], (0, self.n_predict - 1)),
            host.documents[:, :length],
            # A position without a label at any step needs no features: most of a chat's prompt is skipped here.
            (host.labels != IGNORE).any(1),
        )
        return self.measure(features, batch, loss)

    def measure(
        self,
        features: list[Tensor],  # N x [B, S, I]
        batch: TrainingBatch,
        loss: TokenLoss,
    ) -> dict[str, Metric]:
        """Compute the objective and metrics of all steps; labels are laid out by u, see the module."""
        batch_size, steps, length = batch.labels.shape

        def by_u(x: Tensor, index: int, fill: float) -> Tensor:  # [B, S, ...] -> [B * S, ...]
            # Step i at position t predicts x[u+1] with u = t+1+i. Shift it right by i: position t gets column u - 1, so
            # that a column holds the same label x[u+1] for all steps. What leaves on the right has none.
            padding = [0, 0] * (x.ndim - 2) + [index, -index]
            return nn.functional.pad(x, padding, value=fill).flatten(0, 1)

        def labels_by_u(labels: Tensor) -> Tensor:  # [B, N, S] -> [N, B * S]
            return torch.stack([by_u(labels[:, i], i, IGNORE) for i in range(steps)])

        labels = draft_ids(labels_by_u(batch.labels), self.draft_tokens)
        # Only columns with a label at some step. All steps keep the same columns, so that the target's distribution is
        # computed once per column.
        kept = (labels_by_u(on_host(batch).labels) != IGNORE).any(0).nonzero()[:, 0]
        kept = send(kept, labels.device)
        # Column c predicts x[c+2], whose distribution comes from h[c+1].
        hidden = batch.hidden[:, 1 : 1 + length].flatten(0, 1)[kept]
        normalisers = None if batch.normalisers is None else batch.normalisers[:, 1 : 1 + length].flatten()[kept]
        weights = send(loss.step_weights(steps), hidden.device)[:, None]
        # Not multiplied here: the loss takes features [K, I] with their output matrix [V_d, I], and makes few logits at
        # a time.
        logits = [[(by_u(x, i, 0.0)[kept], self.output(i).weight)] for i, x in enumerate(features)]
        drafts = batch_size * length
        # D-PACE needs to know which labels belong to one draft. Step i of draft (b, t) has the number (b * S + t) * N +
        # i, shifted like the labels.
        slots = torch.arange(drafts * steps, device=hidden.device).view(batch_size, length, steps)
        slots = torch.stack([by_u(slots[..., i], i, 0)[kept] for i in range(steps)])
        # The steps of a draft lie in consecutive columns, all of which are kept.
        paced = Drafts(slots, (drafts, steps), steps - 1)
        measured = loss(
            logits, labels[:, kept], hidden, weights, self.draft_tokens, drafts=paced, normalisers=normalisers
        )

        def by_t(x: Tensor) -> Tensor:  # [N, K] -> [N, B, S]
            whole = x.new_zeros(steps, batch_size * length)
            whole[:, kept] = x
            # Undo the shift of `by_u`: prefix products run over the steps of one position t.
            rows = (row.view(batch_size, length) for row in whole)
            return torch.stack([nn.functional.pad(row, (-i, i)) for i, row in enumerate(rows)])

        count = (labels != IGNORE).sum(1)
        overlap, hits = None if measured.overlap is None else by_t(measured.overlap), by_t(measured.hits)
        return {
            "objective": (measured.objective, count.sum()),
            **({} if self.training else {"walked": walked(hits, batch.labels)}),  # on the CPU: not in each step
            **step_metrics(measured.loss, hits, overlap, count, batch.labels[:, 0] != IGNORE, lambda x: x.sum(-1)),
        }

    def logits(
        self,
        hidden: Tensor,  # [B, S, nD] the states that the head reads
        tokens: Tensor,  # [B, S+N-1] x[1], x[2], ..
    ) -> Tensor:  # [N, B, S, V]
        """Compute the logits of every step i at every position t, teacher-forced; all of them are in memory at once.

        Entry [i, b, t] has read the states up to t and tokens[b, : t + i + 1], and predicts tokens[b, t + i + 1].
        """
        features = self.unrolled(hidden, tokens)
        return torch.stack([self.to_full_vocabulary(self.output(i)(x)) for i, x in enumerate(features)])


def on_host(batch: TrainingBatch) -> HostIndices:
    """Return a batch's labels and documents on the CPU, copied there if `targets` has no "on_host"."""
    return batch.targets.get("on_host") or HostIndices(batch.labels.cpu(), batch.document_ids.cpu())


def align(
    input_ids: Tensor,  # [B, L]
    document_ids: Tensor,  # [B, L]
    loss_mask: Tensor,  # [B, L] 1 for tokens that the target would generate
    steps: int,
) -> Tensor:  # [B, N, S]
    """Return the labels of every step: x[t+2+i] for step i at position t, with N = `steps` and S = L - 2 positions.

    IGNORE stands there instead unless x[t+1 .. t+2+i] are all in the loss mask and in h_t's document. A decoder drafts
    only there: x[t+1] is a token that the target just sampled.
    """
    length = input_ids.shape[1] - 2
    # N - 1 tokens without loss after the row, so that its last positions have labels at the first steps.
    input_ids, document_ids, loss_mask = (
        nn.functional.pad(x, (0, steps - 1)) for x in (input_ids, document_ids, loss_mask)
    )
    # x[t+1] must be a token that the target would have sampled: a server drafts only after such a token.
    valid = loss_mask[:, 1 : 1 + length].bool()
    labels = []
    for i in range(steps):
        # Column t of the slice is x[t+2+i], the label. `valid` accumulates over the steps, because a draft ends at its
        # first token without loss: step 1 has no label where step 0 has none.
        span = slice(i + 2, i + 2 + length)
        valid = valid & loss_mask[:, span].bool() & (document_ids[:, span] == document_ids[:, :length])
        labels.append(input_ids[:, span].masked_fill(~valid, IGNORE))
    return torch.stack(labels, dim=1)


def draft_ids(labels: Tensor, draft_tokens: Tensor | None) -> Tensor:  # [...], [V_d] ascending -> [...]
    """Return the output matrix's row of each label; -1 for a token outside the draft vocabulary. IGNORE stays."""
    if draft_tokens is None:
        return labels
    # A label above the last drafted token would be inserted after the end; the clamped row has another token.
    row = torch.searchsorted(draft_tokens, labels).clamp_max(len(draft_tokens) - 1)
    # -1, not IGNORE: a token that can't be drafted still counts as a label, and as a miss.
    ids = torch.where(draft_tokens[row] == labels, row, -1)
    return torch.where(labels == IGNORE, IGNORE, ids)
