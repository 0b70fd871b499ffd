"""Accept rules: pure functions of the target's distribution, the draft and uniforms.

Notation: at verify position j (0 the pending token, i + 1 draft token i) the target's distribution of the next token is
p[j]. A rule gives `last`, the position where the accepted path ends (0: nothing accepted), and the distribution of the
token that follows it, which need not be normalised. So every step emits the tokens of the path and one more. Of more
uniforms than `u` is said to have the first count.

Every rule keeps the target's distribution exactly, for the drafts that it is made for. A uniform
can be exactly 0, so a test `u * q < p` is strict: what the target never says is never accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from speculator.decoding.draft import Draft, take_at
from speculator.decoding.sampling import draw

_TINY = 1e-30


def _chosen(probs: Tensor, tokens: Tensor) -> Tensor:  # [B, T, V], [B, T] -> [B, T]
    return probs.gather(2, tokens[:, :, None])[..., 0]


def deepest(accept: Tensor, draft: Draft) -> Tensor:  # [B, n] bool -> [B]
    """The end of the longest path whose every token is accepted."""
    accept = accept & draft.drafted
    if draft.parents is None:
        return accept.long().cumprod(-1).sum(-1)
    reached = ~(draft.ancestors[:, 1:, 1:] & ~accept[:, None, :]).any(-1)
    best = (draft.depths[:, 1:] * reached).max(-1)
    return torch.where(best.values > 0, best.indices + 1, 0)


def _residual(p: Tensor, q: Tensor) -> Tensor:  # [B, V], [B, V] -> [B, V]
    """(p - q)_+, or p where rounding leaves nothing of it: only a draft from q = p can be refused by rounding."""
    left = (p - q).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > _TINY, left, p)


def _draft_probs(p: Tensor, draft: Draft) -> Tensor:  # [B, n + 1, V]
    """q at every position: one-hot for a deterministic draft, 0 where nothing was drafted."""
    q = draft.probs
    if q is None:
        q = p.new_zeros(*draft.tokens.shape, p.shape[-1]).scatter_(-1, draft.tokens[:, :, None], 1)
    return torch.nn.functional.pad(q.to(p.dtype) * draft.drafted[:, :, None], (0, 0, 0, 1))


def greedy(
    best: Tensor,  # [B, n + 1] argmax of the target's logits
    draft: Draft,
) -> tuple[Tensor, Tensor]:  # [B], [B]
    """Temperature 0: keep the longest path that the target would have chosen. Gives (last, the next token)."""
    last = deepest(draft.tokens == best.gather(1, draft.before), draft)
    return last, best.gather(1, last[:, None])[:, 0]


def rejection(
    p: Tensor,  # [B, G+1, V]
    draft: Draft,  # a chain
    u: Tensor,  # [B, G]
) -> tuple[Tensor, Tensor]:  # [B], [B, V]
    """Modified rejection sampling (2211.17192 algorithm 1, 2302.01318 algorithm 2).

    Accept x_i iff u_i q_i(x_i) < p_i(x_i). After a refusal the next token follows norm((p - q)_+), after a whole draft
    p itself.
    """
    q = _draft_probs(p, draft)
    accept = u[:, : draft.depth] * _chosen(q[:, :-1], draft.tokens) < _chosen(p[:, :-1], draft.tokens)
    last = deepest(accept, draft)
    return last, _residual(take_at(p, last), take_at(q, last))


def block(
    p: Tensor,  # [B, G+1, V]
    draft: Draft,  # a chain
    u: Tensor,  # [B, G]
) -> tuple[Tensor, Tensor]:  # [B], [B, V]
    """Block verification (2403.10444 algorithm 2): the longest prefix that passes, in the mean at least `rejection`'s.

    P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)); a prefix of i < G tokens passes with h_i = S / (S + 1 - P_i), where
    S = sum_x (P_i p_{i+1}(x) - q_{i+1}(x))_+, the whole draft with P_G. The next token follows norm((P_n p - q)_+).
    """
    q = _draft_probs(p, draft)
    drawn = _chosen(q[:, :-1], draft.tokens)
    ratio = _chosen(p[:, :-1], draft.tokens) / drawn.clamp_min(_TINY)
    weights = [p.new_ones(len(p))]
    for i in range(draft.depth):
        weights.append((weights[-1] * ratio[:, i]).clamp_max(1))
    weight = torch.stack(weights, 1)  # [B, G+1]
    surplus = (weight[:, :, None] * p - q).clamp_min(0).sum(-1)
    rest = surplus + 1 - weight
    passes = torch.where(rest > 0, surplus / rest.clamp_min(_TINY), 1.0)
    length = draft.lengths[:, None]
    prefix = torch.arange(1, draft.depth + 1, device=p.device)
    passes = torch.where(prefix == length, weight[:, 1:], passes[:, 1:])
    passed = (u[:, : draft.depth] < passes) & draft.drafted
    last = passed.long().mul(prefix).amax(-1) if draft.depth else draft.lengths
    return last, _residual(take_at(p, last) * weight.gather(1, last[:, None]), take_at(q, last))


def match(
    p: Tensor,  # [B, n+1, V]
    draft: Draft,  # deterministic: a chain or a tree
    u: Tensor,  # [B, n+1] u[:, d] draws the token behind d accepted ones
) -> tuple[Tensor, Tensor]:  # [B], [B, V]
    """Sample and walk: at each node draw from p, and go on into the child that was drawn, if it is there.

    So a node keeps some child with the probability of the set of them, the most that any rule can reach for a fixed set
    (SpecInfer 2305.09781 section 4.3, 2502.18779). The token behind the path is drawn here too: its distribution is
    one-hot. With uniforms that belong to places in the text, the text is the same whatever was drafted.
    """
    last = torch.zeros_like(draft.lengths)
    return _follow_match(p, draft, u[:, : draft.depth + 1], last, p[:, 0])


def _follow_match(
    p: Tensor,  # [B, n+1, V]
    draft: Draft,
    u: Tensor,  # [B, s+1] for s steps
    last: Tensor,  # [B] where each row begins
    probs: Tensor,  # [B, V] of the token there
) -> tuple[Tensor, Tensor]:  # [B], [B, V] one-hot
    """Draw a token, and go on into the child that it is, if there is one."""
    token = draw(probs, u[:, 0])
    moving = torch.ones_like(last, dtype=torch.bool)
    for step in range(1, u.shape[1]):
        child = (draft.before == last[:, None]) & (draft.tokens == token[:, None]) & draft.drafted
        moving = moving & child.any(-1)
        last = torch.where(moving, child.to(torch.uint8).argmax(-1) + 1, last)
        token = torch.where(moving, draw(take_at(p, last), u[:, step]), token)
    return last, torch.zeros_like(p[:, 0]).scatter_(1, token[:, None], 1)


def multi_candidate(
    p: Tensor,  # [B, n+1, V]
    draft: Draft,  # siblings drawn one after the other from their parent's distribution, without replacement
    u: Tensor,  # [B, n]
) -> tuple[Tensor, Tensor]:  # [B], [B, V]
    """Recursive rejection sampling over siblings (2401.06706 algorithm 2, 2402.14160), drawn without replacement.

    With t = p and s = q at a node, accept child x iff u s(x) < t(x), else t = norm((t - s)_+), s(x) = 0, s = norm(s).
    """
    return _recursive(p, draft, u, replacement=False)


def multi_candidate_replacement(
    p: Tensor,  # [B, n+1, V]
    draft: Draft,  # siblings drawn independently from their parent's distribution
    u: Tensor,  # [B, n]
) -> tuple[Tensor, Tensor]:  # [B], [B, V]
    """`multi_candidate` for siblings that are drawn with replacement: s stays as it is (2401.06706 algorithm 1)."""
    return _recursive(p, draft, u, replacement=True)


def _recursive(p: Tensor, draft: Draft, u: Tensor, replacement: bool) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(p), device=p.device)
    q = _draft_probs(p, draft)
    last = torch.zeros_like(draft.lengths)
    probs = p[:, 0]
    moving = torch.ones_like(last, dtype=torch.bool)
    for _ in range(draft.depth):
        child = (draft.before == last[:, None]) & draft.drafted & moving[:, None]  # [B, n]
        rank = child.long().cumsum(-1)
        t, entered = take_at(p, last), torch.zeros_like(moving)
        s = torch.zeros_like(t)
        for sibling in range(draft.width):
            here = child & (rank == sibling + 1)
            index = here.to(torch.uint8).argmax(-1)
            if sibling == 0:
                s = q[rows, index]
            x = draft.tokens[rows, index]
            # A child that its distribution could not give is none: siblings had used that distribution up.
            exists = here.any(-1) & ~entered & (s[rows, x] > 0)
            accept = exists & (u[rows, index] * s[rows, x] < t[rows, x])
            refuse = exists & ~accept
            entered = entered | accept
            last = torch.where(accept, index + 1, last)
            left = _residual(t, s)
            t = torch.where(refuse[:, None], left / left.sum(-1, keepdim=True), t)
            if not replacement:
                others = s.scatter(1, x[:, None], 0)
                others = others / others.sum(-1, keepdim=True).clamp_min(_TINY)
                s = torch.where(refuse[:, None], others, s)
        probs = torch.where((moving & ~entered)[:, None], t, probs)
        moving = moving & entered
    return last, torch.where(moving[:, None], take_at(p, last), probs)


Rule = Callable[[Tensor, Draft, Tensor], tuple[Tensor, Tensor]]


def followed_by_match(rule: Rule) -> Rule:
    """A rule for a draft with a path from elsewhere hung on: it decides over the draft's own part, and where the token
    that it leaves to be drawn is in the tree, the walk goes on from there.

    So siblings are tested one after the other, each by its own distribution: the draft's own by q, then the path's, as
    certain, by what those have left of p (independent drafters, SpecInfer 2305.09781 section 4.3). The walk takes the
    last of the uniforms: as many as there are tokens in the path, and one.
    """

    @wraps(rule)
    def run(p: Tensor, draft: Draft, u: Tensor) -> tuple[Tensor, Tensor]:
        if draft.own is None:
            return rule(p, draft, u)
        count = draft.own.tokens.shape[1]
        last, probs = rule(p[:, : count + 1], draft.own, u[:, :count])
        return _follow_match(p, draft, u[:, count - draft.tokens.shape[1] - 1 :], last, probs)

    return run


RULES: dict[str, Rule] = {
    "rejection": followed_by_match(rejection),
    "block": followed_by_match(block),
    "match": match,
    "multi_candidate": followed_by_match(multi_candidate),
    "multi_candidate_replacement": followed_by_match(multi_candidate_replacement),
}
"""By the name that a user types. Temperature 0 is `greedy`, whichever of these is asked for."""
