"""Whatever decodes, a sampled chain is coupled with the target's own samples unless another rule is asked for."""

import pytest
import torch
from conftest import measured, tiny_head

from data.writers.engine import EngineWriter
from data.writing import Writing
from eval.suites import Suite
from eval.validation import real_acceptance
from speculator import Engine, HeadDrafter, Sampling, generate, speculative
from speculator.prompts import Conversation

PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8]]
SUITE = Suite("test text", PROMPTS)


def by_generate(target, folder):
    generate(target, HeadDrafter(tiny_head()), PROMPTS, Sampling(1.0), max_new_tokens=8)


def by_evaluation_while_training(target, folder):
    real_acceptance(target, tiny_head(), SUITE, seed=0, max_new_tokens=8)


def by_generating_own_text(target, folder):
    prompts = list(map(Conversation, PROMPTS))
    EngineWriter(target, HeadDrafter(tiny_head())).write(prompts, folder, Writing(max_new_tokens=8))


def by_custom_generate(target, folder):
    ids = torch.tensor(PROMPTS)
    target.model.generate(
        ids, do_sample=True, max_new_tokens=8, pad_token_id=0, custom_generate=speculative(tiny_head())
    )


def by_a_report(target, folder):
    settings = {"temperatures": [1.0], "max_new_tokens": 8, "speculator_name": "test"}
    rows = measured(target, tiny_head(), [SUITE], folder, **settings)["suites"]
    assert [row["rule"] for row in rows if row["drafter"] == "head"] == ["match"]


WAYS = (by_generate, by_evaluation_while_training, by_generating_own_text, by_custom_generate, by_a_report)


@pytest.mark.parametrize("way", WAYS)
def test_a_sampled_chain_is_accepted_by_match(way, target, tmp_path, monkeypatch):
    coupled = []
    verify = Engine.verify

    def noting(engine, batch, draft, noise):
        if draft.tokens.shape[1] and not noise.sampling.greedy:
            coupled.append(noise.coupled)
        return verify(engine, batch, draft, noise)

    monkeypatch.setattr(Engine, "verify", noting)
    way(target, tmp_path / "out")
    assert coupled
    assert all(coupled)
