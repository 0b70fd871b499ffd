"""Costs are what the clock says of real steps."""

import random
import statistics

import pytest
import torch
from conftest import RECURRENT_RUNS, tiny_head, tiny_model

from eval.recording import recorded_steps
from speculator import Chain, Engine, FixedTree, HeadDrafter, Sampling, Target, UserError
from speculator.decoding.drafter import LookupPaths
from speculator.drafters.costs import CostEntry, CostTable, fitted
from speculator.drafters.measure import interquartile_mean, measure_costs, paired_steps, without_captures
from speculator.drafters.tuning import adaptive_drafter
from speculator.kernels.cuda_graphs import Captured

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]


def test_a_step_is_compared_with_the_plain_one_before_it(target, monkeypatch):
    """A machine that halves its speed, or stalls once, changes nothing; only levels cost time."""
    now, step, steps = [0.0], Engine.step, []

    def timed(engine):
        steps.append(engine.drafter)
        slow = 1.0 if len(steps) < 20 else 2.0
        now[0] += (
            90.0 if len(steps) == 10 else slow * (1 + 0.5 * (engine.drafter.shape.levels if engine.drafter else 0))
        )
        return step(engine)

    monkeypatch.setattr(Engine, "step", timed)
    monkeypatch.setattr("speculator.drafters.measure.time.perf_counter", lambda: now[0])
    pairs = paired_steps(target, HeadDrafter(tiny_head(), 3), PROMPTS, Sampling(), 20)
    assert len(pairs) == 20
    assert [who is None for who in steps[:4]] == [True, False, True, False]
    assert interquartile_mean(drafted / plain for plain, drafted in pairs) == pytest.approx(2.5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_steps_are_measured_even_at_the_contexts_end(family):
    prompt = torch.arange(126).remainder(32).tolist()
    target = Target(tiny_model(family), tokenizer=None)
    pairs = paired_steps(target, HeadDrafter(tiny_head()), [prompt], Sampling(), 6)
    assert len(pairs) == 6
    assert min(min(pair) for pair in pairs) > 0


def test_steps_of_a_target_whose_logits_are_not_finite_are_not_measured(target):
    target.model.get_input_embeddings().weight.data[:] = torch.nan
    drafter = HeadDrafter(tiny_head())
    with pytest.raises(UserError, match="not finite"):
        paired_steps(target, drafter, PROMPTS, Sampling(), 2)
    with pytest.raises(UserError, match="not finite"):
        list(recorded_steps(target, drafter, PROMPTS[0], Sampling(), 2))


def test_steps_of_a_prompt_that_memory_has_no_room_for_are_not_measured(target, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(target, "extend", full)
    with pytest.raises(UserError, match="too little memory"):
        paired_steps(target, HeadDrafter(tiny_head()), PROMPTS, Sampling(), 2)


def test_costs_of_a_target_whose_states_are_not_finite_are_an_error():
    target = Target(tiny_model(), tokenizer=None)
    target.model.get_input_embeddings().weight.data[14] = torch.nan  # the timed prompt is 0, 7, 14, ...
    with pytest.raises(UserError, match="not finite"):
        measure_costs(target, tiny_head(), [Chain(1)], [(2, True)], seconds=60)


def test_without_a_head_a_verification_is_priced_by_lookup_paths(target, monkeypatch):
    measured = []
    monkeypatch.setattr("speculator.drafters.measure.fitted", lambda *given: measured.extend(given[2]))
    measure_costs(target, None, (), [(2, True)], seconds=60)
    assert {step[:3] for step in measured} == {(0, 16, True), (0, 4, True), (0, 2, True), (0, 8, True)}


def test_a_timed_run_is_repeated_until_it_captures_nothing(capsys, monkeypatch):
    def run(captures: list[int]) -> int:
        Captured.prepared += captures.pop(0)
        return len(captures)

    monkeypatch.setattr(Captured, "prepared", 0)
    assert without_captures(lambda captures=[2, 1, 0, 0]: run(captures)) == 1
    assert not capsys.readouterr().err
    assert without_captures(lambda captures=[2, 1, 1, 1, 1]: run(captures)) == 1
    assert "captured CUDA graphs in all of 4 tries" in capsys.readouterr().err


def measured(entry: CostEntry, rounds: int, noise: random.Random) -> list[tuple[int, int, bool, float]]:
    """Steps with chains of 1, 2 and 5, trees of 3 and 5 tokens, and paths in one row, half of them and all."""
    rows = entry.rows
    sizes = [(levels, tokens * rows, False) for levels, tokens in ((1, 1), (2, 2), (5, 5), (2, 3), (3, 5))]
    sizes += [(0, tokens, True) for tokens in (8, rows, 8 * rows)]
    return [(*size, entry.of(*size) * noise.lognormvariate(0, 0.08)) for size in sizes * rounds]


@pytest.mark.parametrize("head", [0.0, 0.3])
def test_a_fit_finds_the_costs_behind_noisy_steps_and_an_outlier_moves_it_little(head):
    """Noise of 8%, as on a shared machine. The mean of two steps with each draft makes the cheapest look too cheap."""
    true, noise = CostEntry(rows=12, greedy=False, head=head, path=0.1, level=0.05, token=0.03), random.Random(0)
    errors, cheapest, cheapest_apart = [], [], []
    for _ in range(40):
        steps = measured(true, 2, noise)
        steps[0] = (*steps[0][:3], 9.0)  # an interrupted step
        entry = fitted(12, False, steps)
        errors += [entry.of(*size) / true.of(*size) - 1 for *size, _ in steps]
        # Which draft's cost is the most too low: by the fit, and by the mean of each draft's own steps.
        cheapest.append(min(entry.of(*size) / true.of(*size) for *size, _ in steps))
        own = [statistics.mean(cost for *_, cost in steps[i::8]) / true.of(*steps[i][:3]) for i in range(8)]
        cheapest_apart.append(min(own))
    assert statistics.mean(errors) == pytest.approx(0, abs=0.02)
    assert statistics.pstdev(errors) < 0.055
    assert statistics.mean(cheapest) > 0.95 > 0.93 > statistics.mean(cheapest_apart)


def test_a_fit_needs_no_measurement_of_each_kind():
    long, short = (5, 20, False), (1, 4, False)
    assert fitted(4, True, [(*long, 2.0)]).of(*long) == pytest.approx(2.0)
    assert 1 < fitted(4, True, [(*long, 2.0)]).of(*short) < 1.5
    longest, shortest = (fitted(4, True, [(*long, 2.0), (*short, 1.2)]).of(*size) for size in (long, short))
    assert (longest, shortest) == (pytest.approx(2.0, abs=0.03), pytest.approx(1.2, abs=0.03))


def test_noise_makes_no_draft_cheaper_than_a_plain_step_or_a_shorter_one():
    path = (0, 8, True)
    for steps in ([(1, 1, False, 1.3), (2, 2, False, 1.1), (*path, 0.9)], [(1, 1, False, 0.9), (*path, 0.8)]):
        entry = fitted(1, True, steps)
        assert min(entry.head, entry.path, entry.level, entry.token) >= 0


def test_a_path_in_a_row_costs_what_unlike_lengths_cost():
    """Also where as many tokens are verified without one: a path of 8 in one row, and chains of 2 in all four."""
    table = CostTable([CostEntry(rows=4, greedy=True, head=0.2, path=0.1, level=0.04, token=0.01)])
    for _ in range(2):  # computed, and looked up
        assert table(Chain(2), 8, False, True, 4) == pytest.approx(1 + 0.2 + 2 * 0.04 + 8 * 0.01)
        assert table(Chain(2), 8, True, True, 4) == pytest.approx(1 + 0.2 + 0.1 + 2 * 0.04 + 8 * 0.01)
        assert table(None, 5, True, True, 4) == pytest.approx(1 + 0.1 + 5 * 0.01)
        assert table(None, 0, False, True, 4) == 1


def test_a_table_answers_between_numbers_of_rows():
    """With as many tokens per row: 3 rows with a token each lie between 1 row with one and 5 with five."""
    table = CostTable(
        [CostEntry(rows=rows, greedy=True, head=rows - 1.0, path=0.0, level=0.0, token=0.0) for rows in (1, 5, 8)]
    )
    assert [
        table(Chain(1), rows, False, greedy, rows) for greedy, rows in ((True, 1), (False, 3), (True, 8), (True, 20))
    ] == [
        1,
        3,
        8,
        8,
    ]


def test_a_lasting_contradiction_corrects_the_table_once_and_only_for_alike_steps(caplog):
    entries = [
        CostEntry(rows=rows, greedy=greedy, head=0.5, path=0.0, level=0.0, token=0.0)
        for rows in (1, 8)
        for greedy in (True, False)
    ]
    table, fixed = CostTable(entries), CostTable(entries, learns=False)
    for greedy, seconds in ((False, 0.3), (True, 0.16)):
        for step in range(400):  # a step with drafts takes three plain steps; every tenth step stalls
            stall = 9 if step % 10 == 0 else 1
            for each in (table, fixed):
                each.observe(Chain(1), 8, False, greedy, 8, seconds * stall) if step % 4 else each.observe(
                    None, 0, False, greedy, 8, 0.1
                )
    assert table(Chain(1), 8, False, False, 8) == pytest.approx(3, rel=0.1)
    assert table(Chain(1), 8, False, True, 8) == fixed(Chain(1), 8, False, False, 8) == 1.5
    assert table(None, 0, False, False, 8) == 1
    assert len(caplog.records) == 1


def test_a_correction_is_that_of_all_compared_steps_not_of_the_last_one():
    """Chains take 2.3 plain steps where 1.5 is said; the last step compared is a path that costs next to nothing."""
    table = CostTable([CostEntry(rows=8, greedy=True, head=0.5, path=0.05, level=0.0, token=0.0)])
    for drafted in (*[(Chain(1), 8, False)] * 7, (None, 1, True)):
        table.observe(None, 0, False, True, 8, 1.0)
        table.observe(*drafted, True, 8, 2.3 if drafted[0] else 1.05)
    assert table(Chain(1), 8, False, True, 8) == pytest.approx(2.3)


def test_only_neighbouring_steps_of_as_many_rows_are_compared():
    table = CostTable([CostEntry(rows=4, greedy=True, head=0.5, path=0.0, level=0.0, token=0.0)])
    for _ in range(100):
        table.observe(None, 0, False, True, 3, 1.0)
        table.observe(Chain(1), 4, False, True, 4, 9.0)
    assert table(Chain(1), 4, False, True, 4) == 1.5


def test_texts_that_grow_contradict_nothing():
    table = CostTable([CostEntry(rows=1, greedy=True, head=0.5, path=0.0, level=0.0, token=0.0)])
    for step in range(2000):
        seconds = 1 + step / 500
        drafted = (Chain(1), 1) if step % 100 else (None, 0)
        table.observe(*drafted, False, True, 1, (1.5 if drafted[0] else 1) * seconds)
    assert table(Chain(1), 1, False, True, 1) == 1.5


def test_costs_are_measured_within_the_time_limit(target, monkeypatch):
    shapes = [Chain(3), Chain(1), FixedTree([(0,), (1,)])]
    sizes, measured = [(2, True), (1, False)], {}

    def noting(rows, greedy, steps):
        measured[rows, greedy] = [step[:2] for step in steps]
        return fitted(rows, greedy, steps)

    monkeypatch.setattr("speculator.drafters.measure.fitted", noting)
    entries = measure_costs(target, tiny_head(), shapes, sizes, seconds=60)
    assert [(entry.rows, entry.greedy) for entry in entries] == sizes
    # Levels and tokens: chains, lookup paths in all rows and in one, long and short ones, a tree.
    assert measured[2, True] == [(3, 6), (1, 2), (0, 16), (0, 2), (0, 8), (1, 4)] * 5
    assert measured[1, False] == [(3, 3), (1, 1), (0, 8), (0, 2), (1, 2)] * 5
    now, step = [0.0], Engine.step

    def slow_step(engine):
        now[0] += 1.0
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow_step)
    monkeypatch.setattr("speculator.drafters.measure.time.perf_counter", lambda: now[0])
    assert len(measure_costs(target, tiny_head(), shapes, sizes, seconds=4.5)) == 1
    assert now[0] == 5, "no step begins after the limit"
    assert measured[2, True] == [(3, 6), (1, 2)], "each after a step without a draft"
    assert measure_costs(target, tiny_head(), shapes, sizes, seconds=-1.0) == []


def test_rows_and_paths_of_a_measurement_differ_as_those_of_traffic_do(target, monkeypatch):
    """Equal rows choose equal experts, so that drafts look free."""
    submitted, paths, submit, put = [], [], Engine.submit, LookupPaths.put

    def noted(engine, prompt, sampling, **more):
        submitted.append((tuple(prompt), sampling.seed))
        return submit(engine, prompt, sampling, **more)

    monkeypatch.setattr(Engine, "submit", noted)
    monkeypatch.setattr(LookupPaths, "put", lambda self, found: (paths.extend(found), put(self, found)))
    measure_costs(target, tiny_head(), [Chain(1)], [(8, False)], seconds=60)
    prompts, seeds = zip(*submitted[:8], strict=True)
    assert len({prompt[-1] for prompt in prompts}) > 4
    assert len({prompt[:-8] for prompt in prompts}) == 1, "the rest is copied"
    assert sorted(seeds) == list(range(8))
    assert all(len(set(path)) > 1 for path in paths if len(path) > 2)


@RECURRENT_RUNS
def test_paths_of_padded_rows_are_measured_in_all_rows(monkeypatch):
    """A path in one row would look as dear as paths in all, and the tokens of all rows as cheap as those of one."""
    measured = []
    monkeypatch.setattr("speculator.drafters.measure.fitted", lambda *given: measured.extend(given[2]))
    target = Target(tiny_model("qwen3_5"), tokenizer=None)
    measure_costs(target, tiny_head(), [Chain(1)], [(2, True)], seconds=60)
    assert {step[:2] for step in measured} == {(1, 2), (0, 16)}
    monkeypatch.setattr("speculator.drafters.tuning.SECONDS", 0.0)
    assert not adaptive_drafter(tiny_head(), target).packed, "and paths are priced so"


def test_a_machine_that_slows_down_changes_no_cost(target, monkeypatch):
    """Steps take twice as long after a while; each is compared with the one before it. Only levels cost time."""
    now, step, speeds = [0.0], Engine.step, []

    def timed(engine):
        speeds.append(1.0 if len(speeds) < 20 else 2.0)
        now[0] += speeds[-1] * (1 + engine.drafter.shape.levels)
        return step(engine)

    monkeypatch.setattr(Engine, "step", timed)
    monkeypatch.setattr("speculator.drafters.measure.time.perf_counter", lambda: now[0])
    (entry,) = measure_costs(target, tiny_head(), [Chain(3), Chain(1)], [(2, True)], seconds=999)
    assert (entry.head, entry.path, entry.level, entry.token) == pytest.approx((0, 0, 1, 0), abs=1e-6)
    assert len(speeds) > 30
