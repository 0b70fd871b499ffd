"""Lookup finds the longest match wherever it may look, forgets what it must, and leaves the text as it was."""

import random

import pytest
from conftest import tiny_model

from speculator import Engine, NgramDrafter, Sampling, Target, generate

PROMPTS = [[1, 2, 3, 4, 5], [7, 7, 2], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1]]


def found(drafter: NgramDrafter, *texts: list[int]) -> list[tuple[int, list[int]]]:
    return drafter.look(texts)


# ---- a row's own text


def test_the_longest_match_counts_and_of_equal_ones_the_last():
    drafter = NgramDrafter(2, max_ngram=3)
    assert found(drafter, [1, 2, 3, 8, 8, 3, 9, 9, 1, 2, 3]) == [(3, [8, 8])]
    assert found(drafter, [5, 1, 8, 8, 6, 1, 9, 9, 1]) == [(1, [9, 9])]
    assert found(drafter, [1, 2, 3], [4, 4]) == [(0, []), (1, [4])]


def test_a_text_is_looked_up_in_itself_alone_unless_told_otherwise():
    drafter = NgramDrafter()
    assert found(drafter, [1, 2, 3, 4, 5], [1, 2, 3]) == [(0, []), (0, [])]


@pytest.mark.parametrize("memory", [0, 60])
def test_a_match_is_the_same_before_and_after_its_tokens_are_indexed(memory):
    draw = random.Random(0)
    texts = [[draw.randrange(3) for _ in range(length)] for length in (1, 5, 30)]
    drafters = [NgramDrafter(3, memory=memory) for _ in range(3)]
    for step in range(100):
        always, never, sometimes = (each.look(texts) for each in drafters)
        assert always == never == sometimes
        if not memory:
            assert [size for size, _ in always] == [longest_match(text) for text in texts]
        drafters[0].prepare()
        if step % 3 == 0:
            drafters[2].prepare()
        for text in texts:
            text += [draw.randrange(3) for _ in range(draw.randrange(1, 5))]


def longest_match(text: list[int]) -> int:
    """Tokens before the newest place where the longest suffix of at most three tokens occurred: as many as match."""
    for size in range(min(3, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return next((n for n in range(end) if text[end - 1 - n] != text[-1 - n]), end)
    return 0


# ---- other texts


def test_other_rows_are_looked_up_as_they_grow():
    drafter = NgramDrafter(3, memory=100)
    one, other = [1, 2, 3, 4, 5], [7, 2, 3, 4]
    assert found(drafter, one, other) == [(0, []), (1, [5])], "three tokens elsewhere count as one here"
    one += [6, 8, 9]
    assert found(drafter, one, other) == [(0, []), (1, [5, 6, 8])]
    assert found(drafter, other) == [(1, [5, 6, 8])], "it has ended, and is known"


def test_texts_that_grow_take_no_room_of_those_that_have_ended():
    drafter, growing = NgramDrafter(3, memory=10), [[row] * 8 for row in range(10, 14)]
    found(drafter, [7, 1, 2, 3, 4, 5, 6], *growing)
    assert found(drafter, *growing, [9, 1, 2, 3])[-1] == (1, [4, 5, 6])


def test_the_longest_match_wins_and_the_own_text_of_equal_ones():
    drafter = NgramDrafter(1, memory=100)
    own = [1, 2, 3, 10, 0, 1, 2, 3]
    assert found(drafter, own, [5, 1, 2, 3, 20]) == [(3, [10]), (0, [])], "as long in another text, which counts less"
    ends = [7, 8, 4, 5, 1, 2, 3]
    for longer, size, copied in ((2, 3, 10), (3, 4, 20)):
        here, there = [0, 1, 2, 3, 10, *ends], [*ends[-3 - longer :], 20]
        assert found(drafter, here, there)[0] == (size, [copied]), "longer by more than two tokens"


def test_an_engine_remembers_what_it_decoded_until_it_is_told_to_forget():
    target = Target(tiny_model().double(), tokenizer=None)
    drafter = NgramDrafter(4, memory=1000)

    def per_step(engine) -> float:
        return engine.generate([PROMPTS[0]], max_new_tokens=41).acceptance_length

    engine = Engine(target, drafter, slots=1)
    first, again = per_step(engine), per_step(engine)
    assert again > 4.5 > first
    assert per_step(Engine(target, drafter, slots=1)) == first, "another engine has a memory of its own"
    assert not drafter.history._known


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_text_does_not_depend_on_what_else_is_looked_up(temperature):
    """Drafts from other requests are accepted, and every text is what plain decoding draws alone."""
    target = Target(tiny_model().double(), tokenizer=None)
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    settings = [Sampling(temperature, top_k=3, seed=100 + i) for i in range(len(prompts))]
    plain = [
        generate(target, None, [prompt], [own], max_new_tokens=40)
        for prompt, own in zip(prompts, settings, strict=True)
    ]
    alone = generate(target, NgramDrafter(), prompts, settings, max_new_tokens=40)
    for rows in (12, 3):
        drafter = NgramDrafter(memory=10_000)
        made = generate(target, drafter, prompts, settings, max_new_tokens=40, max_batch_size=rows)
        assert made.tokens == [each.tokens[0] for each in plain]
        assert made.acceptance_length > alone.acceptance_length
