"""Choosing what to draft before each step: the text stays the target's, and the choices are good ones."""

import random
from collections import Counter

import pytest
import torch
from conftest import AlternatingDrafter, alternating_drafter, tiny_head, tiny_model
from enumeration import distance_of_runs, four_token_pair, joint_distribution

from speculator import (
    Chain,
    Engine,
    FixedTree,
    HeadDrafter,
    Sampling,
    Target,
    UserError,
    generate,
)
from speculator.decoding.drafter import LookupPaths
from speculator.decoding.verify import REJECTION_RULES
from speculator.drafters.adaptive import AdaptiveDrafter, PathOrDraft
from speculator.drafters.price import Choice

PROMPT, SAMPLING = [0, 1, 0, 2], Sampling(1.0, top_k=2)


@pytest.fixture(scope="module")
def small():
    return four_token_pair()


def distance(
    small,
    monkeypatch,
    engine_class=Engine,
    drafter_class=AlternatingDrafter,
    rules=REJECTION_RULES,
    count=4,
    taken=None,
) -> float:
    """Total variation between what an engine says in all its runs and what the model says."""
    target, head = small
    auto = alternating_drafter(head)

    def run() -> tuple[int, ...]:
        drafter = drafter_class(head, auto.choices, auto.lookup, auto.cost)
        engine = engine_class(target, drafter, slots=1)
        request = engine.submit(PROMPT, SAMPLING, max_new_tokens=count)
        while engine.busy:
            engine.step()
            if taken is not None and hasattr(engine.drafter, "shape"):
                taken[type(engine.drafter.shape).__name__, engine.drafter.shape.nodes] += 1
        return tuple(request.tokens)

    return distance_of_runs(monkeypatch, run, joint_distribution(target.model, PROMPT, count, SAMPLING), rules)


def test_every_run_of_the_engine_adds_up_to_the_targets_distribution(small, monkeypatch):
    taken: Counter = Counter()
    assert distance(small, monkeypatch, taken=taken) < 1e-12
    assert {("PathOrDraft", 8), ("Chain", 1), ("FixedTree", 3)} <= taken.keys(), taken


# ---- with others, and again


PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1], [3, 3, 4]]


GREEDY, PLAIN, TOP_P = Sampling(), Sampling(1.0, seed=5), Sampling(0.7, top_p=0.8)


@pytest.mark.parametrize(
    ("architecture", "sampling"),
    [
        ("eagle3", GREEDY),
        ("mlp", PLAIN),
        ("eagle3", TOP_P),
        *(pytest.param(*pair, marks=pytest.mark.soak) for pair in (("mlp", GREEDY), ("eagle3", PLAIN), ("mlp", TOP_P))),
    ],
    ids=str,
)
def test_texts_are_the_targets_whoever_joins_and_leaves(architecture, sampling):
    target = Target(tiny_model("gemma3").double(), tokenizer=None)
    expected = [generate(target, None, [prompt], sampling, max_new_tokens=40).tokens[0] for prompt in PROMPTS]
    engine, draw = (
        Engine(target, alternating_drafter(tiny_head(3, architecture).double()), slots=2, chunk=3),
        random.Random(2),
    )
    for _ in range(2):
        requests = []
        for prompt in PROMPTS:
            requests.append(engine.submit(prompt, sampling, max_new_tokens=40))
            for _ in range(draw.randrange(6)):
                engine.step()
        engine.run()
        assert [request.tokens for request in requests] == expected


@pytest.mark.parametrize("architecture", ["mlp", "eagle3"])
def test_what_a_head_remembers_is_the_text_after_steps_without_it(architecture):
    """A head that drafts after copies and plain steps drafts as one that is given the text anew."""
    target = Target(tiny_model().double(), tokenizer=None)
    head, shape = tiny_head(3, architecture).double(), Chain(3)
    engine = Engine(
        target, AdaptiveDrafter(head, [Choice(shape, {True: [0.5] * 3})], {True: [0.5]}, lambda *_: 1.0), slots=2
    )
    requests = [engine.submit(prompt, max_new_tokens=100) for prompt in PROMPTS[:2]]
    engine.step()
    own, drafts, propose = engine.drafter, [], engine.drafter.propose
    own.propose = lambda *given: drafts.append(propose(*given)) or drafts[-1]
    compared = 0
    for turn in [0, 2, shape, 0, 0, shape, 1, shape, shape, 2, shape] * 2:
        chosen = PathOrDraft(turn) if isinstance(turn, int) else shape
        own.choose = lambda requests, chosen=chosen: chosen
        texts = [list(request.sequence) for request in requests]
        engine.step()
        if turn is shape:
            anew = Engine(target, HeadDrafter(head, shape), slots=2)
            for text in texts:
                anew.submit(text[:-1], max_new_tokens=10)
            anew.admit()
            anew.prefill()
            assert torch.equal(anew.draft(anew.schedule())[0].tokens, drafts[-1].tokens)
            compared += 1
    assert compared == 10


def test_the_same_requests_again_are_drafted_for_alike():
    """No clock is read: what was chosen, drawn and accepted is the same, also after other texts."""
    target = Target(tiny_model().double(), tokenizer=None)
    engine = Engine(target, alternating_drafter(tiny_head().double()), slots=3)
    runs = []
    for _ in range(2):
        engine.forget()
        made = engine.generate(PROMPTS, Sampling(1.0, seed=4), max_new_tokens=30)
        runs.append((made.tokens, made.steps))
        engine.generate(PROMPTS[:1], Sampling(1.0, seed=9), max_new_tokens=30)
    assert runs[0] == runs[1]
    assert len({step.drafted for row in runs[0][1] for step in row}) > 2


def test_what_others_said_is_looked_up_where_there_is_a_memory():
    """Of a sibling that is further on, and of a text that has ended."""
    target = Target(tiny_model().double(), tokenizer=None)
    steps = []
    for memory in (0, 1000):
        drafter = AdaptiveDrafter(tiny_head().double(), [], {True: [0.5] * 3}, lambda *_: 1.0, memory=memory)
        engine, texts = Engine(target, drafter, slots=2), []
        for wait in (20, 100, 0):
            texts.append(engine.submit(PROMPTS[0], max_new_tokens=40))
            for _ in range(wait):
                engine.step()
        engine.run()
        assert len({tuple(text.tokens) for text in texts}) == 1
        steps.append([len(text.steps) for text in texts])
    assert len(set(steps[0])) == 1
    assert steps[1][1] < 0.8 * steps[0][1]
    assert steps[1][2] < 0.5 * steps[0][2]


@pytest.mark.parametrize("length", [1, 2])
def test_a_short_path_beside_a_tree_is_not_deeper_than_the_tree(length):
    """Log-probabilities need the scores of padding too."""
    target = Target(tiny_model().double(), tokenizer=None)
    shape = PathOrDraft(8, FixedTree([(0,), (1,), (2,), (0, 0)]))

    class Paths(HeadDrafter):
        def choose(self, requests):
            self.memory.paths.put([[5] * length, []])
            return self.shape

    drafter = Paths(tiny_head().double())
    drafter.memory.paths = LookupPaths(8)
    drafter.reshape(shape)
    engine = Engine(target, drafter, slots=2)
    made = [
        engine.submit([1, 2, 3 + row], Sampling(1.0, seed=row), max_new_tokens=12, logprobs=1, eos_token_ids=())
        for row in range(2)
    ]
    engine.run()
    plain = generate(target, None, [[1, 2, 3], [1, 2, 4]], Sampling(1.0), max_new_tokens=12, eos_token_ids=()).tokens
    assert [request.tokens for request in made] == plain


def test_a_rule_that_does_not_fit_all_that_may_be_drafted_is_refused():
    with pytest.raises(UserError, match="rule 'block'"):
        Engine(Target(tiny_model(), None), alternating_drafter(tiny_head()), rule="block")
