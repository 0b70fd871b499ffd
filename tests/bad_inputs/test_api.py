"""Calls from Python raise a UserError of one line."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from speculator import HeadDrafter, NgramDrafter, Sampling, Target, UserError, generate, load_head


@pytest.fixture(scope="module")
def target(inputs) -> Target:
    return Target.load(str(inputs["TARGET"]))


def raises_one_line(call, *arguments, **named) -> None:
    with pytest.raises(UserError) as raised:
        call(*arguments, **named)
    assert str(raised.value)
    assert "\n" not in str(raised.value)


PROMPTS = [[], [[1, 2], []], [[1] * 200], [[1, 300]], [[1.5]], "hello", [1, 2]]


@pytest.mark.parametrize("prompts", PROMPTS, ids=lambda prompts: str(prompts)[:20])
def test_prompts_that_are_not_token_ids_are_refused(prompts, target):
    raises_one_line(generate, target, None, prompts, max_new_tokens=4)


SETTINGS = [
    {"max_new_tokens": 0},
    {"rule": "nonsense"},
    {"rule": "multi_candidate"},
    {"eos_token_ids": ["</s>"]},
    {"sampling": [Sampling(), Sampling()]},
    {"sampling": [{"temperature": 0.8}]},
    {"logprobs": -1},
    {"min_tokens": "5"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings)[:20])
def test_settings_that_do_not_fit_are_refused(settings, target, inputs):
    drafter = HeadDrafter(load_head(inputs["MLP"], target))
    raises_one_line(generate, target, drafter, [[1, 2, 3]], **{"max_new_tokens": 4, **settings})


def test_pythons_and_numpys_numbers_and_paths_are_taken(target, inputs):
    """What a notebook has at hand."""
    sampling = Sampling(np.float32(0.5), top_k=np.int64(5), seed=np.int64(3))
    assert sampling == Sampling(0.5, top_k=5, seed=3)
    drafter = HeadDrafter(load_head(inputs["MLP"], target), np.int64(2))
    made = generate(target, drafter, [[1, 2, 3]], sampling, max_new_tokens=np.int64(6), logprobs=np.int64(2))
    assert made.tokens == generate(target, None, [[1, 2, 3]], sampling, max_new_tokens=6, eos_token_ids=[]).tokens
    assert [len(each.top) for each in made.token_logprobs[0]] == [2] * len(made.tokens[0])
    assert Target.load(Path(inputs["TARGET"])).vocab_size == target.vocab_size
    with pytest.raises(UserError, match="max_ngram must be an integer >= 1"):
        NgramDrafter(max_ngram=0)


SAMPLINGS = [{"temperature": -1}, {"temperature": 10**400}, {"temperature": math.nan}, {"top_p": 0}]


@pytest.mark.parametrize("values", SAMPLINGS, ids=str)
def test_sampling_values_out_of_range_are_refused(values):
    raises_one_line(Sampling, **values)


@pytest.mark.parametrize("length", [0, 4])
def test_a_head_drafts_at_most_what_it_was_trained_for(length, target, inputs):
    raises_one_line(HeadDrafter, load_head(inputs["MLP"], target), length)


@pytest.mark.parametrize("name", ["nowhere", "TARGET", "TEXT"])
def test_a_folder_without_a_head_is_refused(name, target, inputs, workdir):
    raises_one_line(load_head, inputs.get(name, name), target)


@pytest.mark.parametrize("name", ["./nowhere", "org/nowhere", "MLP", "TEXT"])
def test_a_folder_without_a_target_is_refused(name, inputs, workdir):
    raises_one_line(Target.load, str(inputs.get(name, name)))
