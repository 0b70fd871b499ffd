"""The loop end to end: whatever drafts, the text is the target's."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import CONFIGS, VOCAB, tiny_head, tiny_model

from speculator import HeadDrafter, NgramDrafter, Sampling, Target, UserError, generate
from speculator.decoding.draft import Draft
from speculator.decoding.sampling import RowSampling

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1]]


class Oracle:
    """Drafts what it was told the text will be: every token right, or every token wrong."""

    name, draft_length, nodes, rules = "oracle", 3, 3, ("walk",)

    def __init__(self, continuations: list[list[int]], wrong: bool = False):
        self.continuations, self.wrong = continuations, wrong

    def start(self, texts, hidden, counts):
        self.position = torch.ones_like(counts)

    def propose(self, pending, sampling, u, texts):
        rows = [
            (text + [0] * 8)[at : at + 3] for text, at in zip(self.continuations, self.position.tolist(), strict=True)
        ]
        tokens = (torch.tensor(rows) + self.wrong) % VOCAB
        return Draft(tokens, torch.full_like(pending, 3))

    def commit(self, tokens, hidden, counts):
        self.position += counts


def reference(model, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding as anyone would write it: no cache."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax().item())
    return text[len(prompt) :]


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_text_is_the_models_own(family):
    expected = [reference(tiny_model(family), prompt, 30) for prompt in PROMPTS]
    target = Target(tiny_model(family), tokenizer=None)
    drafters = [None, HeadDrafter(tiny_head()), NgramDrafter(), Oracle(expected), Oracle(expected, wrong=True)]
    for drafter in drafters:
        assert generate(target, drafter, PROMPTS, max_new_tokens=30).tokens == expected


def test_a_perfect_draft_is_kept_whole_and_a_wrong_one_not_at_all(target):
    plain = generate(target, None, PROMPTS, max_new_tokens=41).tokens
    assert generate(target, Oracle(plain), PROMPTS, max_new_tokens=41).tokens_per_step == 4.0
    assert generate(target, Oracle(plain, wrong=True), PROMPTS, max_new_tokens=41).tokens_per_step == 1.0


def joint_law(model, prompt: list[int], count: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The exact law of `count` sampled tokens, by enumerating the model."""
    laws = {(): 1.0}
    for _ in range(count):
        prefixes = list(laws)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *prefix] for prefix in prefixes]), use_cache=False).logits[:, -1]
        rows = sampling.law(logits.double())
        laws = {
            (*prefix, token): laws[prefix] * row[token].item()
            for prefix, row in zip(prefixes, rows, strict=True)
            for token in range(VOCAB)
            if row[token] > 0
        }
    return laws


def chi_square_p(counts: Counter, law: dict, total: int) -> float:
    """Goodness of fit, cells with fewer than 5 expected merged; p from the Wilson-Hilferty normal approximation."""
    cells, rest, rest_seen = [], 0.0, 0
    for outcome, probability in law.items():
        if probability * total >= 5:
            cells.append((counts[outcome], probability * total))
        else:
            rest, rest_seen = rest + probability * total, rest_seen + counts[outcome]
    if rest >= 5:
        cells.append((rest_seen, rest))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    degrees = len(cells) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


class MisstatedHead(HeadDrafter):
    """The classic bug: tokens are drawn from one law and tested against another."""

    def propose(self, pending, sampling, u, texts):
        colder = RowSampling([replace(row, temperature=0.5 * row.temperature) for row in sampling.rows], pending.device)
        draft = super().propose(pending, colder, u, texts)
        draft.probs = draft.probs.sqrt() / draft.probs.sqrt().sum(-1, keepdim=True)
        return draft


def sampled_p_value(drafter, sampling, rows: int = 20_000) -> float:
    """Of the second and third new token jointly: those that drafts decide (the prefill gives the first)."""
    model = tiny_model(scale=2.0)
    law: dict[tuple[int, ...], float] = Counter()
    for tokens, probability in joint_law(model, PROMPTS[0], 3, sampling).items():
        law[tokens[1:]] += probability
    generation = generate(Target(model, None), drafter, [PROMPTS[0]] * rows, sampling, max_new_tokens=3)
    return chi_square_p(Counter(tuple(row[1:]) for row in generation.tokens), law, rows)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, seed=3), Sampling(0.7, top_k=6, seed=5), Sampling(1.3, top_p=0.8, min_p=0.02, seed=7)]
)
@pytest.mark.parametrize("drafter", [None, HeadDrafter(tiny_head()), NgramDrafter()], ids=["none", "head", "ngram"])
def test_sampled_text_follows_the_enumerated_law(drafter, sampling):
    assert sampled_p_value(drafter, sampling) > 1e-4


def test_a_draft_law_that_is_not_the_drawn_one_is_seen():
    assert sampled_p_value(MisstatedHead(tiny_head()), Sampling(1.0, seed=3)) < 1e-6


def test_a_row_does_not_depend_on_its_batch_mates(target, head):
    sampling = Sampling(1.0, seed=11)
    together = generate(target, HeadDrafter(head), PROMPTS, sampling, max_new_tokens=20).tokens
    alone = [
        generate(target, HeadDrafter(head), [prompt], Sampling(1.0, seed=11 + row), max_new_tokens=20).tokens[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone


def test_eos_ends_a_row_and_the_others_go_on(target, head):
    plain = generate(target, None, PROMPTS, max_new_tokens=30).tokens
    target.model.generation_config.eos_token_id = [plain[0][4], plain[1][12]]
    eos = target.eos_token_ids
    expected = [row[: next((i + 1 for i, token in enumerate(row) if token in eos), 30)] for row in plain]
    for drafter in (None, HeadDrafter(head), Oracle(plain)):
        assert generate(target, drafter, PROMPTS, max_new_tokens=30).tokens == expected
    assert len(generate(target, Oracle(plain), PROMPTS, max_new_tokens=30, ignore_eos=True).tokens[0]) == 30


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
    ("prompts", "message"), [([], "no prompt"), ([[1], []], "prompt 2 is empty"), ([[1] * 128], "no room")]
)
def test_bad_prompts_are_refused(target, prompts, message):
    with pytest.raises(UserError, match=message):
        generate(target, None, prompts)


def test_all_pairs_of_short_prompts_agree_with_themselves_alone(target):
    """Ragged prefill: right padding must not reach any row."""
    for a, b in product([[3], [3, 1, 4, 1, 5, 9, 2, 6]], repeat=2):
        together = generate(target, None, [a, b], max_new_tokens=5).tokens
        assert together == [generate(target, None, [row], max_new_tokens=5).tokens[0] for row in (a, b)]
