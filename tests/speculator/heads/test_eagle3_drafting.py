"""EAGLE-3 in the engine: its drafts follow the training form while requests join, leave, share prefixes and are
prefilled in chunks."""

from collections import defaultdict
from copy import copy

import pytest
import torch
from conftest import tiny_model

from speculator import Candidates, Chain, HeadDrafter, Sampling, Target, Tree
from speculator.checkpoints.loading import bind
from speculator.decoding.engine import Engine
from speculator.drafters.adaptive import PathOrDraft
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig
from speculator.heads.attention.cache import HeadCache
from speculator.heads.attention.levels import MAX_UNREAD, LevelSource

STEPS = 4
BEFORE = [5, 4, 3, 2, 1, 0]  # another document of the row
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9], [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]


class Noting:
    """Wraps a source and records its logits as (text, path of the draft after it, logits)."""

    def __init__(self, source: LevelSource, log: list):
        self.source, self.log = source, log

    def __getattr__(self, name):
        return getattr(self.source, name)

    def note(self, logits):
        for text, paths, row in zip(self.texts, self.paths, logits, strict=True):
            self.log += [(text, path, each) for path, each in zip(paths, row, strict=True)]
        return logits

    def first(self, pending, texts):
        self.texts, self.paths = [tuple(text) for text in texts], [[()] for _ in texts]
        return self.note(self.source.first(pending, texts))

    def next(self, level, tokens, parents):
        given = zip(self.paths, tokens.tolist(), parents.tolist(), strict=True)
        self.paths = [[(*old[p], x) for x, p in zip(row, above, strict=True)] for old, row, above in given]
        return self.note(self.source.next(level, tokens, parents))


class Noted(HeadDrafter):
    def __init__(self, *given):
        super().__init__(*given)
        self.log = []

    def propose(self, pending, noise, texts):
        return self.shape.draft(Noting(self.memory, self.log), pending, noise, texts)


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model().double(), tokenizer=None)


@pytest.fixture(scope="module")
def head(target):
    torch.manual_seed(3)
    config = Eagle3SpeculatorConfig.for_target(target.config, n_predict=STEPS, aux_layers=[0, 1])
    return bind(Eagle3Speculator(config).double(), target)


@torch.no_grad()
def trained_form(target, head, drafts: list[tuple]) -> torch.Tensor:  # [len(drafts), V]
    """Logits of the training form after drafts (text, path). Texts have one length, and follow another document."""
    row = torch.tensor([[*BEFORE, *text[:-1]] for text, _ in drafts])
    length = row.shape[1]
    documents = (torch.arange(length) >= len(BEFORE)).long().expand_as(row)
    with target.aux_layers.recorded(head.aux_layers) as states:
        hidden = states(target.hidden(row, documents))
    rest = head.n_predict - 1
    tokens = torch.tensor([[*BEFORE[1:], *text, *path, *[0] * (rest - len(path))] for text, path in drafts])
    loss_mask = (torch.arange(length) == length - 1).expand_as(row)
    features = torch.stack(head.unrolled(hidden, tokens, documents, loss_mask))
    last = features[[len(path) for _, path in drafts], torch.arange(len(drafts)), -1]
    return head.to_full_vocabulary(head.output(0)(last))


def largest_gap(log: list, expected_of) -> float:
    """Compare a log with `expected_of(drafts)`, called with the drafts (text, path) after all texts of one length."""
    drafts = defaultdict(list)
    for text, path in {(text, path) for text, path, _ in log}:
        drafts[len(text)].append((text, path))
    expected = {draft: row for some in drafts.values() for draft, row in zip(some, expected_of(some), strict=True)}
    return max((logits - expected[text, path]).abs().max().item() for text, path, logits in log)


def gap(target, head, drafter: Noted) -> float:
    assert len(drafter.log) > 40
    return largest_gap(drafter.log, lambda drafts: trained_form(target, head, drafts))


@pytest.mark.parametrize(("slots", "chunk", "short"), [(1, 3, 64), (2, 64, 64), (5, 3, 64), (5, 64, 2)])
def test_drafts_equal_the_training_form_with_slots_chunks_and_prefixes(target, head, slots, chunk, short, monkeypatch):
    monkeypatch.setattr(
        "speculator.heads.attention.cached_source._SHORT", short
    )  # tokens from which a row is read by itself
    plain = Engine(target, None, slots=slots).generate(PROMPTS, max_new_tokens=12)
    drafter = Noted(head)
    engine = Engine(target, drafter, slots=slots, chunk=chunk)
    limits = [12, 5, 9, 12, 7]
    first = engine.generate(PROMPTS, max_new_tokens=limits)
    assert first.tokens == [tokens[:n] for tokens, n in zip(plain.tokens, limits, strict=True)]
    # A second turn reuses the prefixes in the slots.
    turns = [prompt + said + [1, 2] for prompt, said in zip(PROMPTS, first.tokens, strict=True)]
    before = engine.num_prefilled_tokens
    second = engine.generate(turns, max_new_tokens=8)
    assert slots < 5 or engine.num_prefilled_tokens - before < sum(map(len, turns))
    assert second.tokens == Engine(target, None, slots=1).generate(turns, max_new_tokens=8).tokens
    assert gap(target, head, drafter) < 1e-10


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [
        (Chain(STEPS), 1.0),
        (Tree((2, 2, 1, 1), nodes=7), 0.0),
        (Candidates((2, 2, 1)), 1.0),
        pytest.param(Chain(STEPS), 0.0, marks=pytest.mark.soak),
        pytest.param(Tree((2, 2, 1, 1), nodes=7), 1.0, marks=pytest.mark.soak),
        pytest.param(Candidates((2, 2, 1)), 0.0, marks=pytest.mark.soak),
    ],
)
def test_every_shape_drafts_from_the_training_forms_distributions(target, head, shape, temperature):
    drafter = Noted(head, shape)
    made = Engine(target, drafter, slots=3).generate(PROMPTS, Sampling(temperature, seed=1), max_new_tokens=12)
    assert [len(tokens) for tokens in made.tokens] == [12] * 5
    assert any(step.accepted for steps in made.steps for step in steps)
    assert gap(target, head, drafter) < 1e-10


class Seldom(Noted):
    """Drafts in one of `every` steps, and nothing in the others."""

    every: int

    def choose(self, requests):
        self.turn = getattr(self, "turn", -1) + 1
        self.own, self.none = getattr(self, "own", self.shape), getattr(self, "none", PathOrDraft(0))
        return self.none if self.turn % self.every else self.own


@pytest.mark.parametrize("every", [2, 2 * MAX_UNREAD])
def test_steps_without_a_draft_are_read_later(target, head, every):
    """Rows accepted different numbers of tokens; other rows join, leave and reuse prefixes meanwhile."""
    drafter = Seldom(head, Chain(2))
    drafter.every = every
    engine = Engine(target, drafter, slots=3)
    limits = [40, 35, 50, 44, 30]
    first = engine.generate(PROMPTS, max_new_tokens=limits).tokens
    turns = [prompt + said + [1, 2] for prompt, said in zip(PROMPTS, first, strict=True)]
    second = engine.generate(turns, max_new_tokens=30).tokens
    assert second == Engine(target, None, slots=1).generate(turns, max_new_tokens=30).tokens
    assert gap(target, head, drafter) < 1e-10


def test_losing_unread_positions_is_detected(target, head, monkeypatch):
    own = LevelSource.commit

    def losing(self, tokens, hidden, counts):
        self._counts[: len(counts)] = 0
        own(self, tokens, hidden, counts)

    monkeypatch.setattr(LevelSource, "commit", losing)
    drafter = Seldom(head, Chain(2))
    drafter.every = 5
    engine = Engine(target, drafter, slots=3)
    engine.generate(PROMPTS, max_new_tokens=40)
    assert gap(target, head, drafter) > 1e-3


def test_keeping_draft_positions_in_the_cache_is_detected(target, head, monkeypatch):
    own = LevelSource.commit

    def keeping(self, tokens, hidden, counts):
        own(self, tokens, hidden, counts)
        self.cache.lengths[: len(counts)] += 1

    monkeypatch.setattr(LevelSource, "commit", keeping)
    wide = LevelSource.open

    def wider(self, cache):
        cache = copy(cache)
        cache.capacity += 100
        return wide(self, cache)

    monkeypatch.setattr(LevelSource, "open", wider)
    select = HeadCache.select
    monkeypatch.setattr(HeadCache, "select", lambda self, start, stop, longest: select(self, start, stop, longest + 50))
    drafter = Noted(head)
    Engine(target, drafter, slots=3).generate(PROMPTS, max_new_tokens=12)
    assert gap(target, head, drafter) > 1e-3


def test_reading_another_rows_cache_is_detected(target, head, monkeypatch):
    """Rows move in the cache as requests leave; the head's memory must move with them."""
    monkeypatch.setattr(LevelSource, "move", lambda self, source, destination, longest: None)
    drafter = Noted(head)
    Engine(target, drafter, slots=3).generate(PROMPTS, max_new_tokens=[12, 3, 9, 12, 5])
    assert gap(target, head, drafter) > 1e-3
