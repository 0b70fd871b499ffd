"""Calls from Python: a UserError of one line, whatever is passed."""

from __future__ import annotations

import math

import pytest
import torch
from bad_inputs.refusal import within

from speculator import HeadDrafter, Sampling, Target, UserError, generate, load_head


@pytest.fixture(scope="module")
def loaded(world) -> Target:
    return Target.load(str(world["TARGET"]))


def one_line(call, *arguments, **named) -> str:
    with within(), pytest.raises(UserError) as raised:
        call(*arguments, **named)
    message = str(raised.value)
    assert message
    assert "\n" not in message
    return message


PROMPTS = {
    "none": [],
    "an empty one": [[]],
    "an empty one among others": [[1, 2], []],
    "one too long": [[1] * 200],
    "a negative token": [[1, -2]],
    "a token too large": [[1, 300]],
    "a huge token": [[1, 10**12]],
    "a tensor of rows": torch.tensor([[1, 2], [3, 4]]).float(),
    "tensors of floats": [torch.tensor([1.0, 2.0])],
    "a float": [[1.5]],
    "a text": "hello",
    "texts": ["hello"],
    "a text within": [[1, "2"]],
    "null within": [[1, None]],
    "numbers": [1, 2, 3],
    "nested": [[[1, 2]]],
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_that_cannot_be(name, loaded, here):
    one_line(generate, loaded, None, PROMPTS[name], max_new_tokens=4)


SETTINGS = {
    "max_new_tokens 0": {"max_new_tokens": 0},
    "max_new_tokens negative": {"max_new_tokens": -5},
    "an unknown rule": {"rule": "nonsense"},
    "a rule that does not fit": {"rule": "match"},
    "an empty stop string": {"stop_strings": [""]},
    "a stop string that is none": {"stop_strings": [5]},
    "no stop strings": {"stop_strings": 5},
    "an EOS token that is none": {"eos_token_ids": ["</s>"]},
    "no EOS token but a number": {"eos_token_ids": 1.5},
    "settings for other rows": {"sampling": [Sampling(), Sampling()]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be(name, loaded, world, here):
    drafter = HeadDrafter(load_head(world["MLP"], loaded))
    one_line(generate, loaded, drafter, [[1, 2, 3]], **{"max_new_tokens": 4, **SETTINGS[name]})


SAMPLINGS = [
    {"temperature": -1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": 1e39},
    {"temperature": "hot"},
    {"seed": 2**70},
    {"top_k": 1.5},
    {"top_k": -1},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_p": math.nan},
    {"min_p": -0.1},
    {"min_p": 1.0},
    {"min_p": math.nan},
]


@pytest.mark.parametrize("values", SAMPLINGS, ids=str)
def test_samplings_that_cannot_be(values):
    one_line(Sampling, **values)


@pytest.mark.parametrize("length", [0, -1, 4, 10**12])
def test_draft_lengths_that_cannot_be(length, loaded, world, here):
    head = load_head(world["MLP"], loaded)
    one_line(HeadDrafter, head, length)


@pytest.mark.parametrize("name", ["", "nowhere", "a\0b", "TARGET", "TEXT"])
def test_heads_that_cannot_be(name, loaded, world, here):
    one_line(load_head, world.get(name, name), loaded)


@pytest.mark.parametrize("name", ["", "./nowhere", "org/nowhere", "a\0b", "MLP", "TEXT"])
def test_targets_that_cannot_be(name, world, here):
    one_line(Target.load, str(world.get(name, name)))


@pytest.mark.parametrize("dtype", ["int8", "nonsense"])
def test_dtypes_that_cannot_be(dtype, world, here):
    one_line(Target.load, str(world["TARGET"]), dtype=dtype)
