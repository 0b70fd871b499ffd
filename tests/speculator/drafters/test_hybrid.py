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
    Sampling,
    Target,
    Tree,
    generate,
)
from speculator.decoding.draft import Draft
from speculator.drafters.hybrid import joined

EXACT = 1e-12
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1]]


def worlds(depth: int, seeds, size: int = 3):
    return [(seed, e.world(seed, size, depth, e.KINDS[seed % len(e.KINDS)])) for seed in seeds]


# ---- the rule, by enumeration


@pytest.mark.parametrize("length", [1, 2])
def test_a_deterministic_hybrid_draft_keeps_the_target_distribution(length):
    for seed, w in worlds(4, range(30)):
        (case,) = e.deterministic(w, (-1, -1, 0))
        found = tuple(random.Random(seed).randrange(3) for _ in range(2 + length))
        draft = Draft(
            tokens=torch.tensor([case.tokens]),
            lengths=torch.tensor([3]),
            probs=None,
            parents=torch.tensor([case.parents]),
            depth=2,
            width=2,
        )
        draft = joined(draft, torch.tensor([found]), torch.tensor([len(found)]), length)
        tokens, parents = (tuple(row[0].tolist()) for row in (draft.tokens, draft.parents))
        case = e.Case(tokens, parents, None, 1.0, draft.lengths.item())
        assert e.outcome(e.sampled_match, w, [case], e.match_breaks).total_variation < EXACT


# ---- what is joined


def test_a_lookup_path_joins_the_draft_where_it_leaves_it():
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
    tree = Draft(
        tokens=torch.tensor([[4, 5, 6, 7]]),
        lengths=torch.tensor([4]),
        probs=None,
        parents=torch.tensor([[-1, -1, 1, 1]]),
        depth=2,
        width=2,
    )
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
        "fixed-tree": HeadDrafter(attention, tree),
        "model": model,
    }
    lookup = ScriptedLookup(2, lambda row: [(row[-1] + k) % 32 for k in range(7, 99, 7)])
    return {name: HybridDrafter(drafter, lookup) for name, drafter in inner.items()}


def test_a_hybrid_draft_accepts_what_either_source_would():
    """A source that is always right beside one that never is, either way round; then two that are right."""
    target = Target(tiny_model().double(), tokenizer=None)
    plain = generate(target, None, PROMPTS, max_new_tokens=41)
    right = DraftModelDrafter(Target(tiny_model().double(), None), target, 2)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain.tokens, strict=True)]

    def known(row: list[int]) -> list[int]:
        return next(text[len(row) :] for text in texts if text[: len(row)] == row)

    def per_step(drafter) -> float:
        made = generate(target, drafter, PROMPTS, max_new_tokens=41)
        assert made.tokens == plain.tokens
        return made.acceptance_length

    lookup, wrong = ScriptedLookup(2, known), ScriptedLookup(2, lambda row: [])
    assert per_step(HybridDrafter(right, wrong)) == per_step(right) == 3
    assert per_step(HybridDrafter(HeadDrafter(tiny_head().double(), 2), lookup)) >= per_step(lookup) > 2
    assert per_step(HybridDrafter(right, lookup)) > 4


@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "fixed-tree",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("tree", "model")),
    ],
)
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
