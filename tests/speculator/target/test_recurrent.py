"""Recurrent layers: states roll back exactly, and nothing but the rows' own tokens moves them."""

from collections import Counter

import pytest
import torch
from conftest import (
    RECURRENT,
    VOCAB,
    Oracle,
    ScriptedLookup,
    alternating_drafter,
    tiny_block_head,
    tiny_head,
    tiny_model,
)
from enumeration import chi_square_p, joint_distribution

from speculator import (
    Candidates,
    Chain,
    DraftModelDrafter,
    EarlyExitDrafter,
    Engine,
    HeadDrafter,
    HybridDrafter,
    NgramDrafter,
    Sampling,
    Target,
    Tree,
    generate,
)

PROMPTS = [[(7 * i + 3 * n) % VOCAB for i in range(n)] for n in (5, 1, 11, 4, 23, 2, 37, 9)]
FEW = ["qwen3_5", *(pytest.param(family, marks=pytest.mark.soak) for family in ("lfm2", "falcon_h1", "jamba"))]
"""A delta rule; a convolution only, attention and state-space in one layer, Mamba 1."""


def written(model, count: int, prompts=PROMPTS) -> list[list[int]]:
    """Greedy completions by transformers."""
    rows = [torch.tensor([prompt]) for prompt in prompts]
    how = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    return [model.generate(row, attention_mask=torch.ones_like(row), **how)[0, row.shape[1] :].tolist() for row in rows]


class Mistaken(Oracle):
    """Drafts four tokens, of which the first n are right; n runs over 0..4, differently for each row."""

    num_speculative_tokens = nodes = 4

    def propose(self, pending, noise, texts):
        draft = super().propose(pending, noise, texts)
        rows = []
        for text in texts:
            _, prompt, number = self.known[id(text)]
            at = len(text) - prompt
            right = (self.continuations[number] + [0] * 8)[at : at + 4]
            wrong_from = (at + number) % 5
            rows.append([(token + (i >= wrong_from)) % VOCAB for i, token in enumerate(right)])
        draft.tokens, draft.lengths, draft.depth = torch.tensor(rows), torch.full_like(pending, 4), 4
        return draft


@pytest.mark.parametrize("family", RECURRENT)
def test_greedy_text_is_what_transformers_generates(family):
    """Ragged prompts in chunks, joining and leaving, and rejections at every position of a draft."""
    model = tiny_model(family)
    expected = written(model, 24)
    target = Target(model, tokenizer=None)
    for drafter in (None, NgramDrafter(3), Mistaken(expected), HeadDrafter(tiny_head(), Candidates((3, 2, 1)))):
        engine = Engine(target, drafter, slots=3, chunk=8)
        assert engine.generate(PROMPTS, max_new_tokens=24).tokens == expected


def drafters(target: Target) -> dict:
    lookup = ScriptedLookup(2, lambda row: [(row[-1] + k) % VOCAB for k in range(3, 9, 3)])
    block = tiny_block_head(target)
    return {
        "draft model": DraftModelDrafter(Target(tiny_model(), None), target, 3),
        "tree": HeadDrafter(tiny_head(), Tree((4, 3, 2), nodes=8)),
        "attention": HeadDrafter(tiny_head(architecture="eagle3"), Candidates((3, 2, 1))),
        "block": HeadDrafter(block, Tree((4, 3, 2), nodes=8)),
        "hybrid": HybridDrafter(HeadDrafter(block), lookup),
        "adaptive": alternating_drafter(tiny_head()),
        "early exit": EarlyExitDrafter(target, 1, Chain(3)),
    }


@pytest.mark.parametrize("family", FEW)
def test_every_drafter_leaves_greedy_text_as_it_is(family):
    model = tiny_model(family)
    expected, target = written(model, 16), Target(model, tokenizer=None)
    for name, drafter in drafters(target).items():
        made = generate(target, drafter, PROMPTS, max_new_tokens=16, max_batch_size=3)
        assert made.tokens == expected, name


@pytest.mark.parametrize("name", ["chain", "tree"])
@pytest.mark.parametrize("family", FEW)
def test_sampled_text_follows_the_enumerated_distribution(family, name):
    assert (
        sampled_p_value(family, HeadDrafter(tiny_head(), {"chain": Chain(2), "tree": Candidates((3, 2))}[name])) > 1e-4
    )


def sampled_p_value(family: str, drafter, rows: int = 2000) -> float:
    """Test the joint distribution of two tokens after the first, for prompts that follow a drafted token or two."""
    model, sampling = tiny_model(family, scale=2.0), Sampling(1.0, seed=3)
    expected: Counter = Counter()
    for tokens, probability in joint_distribution(model, PROMPTS[0], 3, sampling).items():
        expected[tokens[1:]] += probability
    made = generate(Target(model, None), drafter, [PROMPTS[0]] * rows, sampling, max_new_tokens=3)
    return chi_square_p(Counter(tuple(row[1:]) for row in made.tokens), expected, rows)
