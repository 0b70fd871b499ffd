"""An attention head in the engine: whatever joins, leaves, is reused or comes in chunks, it drafts what its training
form says of the text so far."""

import pytest
import torch
from conftest import VOCAB, tiny_model

from speculator import Sampling, Target, Tree
from speculator.drafters.attention import AttentionDrafter
from speculator.engine import Engine
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig

STEPS = 4


class Recorded(AttentionDrafter):
    """Keeps the text before each draft, and the draft."""

    def propose(self, pending, sampling, u, texts):
        draft = super().propose(pending, sampling, u, texts)
        for row, text in enumerate(texts):
            self.log.append((list(text), draft.tokens[row].tolist()))
        return draft


@pytest.fixture
def target():
    return Target(tiny_model().double(), tokenizer=None)


@pytest.fixture
def head(target):
    torch.manual_seed(3)
    config = Eagle3SpeculatorConfig.for_target(target.config, n_predict=STEPS, taps=[0, 1])
    head = Eagle3Speculator(config).double()
    head.share_embedding(target.model.get_input_embeddings().weight)
    return head


def drafter_of(head, shape=None):
    drafter = Recorded(head, shape)
    drafter.log = []
    return drafter


def expected(target, head, text: list[int]) -> list[int]:
    """The greedy chain below a text's last token, by the training form."""
    with torch.no_grad():
        states = target._body(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
        taps, draft = torch.cat([states[k] for k in (0, 1)], -1), []
        for i in range(STEPS):
            tokens = torch.tensor([text[1:] + draft + [0] * (STEPS - 1 - len(draft))])
            features = head.unrolled(taps, tokens[:, : len(text) - 1 + STEPS - 1])
            draft.append(int(head.spread(head.lm_head(features[i][0, -1])).argmax()))
    return draft


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9], [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]


@pytest.mark.parametrize(("slots", "chunk"), [(1, 3), (2, 1), (2, 64), (5, 3)])
def test_drafts_are_the_training_forms_through_slots_chunks_and_prefixes(target, head, slots, chunk):
    plain = Engine(target, None, slots=slots).generate(PROMPTS, max_new_tokens=12)
    drafter = drafter_of(head)
    engine = Engine(target, drafter, slots=slots, chunk=chunk)
    limits = [12, 5, 9, 12, 7]
    first = engine.generate(PROMPTS, max_new_tokens=limits)
    assert first.tokens == [tokens[:n] for tokens, n in zip(plain.tokens, limits, strict=True)]
    # A second turn goes on from what the slots hold.
    turns = [prompt + said + [1, 2] for prompt, said in zip(PROMPTS, first.tokens, strict=True)]
    second = engine.generate(turns, max_new_tokens=8)
    assert second.tokens == Engine(target, None, slots=1).generate(turns, max_new_tokens=8).tokens
    assert len(drafter.log) > 20
    for text, draft in drafter.log:
        assert draft == expected(target, head, text)


def test_a_tree_and_sampled_text(target, head):
    drafter = drafter_of(head, Tree((2, 2, 1), nodes=6))
    plain = Engine(target, None, slots=3).generate(PROMPTS, max_new_tokens=12).tokens
    engine = Engine(target, drafter, slots=3)
    assert engine.generate(PROMPTS, max_new_tokens=12).tokens == plain
    sampled = Engine(target, drafter_of(head), slots=3).generate(PROMPTS, Sampling(temperature=1.0), max_new_tokens=12)
    assert [len(tokens) for tokens in sampled.tokens] == [12] * 5
    assert max(map(max, sampled.tokens)) < VOCAB
