"""The loop's manners: where a row ends, what it streams, what it counts, what it keeps for the next turn."""

from itertools import product

import numpy as np
import pytest
import torch
from conftest import Oracle, tiny_head, tiny_model
from transformers import AutoModelForCausalLM

from speculator import (
    Chain,
    FixedTree,
    HeadDrafter,
    ModelDrafter,
    NgramDrafter,
    Sampling,
    Session,
    Target,
    Tree,
    UserError,
    generate,
)

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1]]


def test_eos_ends_a_row_and_the_others_go_on(target, head):
    plain = generate(target, None, PROMPTS, max_new_tokens=30).tokens
    target.model.generation_config.eos_token_id = [plain[0][4], plain[1][12]]
    eos = target.eos_token_ids
    expected = [row[: next((i + 1 for i, token in enumerate(row) if token in eos), 30)] for row in plain]
    for drafter in (None, HeadDrafter(head), Oracle(plain)):
        assert generate(target, drafter, PROMPTS, max_new_tokens=30).tokens == expected
    assert len(generate(target, Oracle(plain), PROMPTS, max_new_tokens=30, eos_token_ids=()).tokens[0]) == 30


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_row_ends_at_the_context_length(family):
    target = Target(tiny_model(family), tokenizer=None)
    prompt = [1] * (target.context_length - 6)
    expected = generate(target, None, [prompt, [1, 2]], max_new_tokens=40).tokens
    assert [len(row) for row in expected] == [6, 40]
    assert generate(target, Oracle(expected), [prompt, [1, 2]], max_new_tokens=40).tokens == expected


def test_statistics_leave_out_the_step_that_the_limit_cut(target):
    plain = generate(target, None, [PROMPTS[0]], max_new_tokens=10).tokens
    generation = generate(target, Oracle(plain), [PROMPTS[0]], max_new_tokens=8)
    assert [step.emitted for step in generation.steps[0]] == [4, 3]
    assert [step.cut for step in generation.steps[0]] == [False, True]
    assert generation.tokens_per_step == 4.0


def test_tokens_stream_in_order(target, head):
    seen: list[list[int]] = [[] for _ in PROMPTS]
    generation = generate(
        target, HeadDrafter(head), PROMPTS, max_new_tokens=12, on_step=lambda row, new, accepted: seen[row].extend(new)
    )
    assert seen == generation.tokens


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt"),
        ([[1], []], "prompt 2 is empty"),
        ([[1] * 128], "no room"),
        ([[1], [2, 32]], "prompt 2: .* has no token 32, only 0..31"),
        ([[-1]], "has no token -1"),
        (["def"], "prompt 1 is not a list of token ids: 'def'"),
        ([1, 2], "prompt 1 is not a list of token ids: 1"),
        ([[1], [1.0]], "prompt 2 is not a list of token ids"),
        ([[True]], "prompt 1 is not a list of token ids"),
        ([[[1]]], "prompt 1 is not a list of token ids"),
        ([None], "prompt 1 is not a list of token ids: None"),
        ([{1: 2}], "prompt 1 is not a list of token ids"),
        ([torch.tensor([0.5])], "prompt 1 is not a list of token ids"),
        ([torch.tensor([[1, 2]])], "prompt 1 is not a list of token ids"),
        (torch.tensor([1, 2]), "prompt 1 is not a list of token ids"),
        (torch.empty(0, 3, dtype=torch.long), "no prompt"),
        ("def", "prompts are lists of token ids, not 'def'"),
        (None, "prompts are lists of token ids, not None"),
        (5, "prompts are lists of token ids, not 5"),
    ],
)
def test_bad_prompts_are_refused(target, prompts, message):
    with pytest.raises(UserError, match=message):
        generate(target, None, prompts)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple, lambda row: [np.int32(token) for token in row]])
def test_prompts_may_be_tensors_arrays_and_tuples(target, kind):
    expected = generate(target, None, PROMPTS, max_new_tokens=5).tokens
    assert generate(target, None, [kind(prompt) for prompt in PROMPTS], max_new_tokens=5).tokens == expected


def test_a_batch_may_be_one_tensor(target):
    rows = [PROMPTS[0], PROMPTS[0][::-1]]
    expected = generate(target, None, rows, max_new_tokens=5).tokens
    assert generate(target, None, torch.tensor(rows), max_new_tokens=5).tokens == expected


@pytest.mark.parametrize("count", [0, -5, 2.5, True, None, "8", float("nan")])
def test_a_count_of_new_tokens_that_is_none_is_refused(target, count):
    with pytest.raises(UserError, match="max_new_tokens must be an integer from 1 on"):
        generate(target, None, PROMPTS, max_new_tokens=count)


def test_the_last_seeds_streams_are_refused_in_one_line(target):
    with pytest.raises(UserError, match="seed must be of 64 bits"):
        generate(target, None, PROMPTS, Sampling(1.0, seed=2**63 - 2))


def test_all_pairs_of_short_prompts_agree_with_themselves_alone(target):
    """Ragged prefill: right padding must not reach any row."""
    for a, b in product([[3], [3, 1, 4, 1, 5, 9, 2, 6]], repeat=2):
        together = generate(target, None, [a, b], max_new_tokens=5).tokens
        assert together == [generate(target, None, [row], max_new_tokens=5).tokens[0] for row in (a, b)]


def test_stop_strings_end_a_row_where_transformers_does(target_folder):
    target = Target.load(str(target_folder))
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    stopped = 0
    for seed in range(8):
        torch.manual_seed(seed)
        prompt = torch.randint(4, 300, (20,)).tolist()
        plain = generate(target, None, [prompt], max_new_tokens=40).tokens[0]
        text = target.tokenizer.decode(plain)
        whole = [text[i : i + 3] for i in range(6, len(text) - 3) if text[i : i + 3].isascii()]
        if not whole:
            continue
        stops = ["no such text", whole[-1]]
        expected = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=40,
            stop_strings=stops,
            tokenizer=target.tokenizer,
            pad_token_id=0,
        )[0, 20:].tolist()
        stopped += len(expected) < 40
        for drafter in (None, Oracle([plain]), NgramDrafter()):
            assert generate(target, drafter, [prompt], max_new_tokens=40, stop_strings=stops).tokens == [expected]
    assert stopped >= 2


def test_a_chats_next_turn_processes_only_what_is_new(target, head):
    """Two rows, two turns, the second one's text changed near its end; drafters with a memory of their own too."""
    draft_model = Target(tiny_model("qwen3"), None)
    for drafter in (None, HeadDrafter(head), HeadDrafter(head, Tree((3, 2), 4)), ModelDrafter(draft_model, target)):
        session = Session(target)
        first = [[5, 6, 7, 8, 9, 10], [1, 2, 3]]
        answers = generate(target, drafter, first, Sampling(1.0, seed=4), max_new_tokens=12, session=session).tokens
        assert session.processed == 9
        turns = [first[0] + answers[0] + [11, 12], first[1] + answers[1][:5] + [13, 14, 15]]
        again = generate(target, drafter, turns, max_new_tokens=12, session=session).tokens
        # Row 0: its newest token and the two after it; row 1: from the first that differs.
        assert session.processed == 9 + 3 + 3
        assert again == generate(target, drafter, turns, max_new_tokens=12).tokens


def test_rules_and_settings_that_do_not_fit_are_refused(target, head):
    with pytest.raises(UserError, match="no accept rule 'tokens'"):
        generate(target, HeadDrafter(head), [[1]], rule="tokens")
    with pytest.raises(UserError, match="does not fit"):
        generate(target, HeadDrafter(head, Tree((2, 2), 3)), [[1]], rule="token")
    with pytest.raises(UserError, match="2 sampling settings for 1 prompt"):
        generate(target, None, [[1]], [Sampling(), Sampling()])
    with pytest.raises(UserError, match="draft length 4 is not in"):
        HeadDrafter(head, Chain(4))
    with pytest.raises(UserError, match="a tree of 7 nodes"):
        Tree((2, 2), 7)


def test_a_draft_model_with_another_tokenizer_is_refused(target_folder):
    target = Target.load(str(target_folder))
    other = Target.load(str(target_folder))
    other.tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match="does not share its tokenizer"):
        ModelDrafter(other, target)


@pytest.mark.parametrize("size", [24, 40])
def test_a_draft_models_vocabulary_may_be_padded_otherwise(target, size):
    """Smaller: the missing tokens are never drafted. Larger: the surplus is cut off, and q is what is left."""
    model = tiny_model("qwen3")
    model.resize_token_embeddings(size)
    drafter = ModelDrafter(Target(model, None), target)
    prompts = [[1, 2, 3], [4]]
    assert (
        generate(target, drafter, prompts, max_new_tokens=12).tokens
        == generate(target, None, prompts, max_new_tokens=12).tokens
    )
    assert len(generate(target, drafter, prompts, Sampling(1.0), max_new_tokens=12).tokens[0]) == 12


@pytest.mark.parametrize("count", [1, 3])
def test_a_target_may_be_cast_after_its_load_and_run_under_autocast(target, count):
    drafter = HeadDrafter(tiny_head(), FixedTree([(0,), (1,), (0, 0)]))
    prompts = [[1, 2, 3, 4], [5, 6], [7, 8, 9]][:count]
    with torch.autocast("cpu", torch.bfloat16):
        assert [len(row) for row in generate(target, drafter, prompts, max_new_tokens=8).tokens] == [8] * count
    target.model.double()
    drafter.head.double()
    expected = generate(Target(tiny_model().double(), None), None, prompts, max_new_tokens=8).tokens
    assert generate(target, drafter, prompts, max_new_tokens=8).tokens == expected
