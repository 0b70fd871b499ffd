"""Accept rules: pure functions of the target's law, the draft and uniforms.

Notation of `Draft`: draft token x_i (i = 1..G) was drawn from q_i; the target's law there is p_i, and p_{G+1} is its
law after the whole draft. A rule gives n, how many draft tokens are kept, and the law of the token that follows them,
so every step emits n + 1 tokens. A row's positions at and beyond its `lengths` were not drafted and are never kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-30


@dataclass
class Draft:
    """A chain of proposed tokens.

    Attributes:
        tokens: [B, G].
        lengths: [B] how many of them each row really drafted; the rest is padding.
        probs: [B, G, V] the law that each token was drawn from, or None for a deterministic draft (one-hot).
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None

    @property
    def drafted(self) -> Tensor:  # [B, G] bool
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


def _leading(accept: Tensor) -> Tensor:  # [B, G] bool -> [B]
    """How many accepts come before the first refusal."""
    return accept.long().cumprod(-1).sum(-1)


def greedy(
    best: Tensor,  # [B, G+1] argmax of the target's logits
    draft: Draft,
) -> tuple[Tensor, Tensor]:  # [B], [B]
    """Temperature 0: keep the leading tokens that the target would have chosen. Gives (n, the next token)."""
    kept = _leading((draft.tokens == best[:, :-1]) & draft.drafted)
    return kept, best.gather(1, kept[:, None])[:, 0]


def token(
    p: Tensor,  # [B, G+1, V]
    draft: Draft,
    u: Tensor,  # [B, G]
) -> tuple[Tensor, Tensor]:  # [B], [B, V]
    """Modified rejection sampling (2211.17192 algorithm 1, 2302.01318 algorithm 2). Gives (n, law of the next token).

    Accept x_i iff u_i q_i(x_i) < p_i(x_i), strictly, since u can be 0. The next token follows
    norm((p_{n+1} - q_{n+1})_+), with q = 0 where nothing was drafted, so p itself after a whole draft.
    """
    rows, width, size = p.shape[0], p.shape[1] - 1, p.shape[2]
    q = torch.nn.functional.one_hot(draft.tokens, size) if draft.probs is None else draft.probs
    q = torch.cat([q.to(p.dtype) * draft.drafted[:, :, None], p.new_zeros(rows, 1, size)], dim=1)  # [B, G+1, V]
    chosen = draft.tokens[:, :, None]
    p_x, q_x = p[:, :width].gather(2, chosen)[..., 0], q[:, :width].gather(2, chosen)[..., 0]
    kept = _leading((u * q_x < p_x) & draft.drafted)
    stop = kept[:, None, None].expand(-1, 1, size)
    p_stop = p.gather(1, stop)[:, 0]
    residual = (p_stop - q.gather(1, stop)[:, 0]).clamp_min(0)
    # The residual is empty only where rounding refused a draft from q = p: then p is the law.
    return kept, torch.where(residual.sum(-1, keepdim=True) > _TINY, residual, p_stop)
