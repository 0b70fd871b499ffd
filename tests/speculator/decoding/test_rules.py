"""The accept rules, proved by enumeration in float64; the known-wrong variants must fail the same proof."""

from itertools import product

import pytest
import torch

from speculator.decoding import rules
from speculator.decoding.draft import Draft

V, G = 3, 2


def laws(seed: int):
    """p and q over every prefix of a G-token draft: p[prefix], q[prefix] are laws over V tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for n in range(G + 1) for prefix in product(range(V), repeat=n)]

    def law():
        weights = torch.rand(V, generator=generator, dtype=torch.float64) ** 3
        if seed % 3 == 1:
            weights[torch.randint(V, (1,), generator=generator)] = 0
        if seed % 5 == 2:
            weights = torch.nn.functional.one_hot(weights.argmax(), V).double()
        return weights / weights.sum()

    p, q = {prefix: law() for prefix in prefixes}, {prefix: law() for prefix in prefixes}
    return p, p if seed % 7 == 3 else q


def thresholds(p, q, draft):
    """The points where an accept test changes its mind, for each position: exact cells of u."""
    cells = []
    for i in range(G):
        p_x, q_x = p[draft[:i]][draft[i]].item(), q[draft[:i]][draft[i]].item()
        cut = min(1.0, p_x / q_x) if q_x > 0 else 1.0
        cells.append([(cut / 2, cut), ((1 + cut) / 2, 1 - cut)])  # (a u inside the cell, the cell's measure)
    return cells


def output_joint(rule, p, q) -> dict[tuple[int, ...], float]:
    """The exact joint law of the first G+1 emitted tokens, over all drafts and all accept patterns."""
    joint: dict[tuple[int, ...], float] = {}
    for draft in product(range(V), repeat=G):
        drawn = torch.stack([q[draft[:i]] for i in range(G)])
        weight = torch.prod(torch.stack([drawn[i, draft[i]] for i in range(G)])).item()
        if weight == 0:
            continue
        target = torch.stack([p[draft[:i]] for i in range(G + 1)])
        for pattern in product(*thresholds(p, q, draft)):
            chance = weight * pattern[0][1] * pattern[1][1]
            if chance == 0:
                continue
            u = torch.tensor([[cell[0] for cell in pattern]], dtype=torch.float64)
            proposal = Draft(torch.tensor([draft]), torch.tensor([G]), drawn[None])
            kept, law = rule(target[None], proposal, u)
            n, law = kept.item(), law[0] / law[0].sum()
            for token in range(V):
                complete(joint, (*draft[:n], token), chance * law[token].item(), p)
    return joint


def complete(joint, prefix, chance, p):
    """Extend an emitted prefix to G+1 tokens by the target's own law, which the next steps would draw from."""
    if len(prefix) == G + 1:
        joint[prefix] = joint.get(prefix, 0.0) + chance
    elif chance > 0:
        for token in range(V):
            complete(joint, (*prefix, token), chance * p[prefix][token].item(), p)


def total_variation(rule, seed: int) -> float:
    p, q = laws(seed)
    joint = output_joint(rule, p, q)
    exact: dict[tuple[int, ...], float] = {}
    complete(exact, (), 1.0, p)
    return 0.5 * sum(abs(joint.get(key, 0.0) - exact.get(key, 0.0)) for key in joint.keys() | exact.keys())


@pytest.mark.parametrize("seed", range(60))
def test_token_rule_keeps_the_target_law(seed):
    assert total_variation(rules.token, seed) < 1e-12


def resample_from_target(p, draft, u):
    """Wrong: after a refusal, sample p instead of the residual."""
    kept, _ = rules.token(p, draft, u)
    return kept, p[torch.arange(len(p)), kept]


def accept_without_draft_law(p, draft, u):
    """Wrong: tests a sampled token as if it had been certain."""
    return rules.token(p, Draft(draft.tokens, draft.lengths, None), u)


def any_position(p, draft, u):
    """Wrong: counts accepts that come after a refusal."""
    size = p.shape[-1]
    chosen = draft.tokens[:, :, None]
    p_x, q_x = p[:, :-1].gather(2, chosen)[..., 0], draft.probs.gather(2, chosen)[..., 0]
    kept = (u * q_x < p_x).sum(-1)
    q = torch.cat([draft.probs, torch.zeros(1, 1, size, dtype=p.dtype)], 1)
    rows = torch.arange(len(p))
    return kept, (p[rows, kept] - q[rows, kept]).clamp_min(0) + 1e-300


@pytest.mark.parametrize("wrong", [resample_from_target, accept_without_draft_law, any_position])
def test_known_wrong_variants_fail_the_same_proof(wrong):
    assert max(total_variation(wrong, seed) for seed in range(10)) > 1e-3


@pytest.mark.parametrize("seed", range(20))
def test_a_deterministic_draft_keeps_the_target_law(seed):
    p, q = laws(seed)
    one_hot = {k: torch.nn.functional.one_hot(law.argmax(), V).double() for k, law in q.items()}
    joint = output_joint(lambda p, d, u: rules.token(p, Draft(d.tokens, d.lengths, None), u), p, one_hot)
    exact: dict[tuple[int, ...], float] = {}
    complete(exact, (), 1.0, p)
    assert 0.5 * sum(abs(joint.get(k, 0.0) - exact[k]) for k in exact) < 1e-12


@pytest.mark.parametrize("length", [0, 1])
def test_what_was_not_drafted_is_neither_kept_nor_subtracted(length):
    p = torch.full((1, G + 1, V), 1 / V, dtype=torch.float64)
    draft = Draft(torch.zeros(1, G, dtype=torch.long), torch.tensor([length]), None)
    kept, law = rules.token(p, draft, torch.zeros(1, G, dtype=torch.float64))
    assert kept.item() == length
    torch.testing.assert_close(law, p[:, length])


def test_a_uniform_of_zero_does_not_accept_an_impossible_token():
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[[1.0, 0.0]]]))
    kept, law = rules.token(p, draft, torch.zeros(1, 1))
    assert kept.item() == 0
    assert law[0].tolist() == [0.0, 1.0]


def test_greedy_keeps_the_leading_matches():
    best = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    draft = Draft(torch.tensor([[5, 6, 7], [5, 0, 7], [5, 6, 7]]), torch.tensor([3, 3, 1]))
    kept, following = rules.greedy(best, draft)
    assert kept.tolist() == [3, 1, 1]
    assert following.tolist() == [8, 6, 6]
