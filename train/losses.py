"""What is measured of each head's logits, as sums over positions; `SpeculatorTrainer` divides.

Alignment, 0-based, with a row x of L tokens, hidden states h, N heads and S = L - N - 1:

    head i at position t reads h_t and x[t+1 .. t+1+i] and predicts x[t+2+i]

so the target's own law of that token comes from h[t+1+i], which the same forward pass gave. For L = 8, N = 2:

    t         0  1  2  3  4
    head 0    x2 x3 x4 x5 x6      law from h1 .. h5
    head 1    x3 x4 x5 x6 x7      law from h2 .. h6
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.config import LossConfig

IGNORE = -100


def align(
    input_ids: Tensor,  # [B, L]
    document_ids: Tensor,  # [B, L]
    n_predict: int,
) -> Tensor:  # [B, N, S]
    """Labels of every head; IGNORE where the label lies in another document than h_t."""
    length = input_ids.shape[1] - n_predict - 1
    labels = torch.stack([input_ids[:, i + 2 : i + 2 + length] for i in range(n_predict)], dim=1)
    documents = torch.stack([document_ids[:, i + 2 : i + 2 + length] for i in range(n_predict)], dim=1)
    return labels.masked_fill(documents != document_ids[:, None, :length], IGNORE)


class Measure:
    """Called with each head's logits in turn; gives sums of losses, hits and counts over one batch.

    Args:
        labels: [B, N, S] from `align`.
        teacher: [B, L, V] the target's logits of the whole row, or None where the weights need none.
        weights: of the losses.
    """

    def __init__(self, labels: Tensor, teacher: Tensor | None, weights: LossConfig):
        self.labels, self.weights = labels, weights
        self.alive = torch.ones_like(labels[:, 0], dtype=torch.bool)  # every head so far was right
        self.p: Tensor | None = None
        if teacher is not None:
            log_p = teacher.float().log_softmax(-1)
            self.p = log_p.exp()  # [B, L, V]
            self.entropy = -(self.p * log_p).sum(-1)  # [B, L]

    def __call__(self, index: int, logits: Tensor) -> dict[str, Tensor]:  # [B, S, V] -> scalars
        logits = logits.float()
        labels = self.labels[:, index]
        counted = labels != IGNORE
        normaliser = logits.logsumexp(-1)
        loss = logits.new_zeros(())
        sums = {"count": counted.sum()}
        if self.weights.cross_entropy:
            chosen = logits.gather(2, labels.clamp_min(0)[..., None])[..., 0]
            loss = loss + self.weights.cross_entropy * ((normaliser - chosen) * counted).sum()
        if self.p is not None:
            span = slice(index + 1, index + 1 + labels.shape[1])
            p = self.p[:, span]
            # KL(p || q) = sum p log p - sum p z + log sum exp z
            divergence = normaliser - (p * logits).sum(-1) - self.entropy[:, span]
            loss = loss + self.weights.kl * (divergence * counted).sum()
            if not torch.is_grad_enabled():
                # Acceptance of a sampled draft is the overlap of the two laws (2211.17192, corollary 3.6).
                q = (logits - normaliser[..., None]).exp()
                sums["overlap"] = (torch.minimum(p, q).sum(-1) * counted).sum()
        hit = (logits.argmax(-1) == labels) & counted
        self.alive = self.alive & hit
        return {"loss": loss, "hits": hit.sum(), "prefix_hits": self.alive.sum(), **sums}


def summarise(sums: dict[str, Tensor]) -> dict[str, float]:  # each [N]
    """Per-head means from sums that were reduced over batches and processes, and what they predict.

    `simulated_tokens_per_step` = 1 + the sum of prefix accuracies: what greedy decoding would accept if the text
    were the target's own. The decoder's figure is the one to trust.
    """
    count = sums["count"].clamp_min(1)
    out: dict[str, float] = {}
    columns = {"loss": "loss", "hits": "accuracy", "prefix_hits": "prefix_accuracy", "overlap": "overlap"}
    for key, name in columns.items():
        if key in sums:
            for i, value in enumerate((sums[key] / count).tolist()):
                out[f"head{i}/{name}"] = value
    out["simulated_tokens_per_step"] = 1 + (sums["prefix_hits"] / count).sum().item()
    return out
