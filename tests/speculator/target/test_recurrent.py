"""Recurrent layers: states roll back exactly, and nothing but the rows' own tokens moves them."""

import pytest
import torch
from conftest import RECURRENT, VOCAB, Oracle, tiny_model

from speculator import (
    Engine,
    NgramDrafter,
    Target,
)

PROMPTS = [[(7 * i + 3 * n) % VOCAB for i in range(n)] for n in (5, 1, 11, 4, 23, 2, 37, 9)]
ALL = {family: pytest.param(family, id=family) for family in RECURRENT}
FEW = ("qwen3_5", "lfm2", "falcon_h1", "jamba")
"""A delta rule, a convolution only, attention and state-space in one layer, and Mamba 1."""


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
    for drafter in (None, NgramDrafter(3), Mistaken(expected)):
        engine = Engine(target, drafter, slots=3, chunk=8)
        assert engine.generate(PROMPTS, max_new_tokens=24).tokens == expected
