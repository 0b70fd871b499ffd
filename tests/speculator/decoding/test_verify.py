"""The accept rules, proved by enumeration in float64; the known-wrong variants must fail the same proof."""

from dataclasses import replace

import enumeration as e
import pytest
import torch

from speculator.decoding import verify as rules
from speculator.decoding.draft import Draft
from speculator.decoding.sampling import draw

EXACT = 1e-12
SEEDS = range(15)  # three worlds of each kind
PAIR_THEN_ONE = (-1, -1, 0, 1)  # two children of the root, one child of each
TREES = [(-1, -1), (-1, -1, -1), PAIR_THEN_ONE, (-1, -1, 0, 0, 1)]


def kind(seed: int) -> str:
    return e.KINDS[seed % len(e.KINDS)]


CHAINS = [(size, depth) for size in (3, 4, 5, 6) for depth in (1, 2, 3) if size**depth <= 64]


SAMPLED = [name for name in rules.CHAIN_RULES if name != rules.MATCH]


@pytest.mark.parametrize(("size", "depth"), CHAINS)
@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_chain_keeps_the_target_distribution(name, size, depth):
    for seed in SEEDS:
        w = e.world(seed, size, depth, kind(seed))
        cases = list(e.sampled(w, e.CHAINS[depth]))
        assert e.outcome(e.RULES[name], w, cases, e.BREAKS[name]).total_variation < EXACT


@pytest.mark.parametrize(("size", "depth"), CHAINS)
@pytest.mark.parametrize("name", rules.CHAIN_RULES)
def test_a_deterministic_chain_keeps_the_target_distribution(name, size, depth):
    for seed in SEEDS:
        w = e.world(seed, size, depth, kind(seed))
        cases = list(e.deterministic(w, e.CHAINS[depth]))
        assert e.outcome(e.RULES[name], w, cases, e.BREAKS[name]).total_variation < EXACT


@pytest.mark.parametrize("parents", [*TREES, (-1, -1, -1, 0, 0, 1, 3)])
def test_a_deterministic_tree_keeps_the_target_distribution(parents):
    for size in (3, 5):
        for seed in SEEDS:
            w = e.world(seed, size, 3, kind(seed))
            assert (
                e.outcome(e.sampled_match, w, list(e.deterministic(w, parents)), e.match_breaks).total_variation < EXACT
            )


@pytest.mark.parametrize("parents", [*TREES, e.CHAINS[2]])
def test_sampled_candidates_keep_the_target_distribution(parents):
    for size, seeds in ((3, SEEDS), (4, range(5))):
        for seed in seeds:
            w = e.world(seed, size, 2, kind(seed))
            cases = list(e.sampled(w, parents))
            assert e.outcome(rules.multi_candidate, w, cases, e.recursive_breaks).total_variation < EXACT


def test_a_sampled_tree_of_seven_nodes_keeps_the_target_distribution():
    w = e.world(1, 3, 2, "plain")
    cases = list(e.sampled(w, (-1, -1, 0, 0, 1, 1)))
    assert e.outcome(rules.multi_candidate, w, cases, e.recursive_breaks).total_variation < EXACT


def test_a_draft_cut_by_its_confidence_keeps_the_target_distribution():
    """Whether to go on may depend on what was drawn, as long as what was drawn stays."""
    for seed in SEEDS:
        w = e.world(seed, 3, 3, kind(seed))
        cases = [replace(case, length=_cut(case)) for case in e.sampled(w, e.CHAINS[3])]
        for name in SAMPLED:
            assert e.outcome(e.RULES[name], w, cases, e.BREAKS[name]).total_variation < EXACT


def _cut(case: e.Case, least: float = 0.4) -> int:
    """Behind the first token that its distribution gave less than `least`."""
    for i, token in enumerate(case.tokens):
        if case.distributions[i][token] < least:
            return i + 1
    return len(case.tokens)


def test_expected_acceptance_equals_the_formula_and_block_accepts_at_least_as_much():
    """Token: its acceptances' products summed. Block at least that."""
    block_gain = 0.0
    for seed in range(30):
        w = e.world(seed, 3, 3, kind(seed))
        chains = list(e.sampled(w, e.CHAINS[3]))
        by_token = e.outcome(rules.rejection, w, chains, e.token_breaks).kept
        by_block = e.outcome(rules.block, w, chains, e.block_breaks).kept
        assert by_token == pytest.approx(_expected_kept(w), abs=1e-12)
        assert by_block >= by_token - 1e-12
        block_gain += by_block - by_token
    assert block_gain > 0.1


def _expected_kept(w: e.World, prefix: tuple[int, ...] = ()) -> float:
    """sum_x min(p, q)(x) (1 + what is kept after x)."""
    if len(prefix) == w.depth:
        return 0.0
    both = torch.minimum(w.p[prefix], w.q[prefix]).tolist()
    return sum(share * (1 + _expected_kept(w, (*prefix, x))) for x, share in enumerate(both) if share > 0)


def test_match_accepts_the_whole_probability_of_its_candidates():
    w = e.world(0, 5, 1, "plain")
    (case,) = e.deterministic(w, (-1, -1, -1))
    assert e.outcome(e.sampled_match, w, [case], e.match_breaks).kept == pytest.approx(
        w.p[()][list(case.tokens)].sum().item()
    )


# ---- known-wrong variants: each must fail the proof above


def resample_from_target(p, draft, u):
    """After a refusal, samples p instead of the residual."""
    last, _ = rules.rejection(p, draft, u)
    return last, p[torch.arange(len(p)), last]


def forget_the_draft_distribution(p, draft, u):
    """Tests a sampled token as if it had been certain."""
    return rules.rejection(p, replace(draft, probs=None), u)


def accept_too_seldom(p, draft, u):
    """Accepts with 0.7 p / q, and samples the residual of p / q."""
    return rules.rejection(p, draft, u / 0.7)


def any_position(p, draft, u):
    """Counts accepts that come after a refusal."""
    chosen = draft.tokens[:, :, None]
    p_x, q_x = p[:, :-1].gather(2, chosen)[..., 0], draft.probs.gather(2, chosen)[..., 0]
    last = (u * q_x < p_x).sum(-1)
    q = torch.nn.functional.pad(draft.probs, (0, 0, 0, 1))
    rows = torch.arange(len(p))
    return last, (p[rows, last] - q[rows, last]).clamp_min(0) + 1e-300


def misstated_temperature(p, draft, u):
    """Drawn at one temperature, tested as if at another."""
    colder = draft.probs**2
    return rules.rejection(p, replace(draft, probs=colder / colder.sum(-1, keepdim=True)), u)


def block_to_first_failure(p, draft, u):
    """Block verification's tests, stopped at the first that fails, with block's residual."""
    _, passes = _block_parts(p, draft, u)
    last = passes.long().cumprod(-1).sum(-1)
    return last, _block_distribution(p, draft, last)


def block_with_ordinary_residual(p, draft, u):
    """Block verification's accepts with the token rule's residual: wrong by less than sampling would ever show."""
    last, _ = rules.block(p, draft, u)
    q = torch.nn.functional.pad(draft.probs, (0, 0, 0, 1))
    rows = torch.arange(len(p))
    left = (p[rows, last] - q[rows, last]).clamp_min(0)
    return last, torch.where(left.sum(-1, keepdim=True) > 1e-30, left, p[rows, last])


def _block_parts(p, draft, u):
    drawn = draft.probs.gather(2, draft.tokens[:, :, None])[..., 0]
    ratio = p[:, :-1].gather(2, draft.tokens[:, :, None])[..., 0] / drawn
    weights = [torch.ones(len(p), dtype=p.dtype)]
    for i in range(ratio.shape[1]):
        weights.append((weights[-1] * ratio[:, i]).clamp_max(1))
    weight = torch.stack(weights, 1)
    surplus = (weight[:, 1:-1, None] * p[:, 1:-1] - draft.probs[:, 1:]).clamp_min(0).sum(-1)
    rest = surplus + 1 - weight[:, 1:-1]
    h = torch.where(rest > 0, surplus / rest.clamp_min(1e-30), 1.0)
    return weight, u < torch.cat([h, weight[:, -1:]], 1)


def _block_distribution(p, draft, last):
    weight, _ = _block_parts(p, draft, torch.zeros_like(draft.tokens, dtype=p.dtype))
    q = torch.nn.functional.pad(draft.probs, (0, 0, 0, 1))
    rows = torch.arange(len(p))
    left = (weight[rows, last][:, None] * p[rows, last] - q[rows, last]).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > 1e-30, left, p[rows, last])


@pytest.mark.parametrize(
    ("wrong", "breaks", "least"),
    [
        (resample_from_target, e.token_breaks, 1e-2),
        (forget_the_draft_distribution, e.token_breaks, 1e-2),
        (accept_too_seldom, e.token_breaks, 1e-2),
        (any_position, e.token_breaks, 1e-2),
        (misstated_temperature, e.token_breaks, 1e-2),
        (block_to_first_failure, e.block_breaks, 1e-3),
        (block_with_ordinary_residual, e.block_breaks, 1e-4),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_rule_for_chains_fails(wrong, breaks, least):
    def gap(seed):
        w = e.world(seed, 3, 3, "plain")
        return e.outcome(wrong, w, list(e.sampled(w, e.CHAINS[3])), breaks).total_variation

    assert max(gap(seed) for seed in range(5)) > least


def match_and_draw_again(p, draft, u):
    """Draws the token behind the path from p, though all that leads there was not drawn."""
    last, _ = e.sampled_match(p, draft, u)
    return last, p[torch.arange(len(p)), last]


def match_by_one_uniform(p, draft, u):
    """Decides every place by the first one's uniform."""
    return e.sampled_match(p, draft, u[:, :1].expand_as(u))


@pytest.mark.parametrize("wrong", [match_and_draw_again, match_by_one_uniform])
def test_a_wrong_match_changes_the_output_distribution(wrong):
    for parents in (e.CHAINS[2], PAIR_THEN_ONE):
        worlds = [e.world(seed, 3, 2, "plain") for seed in range(5)]
        gaps = [e.outcome(wrong, w, list(e.deterministic(w, parents)), e.match_breaks).total_variation for w in worlds]
        assert max(gaps) > 1e-2


def test_a_greedy_draft_tested_against_its_softmax_fails():
    """The token is the likeliest of q, and q is claimed: HF issue 32867, and MCSD at draft temperature 0."""

    def claim(w, parents):
        return [
            replace(c, distributions=[w.q[c.path(parent)] for parent in parents]) for c in e.deterministic(w, parents)
        ]

    for parents, rule, breaks in (
        (e.CHAINS[2], rules.rejection, e.token_breaks),
        ((-1, -1), rules.multi_candidate, e.recursive_breaks),
    ):
        worlds = [e.world(seed, 3, 2, "plain") for seed in range(5)]
        assert max(e.outcome(rule, w, claim(w, parents), breaks).total_variation for w in worlds) > 0.05


def test_the_same_uniform_for_every_test_fails():
    """A decoder that reseeds before each draw."""
    w = e.world(0, 3, 2, "plain")
    assert (
        e.outcome(rules.rejection, w, list(e.sampled(w, e.CHAINS[2])), e.token_breaks, shared=True).total_variation
        > 1e-2
    )


def test_a_sampled_token_that_is_dropped_for_its_value_fails():
    """Dropping the token that fell below the confidence, instead of keeping it as the last."""
    worlds = [e.world(seed, 3, 2, "plain") for seed in range(5)]

    def gap(w):
        cases = []
        for case in e.sampled(w, e.CHAINS[2]):
            cut = _cut(case)
            low = case.distributions[cut - 1][case.tokens[cut - 1]] < 0.4
            cases.append(replace(case, length=cut - 1 if low else cut))
        return e.outcome(rules.rejection, w, cases, e.token_breaks).total_variation

    assert max(map(gap, worlds)) > 1e-2


def test_sampled_siblings_that_are_pruned_by_their_distribution_fail():
    """Of two sampled children the likelier is verified, as if it alone had been drawn."""

    def gap(w):
        chances: dict[int, float] = {}
        for case in e.sampled(w, (-1, -1)):
            best = max(case.tokens, key=lambda token: w.q[()][token].item())
            chances[best] = chances.get(best, 0.0) + case.chance
        cases = [e.Case((token,), (-1,), [w.q[()]], chance, 1) for token, chance in chances.items()]
        return e.outcome(rules.rejection, w, cases, e.token_breaks).total_variation

    assert max(gap(e.world(seed, 4, 1, "plain")) for seed in range(5)) > 1e-2


# ---- corners


@pytest.mark.parametrize("name", e.RULES)
def test_a_uniform_of_zero_does_not_keep_an_impossible_token(name):
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    probs = None if name == "match" else torch.tensor([[[1.0, 0.0]]])
    parents = torch.tensor([[-1]]) if name.startswith("multi") else None
    draft = Draft(tokens=torch.tensor([[0]]), lengths=torch.tensor([1]), probs=probs, parents=parents, depth=1)
    last, probs = e.RULES[name](p, draft, torch.zeros(1, 2))
    assert last.item() == 0
    assert (probs[0] / probs.sum()).tolist() == [0.0, 1.0]


def test_uniforms_of_zero_accept_only_tokens_that_the_target_can_emit():
    """u = 0 in every slot, over every draft of worlds with zeros."""
    for seed in SEEDS:
        w = e.world(seed, 3, 2, "zeros")
        for cases, rule in (
            *((e.sampled(w, e.CHAINS[2]), e.RULES[name]) for name in SAMPLED),
            (e.sampled(w, (-1, -1)), rules.multi_candidate),
            (e.deterministic(w, (-1, -1)), e.sampled_match),
        ):
            for case in cases:
                target = torch.stack([w.p[case.path(node)] for node in range(-1, len(case.tokens))])[None]
                distributions = None if case.distributions is None else torch.stack(case.distributions)[None]
                parents = None if case.parents == e.CHAINS[2] else torch.tensor([case.parents])
                draft = Draft(
                    tokens=torch.tensor([case.tokens]),
                    lengths=torch.tensor([2]),
                    probs=distributions,
                    parents=parents,
                    depth=1,
                    width=2,
                )
                last, probs = rule(target, draft, torch.zeros(1, 3, dtype=torch.float64))
                path = case.path(last.item() - 1)
                assert all(w.p[path[:i]][token] > 0 for i, token in enumerate(path))
                assert not (probs[0] > 0)[w.p[path] == 0].any()


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("length", [0, 1])
def test_padding_of_a_draft_is_neither_accepted_nor_subtracted(name, length):
    p = torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)
    draft = Draft(torch.zeros(1, 2, dtype=torch.long), torch.tensor([length]), None)
    last, probs = e.RULES[name](p, draft, torch.zeros(1, 2, dtype=torch.float64))
    assert last.item() == length
    torch.testing.assert_close(probs / probs.sum(), p[:, length])


def test_match_emits_the_tokens_of_plain_decoding_for_any_draft():
    """By the same uniforms, one for each place: the draft decides how many tokens come of it, and nothing else."""
    w, generator = e.world(3, 4, 3, "zeros"), torch.Generator().manual_seed(0)
    lengths = set()
    for parents in (e.CHAINS[3], (-1, -1, 0, 0, 1, 3)):
        for _ in range(100):
            tokens = tuple(torch.randint(4, (len(parents),), generator=generator).tolist())
            length = int(torch.randint(len(parents) + 1, (1,), generator=generator))
            case = e.Case(tokens, parents, None, 1.0, length)
            u = torch.rand(1, len(parents) + 1, generator=generator, dtype=torch.float64)
            plain: tuple[int, ...] = ()
            for depth in range(4):
                plain = (*plain, draw(w.p[plain][None], u[:, depth]).item())
            target = torch.stack([w.p[case.path(node)] for node in range(-1, len(tokens))])[None]
            form = None if parents == e.CHAINS[3] else torch.tensor([parents])
            draft = Draft(
                tokens=torch.tensor([tokens]),
                lengths=torch.tensor([length]),
                probs=None,
                parents=form,
                depth=3,
                width=2,
            )
            last, probs = e.sampled_match(target, draft, u)
            said = (*case.path(last.item() - 1), probs.argmax().item())
            assert said == plain[: len(said)]
            lengths.add(len(said))
    assert lengths >= {1, 2, 3}


def test_greedy_keeps_the_leading_matches_of_a_chain():
    best = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    draft = Draft(torch.tensor([[5, 6, 7], [5, 0, 7], [5, 6, 7]]), torch.tensor([3, 3, 1]))
    last, following = rules.match(best, draft)
    assert last.tolist() == [3, 1, 1]
    assert following.tolist() == [8, 6, 6]


def test_greedy_keeps_the_longest_matching_path_of_a_tree():
    # Root's children 4 and 5; 5's child 6; 6's child 7, in the second row not drafted.
    draft = Draft(
        tokens=torch.tensor([[4, 5, 6, 7]] * 2),
        lengths=torch.tensor([4, 3]),
        probs=None,
        parents=torch.tensor([[-1, -1, 1, 2]] * 2),
        depth=3,
    )
    best = torch.tensor([[5, 9, 6, 7, 8]] * 2)
    last, following = rules.match(best, draft)
    assert last.tolist() == [4, 3]
    assert following.tolist() == [8, 7]
    assert draft.path(last).tolist() == [[0, 2, 3, 4], [0, 2, 3, 0]]
