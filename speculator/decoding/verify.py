"""Accept rules: pure functions of the target's distribution, the draft and random numbers.

`match` compares the draft with the target's own tokens; the other rules work on distributions.

Notation: at verify position j (0: the pending token, i+1: draft token i) the target's distribution of the next token is
p[j]; the draft's is q. A rule returns `last`, the position where the accepted path ends (0: nothing accepted), and the
distribution of the token after it, which need not be normalised. `u` holds uniform random numbers in [0, 1); a rule
reads one for each draft token, the leading columns.

Every rule keeps the target's distribution exactly, for the drafts that it is made for. A random number can be exactly
0, so tests `u q < p` are strict: a token of probability 0 is never accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speculator.decoding.draft import Draft, take_at

_TINY = 1e-30


def _prob_of(probs: Tensor, tokens: Tensor) -> Tensor:  # [B, T, V], [B, T] -> [B, T]
    return probs.gather(2, tokens[:, :, None])[..., 0]


def deepest(accept: Tensor, draft: Draft) -> Tensor:  # [B, n] bool -> [B]
    """Return the verify position where the longest accepted path ends (0: none); ancestors must be accepted too."""
    accept = accept & draft.drafted
    # A chain ends at its first rejection: [1, 1, 0, 1] gives the products [1, 1, 0, 0], whose sum is 2.
    if draft.parents is None:
        return accept.long().cumprod(-1).sum(-1)
    # A node is reached if no node on its path, itself included, is rejected. Index 0 of `ancestors` is the pending
    # token, which is always there, so both dimensions start at 1.
    reached = ~(draft.ancestors[:, 1:, 1:] & ~accept[:, None, :]).any(-1)
    # Verify position of draft token i is i + 1, and 0 stands for "nothing accepted".
    best = (draft.depths[:, 1:] * reached).max(-1)
    return torch.where(best.values > 0, best.indices + 1, 0)


def _residual(p: Tensor, q: Tensor) -> Tensor:  # [B, V], [B, V] -> [B, V]
    """Return (p - q)_+, not normalised; p where that is 0 everywhere, as only rounding can have rejected the draft."""
    # Nothing to divide by: `draw` takes distributions that are not normalised.
    residual = (p - q).clamp_min(0)
    return torch.where(residual.sum(-1, keepdim=True) > _TINY, residual, p)


def _draft_probs(p: Tensor, draft: Draft) -> Tensor:  # [B, n + 1, V]
    """Return the draft's distribution q at every verify position: one-hot without `draft.probs`, 0 without a token."""
    # A deterministic draft is one whose law gives its token probability 1, so the same rules fit it.
    q = draft.probs
    if q is None:
        q = p.new_zeros(*draft.tokens.shape, p.shape[-1]).scatter_(-1, draft.tokens[:, :, None], 1)
    # One more position than the draft has tokens, with q = 0: after a draft that is accepted as a whole, (p - 0)_+ = p
    # gives the bonus token from the target's own distribution.
    return torch.nn.functional.pad(q.to(p.dtype) * draft.drafted[:, :, None], (0, 0, 0, 1))


def match(
    samples: Tensor,  # [B, n+1] the target's own token at every verify position
    draft: Draft,
) -> tuple[Tensor, Tensor]:  # [B] verify position where the accepted path ends, [B] next token
    """Follow the draft while it contains the target's own tokens; return where that ends, and the next token.

    The output consists of the target's tokens, whatever the draft (SpecInfer, 2305.09781). At temperature 0 these are
    the likeliest tokens. Above 0 the draft is made of the same Gumbel noise (2408.07978), see `Noise`.
    """
    if not draft.depth:  # a plain step
        return draft.lengths, samples[:, 0]
    # Draft token i is compared with the sample at its parent's position, `before`: i itself in a chain, because the
    # pending token at 0 predicts the first draft token.
    last = deepest(draft.tokens == samples.gather(1, draft.before), draft)
    return last, samples.gather(1, last[:, None])[:, 0]


def rejection(
    p: Tensor,  # [B, G+1, V] the target's distribution of the next token at every verify position
    draft: Draft,  # a chain
    u: Tensor,  # [B, G] uniform in [0, 1)
) -> tuple[Tensor, Tensor]:  # [B] verify position where the path ends, [B, V] next token's law, not normalised
    """Modified rejection sampling (2211.17192 algorithm 1, 2302.01318 algorithm 2).

    Accept x_i iff u_i q_i(x_i) < p_i(x_i), up to the first rejection, at n + 1.
    The next token follows norm((p_{n+1} - q_{n+1})_+) after a rejection, p_{G+1} after a fully accepted draft.
    """
    q = _draft_probs(p, draft)
    # u q < p in place of u < p / q: no division by 0, and a token with p = 0 fails also if u is exactly 0.
    accept = u[:, : draft.depth] * _prob_of(q[:, :-1], draft.tokens) < _prob_of(p[:, :-1], draft.tokens)
    last = deepest(accept, draft)
    return last, _residual(take_at(p, last), take_at(q, last))


def block(
    p: Tensor,  # [B, G+1, V] the target's distribution of the next token at every verify position
    draft: Draft,  # a chain
    u: Tensor,  # [B, G] uniform in [0, 1)
) -> tuple[Tensor, Tensor]:  # [B] verify position where the path ends, [B, V] next token's law, not normalised
    """Block verification (2403.10444 algorithm 2): accepts on average at least as many tokens as `rejection`.

    P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)).
    Prefix i < G passes iff u_i < h_i = S_i / (S_i + 1 - P_i), with S_i = sum_x (P_i p_{i+1}(x) - q_{i+1}(x))_+;
    the whole draft passes iff u_G < P_G.
    Accept the longest prefix n that passes. The next token follows norm((P_n p_{n+1} - q_{n+1})_+).
    """
    q = _draft_probs(p, draft)
    # Clamped for padding alone, where q is 0; a drafted token was drawn from q, so its q is positive.
    ratio = _prob_of(p[:, :-1], draft.tokens) / _prob_of(q[:, :-1], draft.tokens).clamp_min(_TINY)
    # P_0 = 1: nothing has been drafted before the first token.
    weights = [p.new_ones(len(p))]
    for i in range(draft.depth):
        # Clamped at every token: with the ratios 2 and 0.5 the second weight is 0.5. Clamping their product once would
        # give 1, and accept too much.
        weights.append((weights[-1] * ratio[:, i]).clamp_max(1))
    weight = torch.stack(weights, 1)  # [B, G+1] P
    # p at index i is the distribution of the token after prefix i, and so is q: both are p_{i+1} and q_{i+1} of the
    # paper.
    surplus = (weight[:, :, None] * p - q).clamp_min(0).sum(-1)  # [B, G+1] S
    total = surplus + 1 - weight
    # S = 0 and P = 1: p and q are equal after this prefix, so it always passes.
    h = torch.where(total > 0, surplus / total.clamp_min(_TINY), 1.0)
    prefix = torch.arange(1, draft.depth + 1, device=p.device)
    # The last token of a draft has its own rule, and rows may have drafts of unequal length.
    h = torch.where(prefix == draft.lengths[:, None], weight[:, 1:], h[:, 1:])
    passed = (u[:, : draft.depth] < h) & draft.drafted
    # The longest prefix that passes, not the first that fails: prefix 1 may fail and prefix 2 pass. [0, 1, 1, 0] * [1,
    # 2, 3, 4] has the maximum 3.
    last = passed.long().mul(prefix).amax(-1) if draft.depth else draft.lengths
    return last, _residual(take_at(p, last) * weight.gather(1, last[:, None]), take_at(q, last))


def multi_candidate(
    p: Tensor,  # [B, n+1, V] the target's distribution of the next token at every verify position
    draft: Draft,  # siblings sampled one after the other from their parent's distribution, without replacement
    u: Tensor,  # [B, n] uniform in [0, 1)
) -> tuple[Tensor, Tensor]:  # [B] verify position where the path ends, [B, V] next token's law, not normalised
    """Recursive rejection sampling over siblings without replacement (2401.06706 algorithm 2, 2402.14160).

    At a node start with t = p, s = q. Accept child x iff u s(x) < t(x).
    After a rejection t = norm((t - s)_+), s(x) = 0, s = norm(s), and test the next sibling.
    If all are rejected, the next token follows the last t.
    """
    rows = torch.arange(len(p), device=p.device)
    q = _draft_probs(p, draft)
    last = torch.zeros_like(draft.lengths)
    probs = p[:, 0]
    moving = torch.ones_like(last, dtype=torch.bool)
    for _ in range(draft.depth):
        # The children of the node where each row stands. Rows that have stopped have none.
        child = (draft.before == last[:, None]) & draft.drafted & moving[:, None]  # [B, n]
        # 1, 2, ... for the siblings in the order in which they were drawn, which is the order to test them in.
        rank = child.long().cumsum(-1)
        t, accepted = take_at(p, last), torch.zeros_like(moving)
        s = torch.zeros_like(t)
        for sibling in range(draft.width):
            is_sibling = child & (rank == sibling + 1)
            # 0 for a row without such a sibling; `exists` is False there.
            index = is_sibling.to(torch.uint8).argmax(-1)
            if sibling == 0:
                # All siblings share one q, that of their parent's continuation, which the first sibling was drawn from.
                s = q[rows, index]
            x = draft.tokens[rows, index]
            # With s(x) = 0, earlier siblings have used up the distribution: x is padding.
            exists = is_sibling.any(-1) & ~accepted & (s[rows, x] > 0)
            accept = exists & (u[rows, index] * s[rows, x] < t[rows, x])
            reject = exists & ~accept
            accepted = accepted | accept
            last = torch.where(accept, index + 1, last)
            residual = _residual(t, s)
            t = torch.where(reject[:, None], residual / residual.sum(-1, keepdim=True), t)
            # Drawn without replacement: the next sibling came from q without x, normalised again.
            others = s.scatter(1, x[:, None], 0)
            others = others / others.sum(-1, keepdim=True).clamp_min(_TINY)
            s = torch.where(reject[:, None], others, s)
        # A row stops where no sibling was accepted: t is what their rejections have left of p.
        probs = torch.where((moving & ~accepted)[:, None], t, probs)
        moving = moving & accepted
    # A row that still moves has accepted a whole path, so its bonus token comes from p itself.
    return last, torch.where(moving[:, None], take_at(p, last), probs)


Rule = Callable[[Tensor, Draft, Tensor], tuple[Tensor, Tensor]]
MATCH = "match"
REJECTION_RULES: dict[str, Rule] = {
    "rejection": rejection,
    "block": block,
    "multi_candidate": multi_candidate,
}
"""The rules besides `match`, by the name that users type. At temperature 0 each of them is `match`."""
RULES = (MATCH, *REJECTION_RULES)
"""Names of all rules."""
CHAIN_RULES = (MATCH, "block", "rejection")
"""Names of the rules that a chain allows; the first is the default."""
