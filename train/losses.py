"""What a batch says of a head, as sums over tokens; `SpeculatorTrainer` divides.

Alignment, 0-based, with a row x of L tokens, hidden states h, N heads and S = L - N - 1:

    head i at position t reads h_t and x[t+1 .. t+1+i] and predicts x[t+2+i]

so the target's own distribution of that token comes from u = t+1+i, which the same forward pass gave. For L = 8, N = 2:

    t         0  1  2  3  4
    head 0    x2 x3 x4 x5 x6      distribution from h1 .. h5
    head 1    x3 x4 x5 x6 x7      distribution from h2 .. h6

Everything here is laid out by u, so that one distribution, made once, teaches every head.

A head with a draft vocabulary has V_d of the V logits. The distribution is normalised over all V and then cut to the
V_d, so that a sum over tokens is a sum over these: q is 0 elsewhere. A label that can't be drafted is a miss, and has
no cross-entropy; it is counted all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speculator.target.linear import product
from train.config import LossConfig

IGNORE = -100
_OUTSIDE = -1  # of a label that is not in the draft vocabulary
_CHUNK = {"cpu": 2**23}
_CHUNK_ON_GPU = 2**26
"""Logits that exist at a time, of all tokens and the whole vocabulary: 32 MiB and 256 MiB in float32."""
_OUTER_ROWS = 8192


def align(
    input_ids: Tensor,  # [B, L]
    document_ids: Tensor,  # [B, L]
    loss_mask: Tensor,  # [B, L] 1 where the target would speak: text, continuations, an assistant's turns
    n_predict: int,
) -> Tensor:  # [B, N, S]
    """Labels of every head; IGNORE where x[t+1 .. t+2+i] are not all the target's own, in the document of h_t.

    Only there a decoder would ask the head: x[t+1] is what the target just said.
    """
    length = input_ids.shape[1] - n_predict - 1
    speaks = loss_mask[:, 1 : 1 + length].bool()
    labels = []
    for i in range(n_predict):
        span = slice(i + 2, i + 2 + length)
        speaks = speaks & loss_mask[:, span].bool() & (document_ids[:, span] == document_ids[:, :length])
        labels.append(input_ids[:, span].masked_fill(~speaks, IGNORE))
    return torch.stack(labels, dim=1)


def draft_ids(labels: Tensor, draft_tokens: Tensor | None) -> Tensor:  # [...], [V_d] ascending -> [...]
    """The row of an output matrix that each label has; IGNORE stays, _OUTSIDE where it has none."""
    if draft_tokens is None:
        return labels
    place = torch.searchsorted(draft_tokens, labels).clamp_max(len(draft_tokens) - 1)
    ids = torch.where(draft_tokens[place] == labels, place, _OUTSIDE)
    return torch.where(labels == IGNORE, IGNORE, ids)


class TargetProbs(NamedTuple):
    """The target's distribution of each token of a chunk, of what can be drafted; softened by `kl`'s temperature."""

    p: Tensor  # [C, V_d] sums to 1 over the whole vocabulary
    softened: Tensor  # [C, V_d] so does this
    entropy: Tensor  # [C] of the softened: the part of these tokens


def target_probs(logits: Tensor, kl_temperature: float, draft_tokens: Tensor | None = None) -> TargetProbs:  # [C, V]
    def drafted(log_p: Tensor) -> Tensor:  # [C, V] -> [C, V_d]
        return log_p if draft_tokens is None else log_p[:, draft_tokens]

    log_p = (logits.float() if logits.dtype != torch.float64 else logits).log_softmax(-1)
    if kl_temperature == 1:
        log_p = drafted(log_p)
        log_soft, p = log_p, log_p.exp()
        return TargetProbs(p, p, -(p * log_soft).sum(-1))
    log_soft = drafted((log_p / kl_temperature).log_softmax(-1))
    return TargetProbs(drafted(log_p).exp(), log_soft.exp(), -(log_soft.exp() * log_soft).sum(-1))


def cross_entropy(log_q: Tensor, labels: Tensor) -> Tensor:  # [C, V_d], [C] -> [C]
    """Of the token that the text goes on with (2404.19124); 0 where that is none that is drafted."""
    return -log_q.gather(1, labels.clamp_min(0)[:, None])[:, 0] * (labels >= 0)


def kl(log_q: Tensor, target: TargetProbs, temperature: float) -> Tensor:  # [C, V_d] -> [C]
    """KL(p || q), both softened, times temperature^2 so that its gradient keeps its size (1503.02531).

    With a draft vocabulary the sum over it of p (log p - log q), p not normalised anew: a token counts as much as the
    target's distribution has to draft. It is least, M log M of the mass M there, where q is p in proportion.
    """
    if temperature != 1:
        log_q = (log_q / temperature).log_softmax(-1)
    return temperature**2 * (-(target.softened * log_q).sum(-1) - target.entropy)


def overlap(log_q: Tensor, p: Tensor) -> Tensor:  # [C, V_d] twice -> [C]
    """sum_v min(p_v, q_v): the chance that a sampled draft is accepted (2211.17192, corollary 3.6)."""
    return torch.minimum(p, log_q.exp()).sum(-1)


def loss_per_token(
    z: Tensor, labels: Tensor, target: TargetProbs | None, weights: LossConfig
) -> Tensor:  # [C, V_d] -> [C]
    """The weighted mix of one head's losses."""
    log_q = z.log_softmax(-1)
    loss = z.new_zeros(len(z))
    if weights.cross_entropy:
        loss = loss + weights.cross_entropy * cross_entropy(log_q, labels)
    if target is None:
        return loss
    divergence = kl(log_q, target, weights.kl_temperature) if weights.kl or weights.lk else None
    if weights.kl:
        loss = loss + weights.kl * divergence
    if weights.total_variation or weights.lk:
        accepted = overlap(log_q, target.p)
        if weights.total_variation:
            loss = loss + weights.total_variation * (1 - accepted)
        if weights.lk:  # 2602.23881, the hybrid: the divergence leads while little is accepted, then acceptance itself
            share = torch.exp(-weights.lk_eta * accepted.detach())
            loss = loss + weights.lk * (share * divergence + (1 - share) * (1 - accepted))
    return loss


def chunk_tokens(device: str, vocab_size: int) -> int:
    """How many tokens' logits exist at a time, on a kind of device."""
    return max(1, _CHUNK.get(device, _CHUNK_ON_GPU) // vocab_size)


def needs_target_probs(weights: LossConfig) -> bool:
    """Whether the target's lm_head is needed at all."""
    return bool(weights.kl or weights.total_variation or weights.lk)


class Measure:
    """Called by a head's `forward` with its features and output matrices; gives the loss and sums over one batch.

    Logits exist for one chunk of tokens and one head at a time, in the forward pass and in the backward pass.

    Args:
        labels: [B, N, S] from `align`.
        hidden: [B, L, D] the target's states of the whole rows.
        logits: the target's lm_head, [C, D] -> [C, V], called where a loss needs the target's distribution.
        weights: of the losses.
        chunk: tokens at a time; None takes what fits in a fixed budget of logits.
        vocab_size: V of `logits`, for that budget; None where the heads' outputs have it.
        token_weights: [B, L] how many times each token counts in the objective, whichever head predicts it; None: once.
            The other sums do not know of it.
    """

    def __init__(
        self,
        labels: Tensor,
        hidden: Tensor,
        logits: Callable[[Tensor], Tensor],
        weights: LossConfig,
        chunk: int | None = None,
        vocab_size: int | None = None,
        token_weights: Tensor | None = None,
    ):
        self.labels, self.hidden, self.logits, self.weights = labels, hidden, logits, weights
        self.chunk, self.vocab_size, self.token_weights = chunk, vocab_size, token_weights

    def __call__(
        self,
        features: list[Tensor],  # [B, S, I] of each head
        outputs: list[nn.Linear],  # I -> V_d of each head
        draft_tokens: Tensor | None = None,  # [V_d] ascending; None: V_d is V
    ) -> dict[str, Tensor]:
        """Gives `objective` (a scalar, to be minimised) and sums of each head, [N].

        The sums: loss, count, hits, prefix_hits (every head up to this one was right) and, where gradients are off
        and the target's distribution is at hand, overlap.
        """
        batch, heads, length = self.labels.shape
        total = length + heads - 1  # u = 1 .. total

        def by_u(x: Tensor, index: int, fill: float) -> Tensor:  # [B, S, ...] -> [B * total, ...]
            padding = [0, 0] * (x.ndim - 2) + [index, heads - 1 - index]
            return nn.functional.pad(x, padding, value=fill).flatten(0, 1)

        labels = torch.stack([by_u(self.labels[:, i], i, IGNORE) for i in range(heads)])  # [N, B * total]
        labels = draft_ids(labels, draft_tokens)
        kept = (labels != IGNORE).any(0).nonzero()[:, 0]
        hidden = self.hidden[:, 1 : 1 + total].flatten(0, 1)[kept]
        # The token that every head predicts at u is x[u+1].
        counts = None if self.token_weights is None else self.token_weights[:, 2 : 2 + total].flatten()[kept]
        inputs = [by_u(x, i, 0.0)[kept] for i, x in enumerate(features)]
        matrices = list({id(output): output.weight for output in outputs}.values())
        which = [next(j for j, matrix in enumerate(matrices) if matrix is output.weight) for output in outputs]
        objective, loss, hit, accepted = _Chunked.apply(
            self, hidden, labels[:, kept], counts, draft_tokens, which, torch.is_grad_enabled(), *inputs, *matrices
        )

        def by_t(x: Tensor) -> Tensor:  # [N, K] -> [N, B, S]
            whole = x.new_zeros(heads, batch * total)
            whole[:, kept] = x
            return torch.stack([row.view(batch, total)[:, i : i + length] for i, row in enumerate(whole)])

        hits = by_t(hit)
        sums = {
            "objective": objective,
            "loss": loss.sum(1),
            "count": (labels != IGNORE).sum(1),
            "hits": hits.sum((1, 2)),
            "prefix_hits": hits.cumprod(0).sum((1, 2)),
        }
        return (
            sums
            if torch.is_grad_enabled() or not needs_target_probs(self.weights)
            else sums | {"overlap": accepted.sum(1)}
        )


class _Chunked(torch.autograd.Function):
    """Chunk by chunk: logits, losses and at once their gradients, so that nothing of a chunk outlives it."""

    @staticmethod
    def forward(
        ctx: Any,
        measure: Measure,
        hidden: Tensor,  # [K, D]
        labels: Tensor,  # [N, K] rows of the output matrices
        counts: Tensor | None,  # [K] how many times each token counts
        draft_tokens: Tensor | None,  # [V_d]
        which: list[int],
        train: bool,
        *tensors: Tensor,
    ):
        heads, kept = labels.shape
        features, matrices = tensors[:heads], tensors[heads:]
        vocabulary, device, weights = measure.vocab_size or matrices[0].shape[0], labels.device, measure.weights
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else matrices[0].dtype
        cast = [matrix.to(dtype) for matrix in matrices]
        d_features = [torch.zeros_like(x) for x in features] if train else []
        d_matrices = [torch.zeros_like(matrix) for matrix in matrices] if train else []
        loss, accepted = (torch.zeros(heads, kept, device=device, dtype=matrices[0].dtype) for _ in range(2))
        hit = torch.zeros(heads, kept, dtype=torch.long, device=device)
        chunk = measure.chunk or chunk_tokens(device.type, vocabulary)
        for start in range(0, kept, chunk):
            span = slice(start, start + chunk)
            target = None
            if needs_target_probs(weights):
                target = target_probs(measure.logits(hidden[span]), weights.kl_temperature, draft_tokens)
            for i in range(heads):
                counted = labels[i, span] != IGNORE
                x = features[i][span].to(dtype)
                z = product(x, cast[which[i]]).to(loss.dtype).requires_grad_(train)
                with torch.set_grad_enabled(train):
                    each = loss_per_token(z, labels[i, span], target, weights) * counted
                    total = (each if counts is None else each * counts[span]).sum() * weights.head_decay**i
                loss[i, span] = each.detach()
                hit[i, span] = (z.argmax(-1) == labels[i, span]).long()
                if train:
                    (d_z,) = torch.autograd.grad(total, z)
                    d_z = d_z.to(dtype)
                    d_features[i][span] = product(d_z, cast[which[i]].T).to(x.dtype)
                    _add_outer(d_matrices[which[i]], d_z, x)
                elif target is not None:
                    accepted[i, span] = overlap(z.log_softmax(-1), target.p) * counted
        ctx.save_for_backward(*d_features, *d_matrices)
        ctx.mark_non_differentiable(loss, hit, accepted)
        decay = torch.tensor([weights.head_decay**i for i in range(heads)], dtype=loss.dtype, device=device)
        objective = loss if counts is None else loss * counts
        return (objective.sum(1) * decay).sum(), loss, hit, accepted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_objective: Tensor, *_: Tensor):
        return *(None,) * 7, *(gradient.mul_(d_objective) for gradient in ctx.saved_tensors)


def _add_outer(total: Tensor, d_z: Tensor, x: Tensor) -> None:  # [V, I] += [C, V]^T [C, I]
    """In blocks of the vocabulary: a whole product would be a second matrix of the size of `total`."""
    if total.dtype == x.dtype and not total.is_cpu:
        total.addmm_(d_z.T, x)
        return
    for start in range(0, len(total), _OUTER_ROWS):
        span = slice(start, start + _OUTER_ROWS)
        total[span] += product(d_z[:, span].T, x.T)


def summarise(sums: dict[str, Tensor]) -> dict[str, float]:  # each [N]
    """Per-head means from sums that were reduced over batches and processes, and what they predict.

    `teacher_forced_acceptance_length` = 1 + the sum of prefix accuracies: what greedy decoding would accept if the text
    were the target's own. The decoder's figure is the one to trust.
    """
    count = sums["count"].clamp_min(1)
    out: dict[str, float] = {}
    columns = {"loss": "loss", "hits": "accuracy", "prefix_hits": "prefix_accuracy", "overlap": "overlap"}
    for key, name in columns.items():
        if key in sums:
            out |= {f"head{i}/{name}": value for i, value in enumerate((sums[key] / count).tolist())}
    out["teacher_forced_acceptance_length"] = 1 + (sums["prefix_hits"] / count).sum().item()
    return out
