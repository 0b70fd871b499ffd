"""c and v are what the clock says of real steps, and predict what the loop does."""

import json
from math import inf

import pytest
import torch
from conftest import RECURRENT_RUNS, Oracle, tiny_head, tiny_model

from speculator import Chain, Engine, FixedTree, HeadDrafter, NgramDrafter, Sampling, Target, Tree, generate
from speculator.drafters.costs import CostEntry, CostTable, entry_from_json, entry_to_json
from speculator.drafters.measure import StepSeconds, measure, measure_costs, timed_steps

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]


def test_step_costs_equal_those_computed_by_hand():
    """Drafts of 0.9, 0.5, 0.3, 0.1 plain steps: the middle half's mean is 0.4; 2 tokens each. Passes of 2, 1, 2, 2.

    The median draft over the median plain step would be 0.65 / 1.5, the sum of all over that of all 2.6 / 8.
    """
    figures = StepSeconds(plain=[1, 2, 1, 4], draft=[0.9, 1, 0.3, 0.4], verify=[2, 2, 2, 8]).figures(
        num_speculative_tokens=2
    )
    assert figures["draft_over_decode"] == pytest.approx(0.2)
    assert figures["verify_over_decode"] == pytest.approx(2)
    assert figures["decode_seconds"] == pytest.approx(1.5 / 4)  # a block is four steps


def test_a_machine_that_halves_its_speed_or_stalls_once_changes_nothing():
    fast = StepSeconds(plain=[1.0] * 5, draft=[0.4] * 5, verify=[1.5] * 5)
    both = StepSeconds(plain=[1.0] * 5 + [2.0] * 5, draft=[0.4] * 5 + [0.8] * 5, verify=[1.5] * 4 + [90.0] + [3.0] * 5)
    for name in ("draft_over_decode", "verify_over_decode"):
        assert both.figures(4)[name] == pytest.approx(fast.figures(4)[name])


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=RECURRENT_RUNS)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["chain", "tree", "ngram"])
def test_the_steps_walked_are_the_loops(kind, temperature, family):
    """Same drafts kept, same tokens, batch and seeds: what is measured is what runs."""
    target = Target(tiny_model(family), tokenizer=None)
    make = {
        "chain": lambda: HeadDrafter(tiny_head()),
        "tree": lambda: HeadDrafter(tiny_head(), Tree((2, 2, 1), 5)),
        "ngram": lambda: NgramDrafter(3),
    }[kind]
    sampling = Sampling(temperature, seed=3)
    generation = generate(target, make(), PROMPTS, sampling, max_new_tokens=60, eos_token_ids=())
    walked = [result for _, result in timed_steps(target, make(), PROMPTS, sampling, 9, StepSeconds())]
    for row in range(2):
        expected = [step.accepted for step in generation.steps[row]][:9]
        assert [int(result.accepted[row]) for result in walked] == expected
        tokens = [int(t) for r in walked for t in [*r.tokens[row, 1 : 1 + int(r.accepted[row])], r.next_token[row]]]
        assert tokens == generation.tokens[row][1 : 1 + len(tokens)]


def test_plain_steps_leave_no_trace_in_what_the_drafter_sees(target):
    """An adaptive drafter learns from the newest step, which must be one that it drafted for."""
    seen = []

    class Noting(HeadDrafter):
        def choose(self, requests):
            seen.append([len(request.steps) for request in requests])
            return super().choose(requests)

    for _ in timed_steps(target, Noting(tiny_head()), PROMPTS, Sampling(), 12, StepSeconds()):
        pass
    assert seen == [[seen[0][0] + done] * 2 for done in range(12)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_steps_are_measured_even_at_the_contexts_end(family):
    costs = StepSeconds()
    prompt = torch.arange(126).remainder(32).tolist()
    target = Target(tiny_model(family), tokenizer=None)
    measure(target, HeadDrafter(tiny_head()), [prompt], Sampling(), 2, costs)
    assert len(costs.plain) == len(costs.draft) == len(costs.verify) == 2
    assert min(costs.plain + costs.draft + costs.verify) > 0


def test_a_whole_draft_kept_is_walked_whole(target, monkeypatch):
    monkeypatch.setattr("speculator.decoding.rows.RESERVED_NEW_TOKENS", 4)
    texts = generate(target, None, [PROMPTS[0]], max_new_tokens=60, eos_token_ids=()).tokens
    walked = list(timed_steps(target, Oracle(texts), [PROMPTS[0]], Sampling(), 10, StepSeconds()))
    assert [int(result.accepted[0]) for _, result in walked] == [3] * 10


def test_costs_between_measured_drafts_are_interpolated():
    tree = FixedTree([(0,), (1,)])
    entry = CostEntry(2, True, {Chain(1): 1.2, Chain(3): 1.6, tree: 1.5}, {0: 1.0, 8: 1.4, 16: 1.6})
    assert entry.of(Chain(2), 4) == pytest.approx(1.4)
    assert [entry.of(None, tokens) for tokens in (0, 4, 12)] == pytest.approx([1.0, 1.2, 1.5])
    assert entry.of(FixedTree([(0,), (1,)]), 4) == pytest.approx(1.5)
    assert entry.of(Chain(2), 10) == pytest.approx(1.4 + 0.25), "a row drafts a path of 8: 10 tokens in place of 4"
    assert entry.of(FixedTree([(0,)]), 2) == inf, "not measured"


def test_noise_makes_no_longer_draft_cheaper():
    entry = CostEntry(1, True, {Chain(1): 1.3, Chain(2): 1.1, Chain(4): 1.5})
    costs = [entry.of(Chain(length), length) for length in (1, 2, 3, 4)]
    assert costs == sorted(costs)


def test_a_table_answers_between_numbers_of_rows():
    """With as many tokens per row: 3 rows with a token each lie between 1 row with one and 5 with five."""
    table = CostTable([CostEntry(rows, True, {Chain(1): float(rows)}) for rows in (1, 5, 8)])
    assert [table(Chain(1), rows, greedy, rows) for greedy, rows in ((True, 1), (False, 3), (True, 8), (True, 20))] == [
        1,
        3,
        8,
        8,
    ]


def test_a_lasting_contradiction_corrects_the_table_once_and_only_for_alike_steps(caplog):
    entries = [CostEntry(rows, greedy, {Chain(1): 1.5}) for rows in (1, 8) for greedy in (True, False)]
    table, fixed = CostTable(entries), CostTable(entries, learns=False)
    for step in range(400):  # a step with drafts takes three plain steps; every tenth step stalls
        stall = 9 if step % 10 == 0 else 1
        for each in (table, fixed):
            each.observe(Chain(1), 8, False, 8, 0.3 * stall) if step % 4 else each.observe(None, 0, False, 8, 0.1)
            each.observe(Chain(1), 8, True, 8, 0.16) if step % 4 else each.observe(None, 0, True, 8, 0.1)
    assert table(Chain(1), 8, False, 8) == pytest.approx(3, rel=0.1)
    assert table(Chain(1), 8, True, 8) == fixed(Chain(1), 8, False, 8) == 1.5
    assert table(None, 0, False, 8) == 1
    assert len(caplog.records) == 1


def test_texts_that_grow_contradict_nothing():
    table = CostTable([CostEntry(1, True, {Chain(1): 1.5})])
    for step in range(2000):
        seconds = 1 + step / 500
        table.observe(Chain(1), 1, True, 1, 1.5 * seconds) if step % 100 else table.observe(None, 0, True, 1, seconds)
    assert table(Chain(1), 1, True, 1) == 1.5


def test_entries_survive_json():
    drafts = {Chain(2): 1.2, FixedTree([(0,), (1,)]): 1.3}
    entry = CostEntry(4, False, drafts, {0: 1.0, 8: 1.1, 32: 1.4})
    again = entry_from_json(json.loads(json.dumps(entry_to_json(entry))))
    assert entry_to_json(again) == entry_to_json(entry)
    assert again.of(Chain(2), 20) == entry.of(Chain(2), 20)


def test_costs_are_measured_within_the_time_limit(target, monkeypatch):
    shapes = [Chain(3), Chain(1), FixedTree([(0,), (1,)])]
    sizes = [(2, True), (1, False)]
    entries = measure_costs(target, tiny_head(), shapes, sizes, seconds=60)
    assert [(entry.rows, entry.greedy) for entry in entries] == sizes
    for entry in entries:
        assert entry.drafts.keys() == set(shapes)
        assert entry.verify.keys() == {8, 8 * entry.rows}
        assert min(*entry.drafts.values(), *entry.verify.values()) > 0
    now, step = [0.0], Engine.step

    def slow_step(engine):
        now[0] += 1.0
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow_step)
    monkeypatch.setattr("speculator.drafters.measure.time.perf_counter", lambda: now[0])
    (entry,) = measure_costs(target, tiny_head(), shapes, sizes, seconds=4.5)
    assert now[0] == 5, "no step begins after the limit"
    assert list(entry.drafts) == shapes[:2], "each after a step without a draft"
    assert measure_costs(target, tiny_head(), shapes, sizes, seconds=-1.0) == []


def test_a_machine_that_slows_down_changes_no_cost(target, monkeypatch):
    """Steps take twice as long after a while; each is compared with the one before it."""
    now, step, speeds = [0.0], Engine.step, []

    def timed(engine):
        speeds.append(1.0 if len(speeds) < 20 else 2.0)
        now[0] += speeds[-1] * (1 + engine.drafter.nodes)
        return step(engine)

    monkeypatch.setattr(Engine, "step", timed)
    monkeypatch.setattr("speculator.drafters.measure.time.perf_counter", lambda: now[0])
    (entry,) = measure_costs(target, tiny_head(), [Chain(3), Chain(1)], [(2, True)], seconds=999)
    assert {shape.nodes: cost for shape, cost in entry.drafts.items()} == {3: 4, 1: 2}
    assert len(speeds) > 30
