"""A head that drafts another shape from one step to the next."""

import random

import pytest
import torch
from conftest import tiny_block_head, tiny_head, tiny_model

from speculator import Chain, Engine, FixedTree, HeadDrafter, Target, generate

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
SHAPES = [Chain(1), Chain(3), FixedTree([[0], [1], [0, 0], [0, 1], [0, 0, 0]])]


@pytest.mark.parametrize("architecture", ["mlp", "eagle3", "dspark"])
def test_texts_and_drafts_are_as_if_it_had_always_drafted_so(architecture):
    target = Target(tiny_model().double(), tokenizer=None)
    head = tiny_block_head(target) if architecture == "dspark" else tiny_head(3, architecture).double()
    shapes = [*SHAPES, *([Chain(6)] if architecture == "eagle3" else [])]
    expected = generate(target, None, PROMPTS, max_new_tokens=60).tokens
    draw = random.Random(0)
    engine = Engine(target, HeadDrafter(head, SHAPES[0]), slots=2)
    requests = [engine.submit(prompt, max_new_tokens=60) for prompt in PROMPTS]
    compared = 0
    while engine.busy:
        engine.rows.reshape(draw.choice(shapes))
        decoding = engine.rows._batch.requests if engine.rows._batch else ()
        before = [list(request.sequence) for request in decoding if not request.finish_reason]
        drafts = following(engine)
        engine.step()
        if drafts and len(before) == len(drafts[0].tokens) == 2 and compared < 8:
            anew = Engine(target, HeadDrafter(head, engine.drafter.shape), slots=2)
            for text in before:
                anew.submit(text[:-1], max_new_tokens=10)
            anew.admit()
            anew.prefill()
            again = following(anew)
            anew.step()
            assert torch.equal(again[0].tokens, drafts[0].tokens)
            compared += 1
    assert compared == 8
    assert [request.tokens for request in requests] == expected


def following(engine: Engine) -> list:
    """Where the engine's next draft will lie."""
    drafts = []
    if hasattr(engine, "cache"):
        propose = type(engine.drafter).propose

        def noting(*given):
            drafts.append(propose(engine.drafter, *given))
            del engine.drafter.propose
            return drafts[-1]

        engine.drafter.propose = noting
    return drafts


def test_alternating_shapes_do_not_grow_the_cache():
    """A wider draft needs more positions after a sequence, once."""
    target = Target(tiny_model(), tokenizer=None)
    engine, shapes = Engine(target, HeadDrafter(tiny_head(), Chain(1)), slots=1), [Chain(1), Chain(3)]
    capacities = []
    engine.submit([1, 2, 3], max_new_tokens=60)
    for step in range(20):
        engine.step()
        engine.rows.reshape(shapes[step % 2])
        capacities.append(engine.cache.capacity)
    assert len(set(capacities[4:])) == 1
