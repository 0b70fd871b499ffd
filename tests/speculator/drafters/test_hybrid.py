"""A draft and a lookup's path in one tree keep the target's distribution, by enumeration; how they are joined."""

import random

import enumeration as e
import pytest
import torch
from conftest import ScriptedLookup, tiny_head, tiny_model

from speculator import (
    Candidates,
    Chain,
    DraftModelDrafter,
    FixedTree,
    HeadDrafter,
    HybridDrafter,
    Paths,
    Sampling,
    Target,
    Tree,
    generate,
)
from speculator.decoding import verify as rules
from speculator.decoding.draft import Draft
from speculator.drafters.hybrid import joined

EXACT = 1e-12
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1]]
TREES = ((-1, -1), (-1, -1, 0), (-1, -1, 1))
RULES = {
    "rejection": (e.token_breaks, e.chain_rests(block=False), ((-1,), e.CHAINS[2])),
    "block": (e.block_breaks, e.chain_rests(block=True), ((-1,), e.CHAINS[2])),
    "multi_candidate": (e.recursive_breaks(False), e.recursive_rests, TREES),
}


def cases_of(w: e.World, parents: tuple[int, ...], length: int, seed: int) -> list[e.Case]:
    """With a path at random, at times too short; from seed to seed the likeliest for the draft, or any."""
    draw, found = random.Random(seed), ()
    depth = 1 + max(e.Case(parents, parents, None, 1.0, 0).level(node) for node in range(len(parents)))
    for _ in range(depth + length):
        likeliest = w.q[found].argmax().item()
        found = (*found, likeliest if draw.random() < 0.6 else draw.randrange(w.size))
    return list(e.mixed(w, parents, found[: draw.choice([len(found), len(found), 1, 0])], length))


def worlds(depth: int, seeds, size: int = 3):
    return [(seed, e.world(seed, size, depth, e.KINDS[seed % len(e.KINDS)])) for seed in seeds]


# ---- the rule, by enumeration


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_a_mixed_draft_keeps_the_target_distribution(name, length):
    find, rests, shapes = RULES[name]
    both = 0
    for parents in shapes if length == 1 else shapes[:1]:
        for seed, w in worlds(4, range(15)):
            cases = cases_of(w, parents, length, seed)
            both += any(len({i < case.own for i in case.children(-1)}) == 2 for case in cases)
            made = e.outcome(rules.RULES[name], w, cases, e.then_match_breaks(find, rests))
            assert made.total_variation < EXACT
    assert both > 2, "siblings of both sources"


@pytest.mark.parametrize("length", [1, 2])
def test_a_deterministic_mixed_draft_keeps_the_target_distribution(length):
    for seed, w in worlds(4, range(30)):
        (case,) = e.deterministic(w, (-1, -1, 0))
        found = tuple(random.Random(seed).randrange(3) for _ in range(2 + length))
        draft = Draft(torch.tensor([case.tokens]), torch.tensor([3]), None, torch.tensor([case.parents]), 2, 2)
        draft = joined(draft, torch.tensor([found]), torch.tensor([len(found)]), length)
        tokens, parents = (tuple(row[0].tolist()) for row in (draft.tokens, draft.parents))
        case = e.Case(tokens, parents, None, 1.0, draft.lengths.item())
        assert e.outcome(rules.match, w, [case], e.walk_breaks).total_variation < EXACT


def by_hand(p, draft, u, renormalise=True, order=None, reduce=True, stated=True):
    """Recursive rejection over siblings of two sources in plain words; what the flags turn off makes it right."""
    lasts, rests, own = [], [], draft.base.tokens.shape[1]
    for row in range(len(p)):
        at = 0
        while True:
            t, s = p[row, at].clone(), None
            children = [i for i in range(draft.lengths[row]) if draft.parents[row, i] + 1 == at]
            if order is not None:
                children.sort(key=lambda i: order(p[row, at], draft.tokens[row, i]))
            for child in children:
                x = draft.tokens[row, child]
                if child >= own and (stated or s is None):
                    s = torch.zeros_like(t).scatter(0, x, 1)
                elif child < own and (s is None or order):
                    s = draft.base.probs[row, child].clone()
                if s[x] <= 0:
                    continue
                if u[row, child] * s[x] < t[x]:
                    at = child + 1
                    break
                if reduce:
                    left = (t - s).clamp_min(0)
                    t = left / left.sum() if renormalise and left.sum() > 1e-30 else left
                s[x] = 0
                s = s / s.sum() if s.sum() > 0 else s
            else:
                break
        lasts.append(at)
        rests.append(t if t.sum() > 0 else p[row, at])
    return torch.tensor(lasts), torch.stack(rests)


def as_one_source(p, draft, u):
    """The lookup's token is tested as if the head had drawn it next."""
    return by_hand(p, draft, u, stated=False)


def not_renormalised(p, draft, u):
    """What is left of p after a refusal is not made a distribution again."""
    return by_hand(p, draft, u, renormalise=False)


def likeliest_first(p, draft, u):
    """Siblings in the order that the target likes: the verdict looks at p before the draws do."""
    return by_hand(p, draft, u, order=lambda p, token: -p[token].item())


def each_against_p(p, draft, u):
    """Every sibling is tested against p itself, as if none had been refused."""
    return by_hand(p, draft, u, reduce=False)


def gaps(rule, seeds=range(0, 60, 5)) -> list[float]:
    return [
        e.outcome(rule, w, cases_of(w, parents, 1, seed), e.recursive_breaks(False)).total_variation
        for parents in ((-1,), (-1, -1))
        for seed, w in worlds(2, seeds, size=4)
    ]


def test_the_rule_by_hand_is_the_rule():
    assert max(gaps(by_hand)) < EXACT


@pytest.mark.parametrize("wrong", [as_one_source, not_renormalised, likeliest_first, each_against_p])
def test_a_wrong_rule_for_mixed_drafts_fails(wrong):
    assert max(gaps(wrong)) > 1e-3


def drawn_from_p(p, draft, u):
    """Where the draft's own part ends, draws from p, as if nothing had been refused there."""
    last, _ = rules.rejection(p[:, :2], draft.base, u)
    return rules._match_from(last, p[torch.arange(len(p)), last], p, draft, u[:, 1:])


def walked_by_one_uniform(p, draft, u):
    """Draws all that is behind the own part by the same uniform."""
    last, probs = rules.rejection(p[:, :2], draft.base, u)
    return rules._match_from(last, probs, p, draft, u[:, 1:2].expand(-1, u.shape[1] - 1))


@pytest.mark.parametrize("wrong", [drawn_from_p, walked_by_one_uniform])
def test_a_wrong_walk_behind_the_own_part_fails(wrong):
    find = e.then_match_breaks(e.token_breaks, e.chain_rests(block=False))
    found = [
        e.outcome(wrong, w, cases_of(w, (-1,), 1, seed), find).total_variation for seed, w in worlds(2, range(0, 40, 5))
    ]
    assert max(found) > 1e-2


def test_a_drawn_token_that_is_dropped_where_the_lookup_says_otherwise_fails():
    """What stays of the draft has then been chosen by its value, and does not follow q any more."""

    def gap(w):
        found, cases = w.p[()].argmax().item(), []
        certain = torch.nn.functional.one_hot(torch.tensor(found), w.size).double()
        for token, chance in enumerate(w.q[()].tolist()):
            probs = w.q[()] if token == found else certain
            cases.append(e.Case((found,), (-1,), [probs], chance, 1))
        return e.outcome(rules.multi_candidate, w, cases, e.recursive_breaks(False)).total_variation

    assert max(gap(w) for _, w in worlds(1, range(0, 50, 5), size=4)) > 1e-2


def test_the_draft_first_and_then_the_lookup_accepts_all_that_the_pair_can():
    """p(c) + sum over the others of min(p, q), with c the lookup's token."""
    for seed, w in worlds(2, range(20), size=4):
        token = seed % 4
        cases, find = (
            list(e.mixed(w, (-1,), (token,), 1)),
            e.then_match_breaks(e.token_breaks, e.chain_rests(block=False)),
        )
        both = torch.minimum(w.p[()], w.q[()])
        expected = both.sum() - both[token] + w.p[()][token]
        kept = e.outcome(rules.RULES["rejection"], w, cases, find).kept
        assert kept == pytest.approx(expected.item(), abs=1e-12)


# ---- what is joined


def test_a_path_is_hung_on_where_it_leaves_the_draft():
    chain = Draft(torch.tensor([[4, 5, 6]] * 5), torch.tensor([3, 3, 3, 3, 1]))
    paths = torch.tensor([[4, 9, 8, 7, 7], [4, 5, 6, 1, 2], [9, 9, 9, 9, 9], [4, 5, 0, 0, 0], [4, 5, 6, 7, 8]])
    draft = joined(chain, paths, torch.tensor([5, 5, 0, 2, 5]), 2)
    wanted = [
        ([4, 5, 6, 9, 8], [-1, 0, 1, 0, 3]),  # beside the draft's second token
        ([4, 5, 6, 1, 2], [-1, 0, 1, 2, 3]),  # behind its end
        ([4, 5, 6], [-1, 0, 1]),  # nothing was found
        ([4, 5, 6], [-1, 0, 1]),  # nothing else was found
        ([4, 5, 6], [-1, 0, 1]),  # of which the draft has one and the path the others
    ]
    for row, (tokens, parents) in enumerate(wanted):
        assert draft.lengths[row] == len(tokens)
        assert draft.tokens[row, : len(tokens)].tolist() == tokens
        assert draft.parents[row, : len(tokens)].tolist() == parents
    assert draft.base is chain
    assert (draft.depth, draft.width) == (5, 2)


def test_a_path_is_followed_through_a_tree():
    tree = Draft(torch.tensor([[4, 5, 6, 7]]), torch.tensor([4]), None, torch.tensor([[-1, -1, 1, 1]]), 2, 2)
    for path, tokens, parent in (([5, 7, 1], [1], 3), ([5, 8, 1], [8], 1), ([4, 8, 1], [8], 0), ([9, 8, 1], [9], -1)):
        draft = joined(tree, torch.tensor([path]), torch.tensor([3]), 1)
        assert draft.tokens[0, 4:].tolist() == tokens
        assert draft.parents[0, 4] == parent


def drafters(target: Target) -> dict[str, HybridDrafter]:
    head, attention = (tiny_head(architecture=kind).to(target.dtype) for kind in ("mlp", "eagle3"))
    model = DraftModelDrafter(Target(tiny_model("qwen3").to(target.dtype), None), target, Candidates((2, 1)))
    tree = FixedTree([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)])
    inner = {
        "chain": HeadDrafter(head, Chain(2)),
        "tree": HeadDrafter(head, Tree((3, 2), 4)),
        "paths": HeadDrafter(head, Paths((3, 2), 2)),
        "cautious-chain": HeadDrafter(head, Chain(3, min_confidence=0.3)),
        "fixed-tree": HeadDrafter(attention, tree),
        "model": model,
    }
    lookup = ScriptedLookup(2, lambda row: [(row[-1] + k) % 32 for k in range(7, 99, 7)])
    return {name: HybridDrafter(drafter, lookup) for name, drafter in inner.items()}


def test_a_mixed_draft_accepts_what_either_source_would():
    """A source that is always right beside one that never is, either way round; then two that are right."""
    target = Target(tiny_model().double(), tokenizer=None)
    plain = generate(target, None, PROMPTS, max_new_tokens=41)
    right = DraftModelDrafter(Target(tiny_model().double(), None), target, 2)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain.tokens, strict=True)]

    def known(row: list[int]) -> list[int]:
        return next(text[len(row) :] for text in texts if text[: len(row)] == row)

    def per_step(drafter, own: int | None = None) -> float:
        """With `own` tokens of the draft always accepted: what is beyond comes from the path."""
        made = generate(target, drafter, PROMPTS, max_new_tokens=41)
        assert made.tokens == plain.tokens
        steps = [step for row in made.steps for step in row]
        assert own is None or all(step.copied == max(0, step.accepted - own) for step in steps)
        return made.acceptance_length

    lookup, wrong = ScriptedLookup(2, known), ScriptedLookup(2, lambda row: [])
    assert per_step(HybridDrafter(right, wrong), own=2) == per_step(right) == 3
    assert per_step(HybridDrafter(HeadDrafter(tiny_head().double(), 2), lookup)) >= per_step(lookup, own=41) > 2
    assert per_step(HybridDrafter(right, lookup), own=2) > 4


@pytest.mark.parametrize("name", ["chain", "tree", "paths", "cautious-chain", "fixed-tree", "model"])
def test_greedy_text_is_plain_decodings_and_a_row_is_what_it_is_alone(name):
    target = Target(tiny_model().double(), tokenizer=None)
    drafter, lonely = drafters(target)[name], []
    assert generate(target, drafter, PROMPTS, max_new_tokens=20).tokens == (
        generate(target, None, PROMPTS, max_new_tokens=20).tokens
    )
    settings = [Sampling(1.0, seed=11), Sampling(0.0), Sampling(0.8, top_k=5, seed=12)]
    for prompt, own in zip(PROMPTS, settings, strict=True):
        lonely += generate(target, drafter, [prompt], [own], max_new_tokens=20).tokens
    assert generate(target, drafter, PROMPTS, settings, max_new_tokens=20).tokens == lonely
