"""Captured steps. Without a GPU, the doubles of `replays` stand in for graphs."""

import contextlib
import copy
import gc
import time
import weakref
from collections import Counter
from dataclasses import replace
from math import inf
from unittest.mock import Mock

import pytest
import torch
from conftest import CONFIGS, Oracle, tiny_head, tiny_model
from drafters import make_drafter
from replays import NAMES, PROMPTS, SAMPLINGS, Double, Record, capturing, early_end, make_target, overwrite, texts
from transformers import AutoModelForCausalLM

from eval.timing import Engines, Timed, time_ours
from speculator import (
    Engine,
    HeadDrafter,
    Sampling,
    Target,
    generate,
)
from speculator.drafters.measure import paired_steps
from speculator.kernels import cuda_graphs as graphs
from speculator.kernels.host_sync import HostSyncs
from speculator.target.cache import kv_cache as cache_module


class Comparison(Double):
    """A graph that runs the function again and compares it with the record."""

    def __init__(self, work, given):
        super().__init__(work, given)
        self.work, self.given = work, given

    def replay(self):
        if self.replays:
            with Record() as again:
                result = self.work(*self.given)
            assert again.shapes == self.record.shapes, "the steps differ"
            overwrite(self.result, result)
        self.replays += 1


# ---- without a GPU


KINDS = ["none", "head-chain", "head-tree", "model-chain", "attention-tree", "block-chain", "ngram"]
KINDS += ["attention-fixed-tree", "adaptive-attention"]
"""Drafters of every kind; the others run in `make soak`."""


@pytest.mark.parametrize(
    ("name", "sampling", "rows"),
    [
        *((name, "sampled", 4) for name in KINDS),
        ("adaptive-attention", "greedy", 1),
        ("model-chain", "sampled", 1),
        *(pytest.param(name, "sampled", 4, marks=pytest.mark.soak) for name in NAMES if name not in KINDS),
        *(pytest.param(name, "greedy", 1, marks=pytest.mark.soak) for name in ("none", "head-tree")),
    ],
)
def test_a_replayed_step_gives_the_tokens_of_an_eager_step(name, sampling, rows, monkeypatch):
    """With cache buckets and replays; one row, and a batch whose rows end at different times."""
    target = make_target()
    whole = texts(target, make_drafter(name, target), sampling, rows)
    eos = early_end(whole)
    expected = [row[: next((i for i, token in enumerate(row, 1) if token in eos), len(row))] for row in whole]
    assert len({len(row) for row in expected}) > 1 or rows == 1
    capturing(monkeypatch, Double)
    assert texts(target, make_drafter(name, target), sampling, rows, eos) == expected
    assert Double.made >= (1 if name == "adaptive-attention" else 2)  # its shapes take turns


QUICK = ("none", "attention-tree", "adaptive-attention")
"""A few drafters; the others run in `make soak`, and the test above runs more."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name not in QUICK)) for name in NAMES])
def test_steps_of_one_bucket_launch_the_same(name, monkeypatch):
    """Operations, shapes and host numbers must be equal, or a replay would be wrong."""
    capturing(monkeypatch, Comparison)
    target = make_target()
    texts(target, make_drafter(name, target), "sampled", rows=3)
    assert Comparison.made >= (1 if name == "adaptive-attention" else 2)


def test_captured_numbers_and_waits_for_the_device_are_detected_without_a_gpu(target, monkeypatch):
    """A host number stays as captured; reading a value back from the device fails."""
    capturing(monkeypatch, Comparison)

    class Counting(HeadDrafter):
        steps = 0

        def propose(self, pending, noise, texts):
            self.steps += 1
            return super().propose((pending + self.steps) % 32, noise, texts)

    class Asking(HeadDrafter):
        def propose(self, pending, noise, texts):
            return super().propose(pending * int(pending[0] >= 0), noise, texts)

    for kind, message in ((Counting, "the steps differ"), (Asking, "asks the device")):
        with pytest.raises(AssertionError, match=message):
            Engine(target, kind(tiny_head())).generate([[1, 2]], max_new_tokens=20)


def test_no_graph_of_old_buffers_is_left_if_the_drafter_has_no_memory_to_grow(monkeypatch):
    """The cache grows for a long request, then the drafter fails to: the request fails, and the others go on."""
    target = make_target()
    (expected,) = generate(target, None, PROMPTS[:1], max_new_tokens=40, eos_token_ids=()).tokens
    capturing(monkeypatch, Double)
    engine = Engine(target, make_drafter("head-chain", target), slots=2)
    short = engine.submit(PROMPTS[0], max_new_tokens=40, eos_token_ids=())
    for _ in range(6):
        engine.step()
    assert Double.made

    def fails(capacity: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.drafter.memory, "grow", fails)
        long = engine.submit(list(range(32)) * 2, max_new_tokens=60)
        engine.step()
    engine.run()
    assert long.finish_reason == "memory"
    assert short.tokens == expected


def test_an_engine_keeps_its_graphs(monkeypatch):
    """Other prompts, seeds and temperatures reuse graphs; a grown cache needs new ones."""
    target = make_target()
    turns = [
        (PROMPTS[:2], [Sampling(1.0, seed=8), Sampling(0.5, seed=9)], 16),
        ([[4, 4], [8, 9, 10, 11]], [Sampling(0.7, seed=1), Sampling(1.5, seed=2)], 12),
        ([[1], [5, 5, 5]], [Sampling(0.9, seed=3), Sampling(1.1, seed=4)], 90),
        (PROMPTS[:2], [Sampling(1.0, seed=8), Sampling(0.5, seed=9)], 12),
    ]
    for name in ("head-chain", "attention-fixed-tree"):
        alone = [
            generate(target, make_drafter(name, target), prompts, settings, max_new_tokens=count).tokens
            for prompts, settings, count in turns
        ]
        with monkeypatch.context() as patch:
            capturing(patch, Double)
            engine, made = Engine(target, make_drafter(name, target), slots=2), []
            for (prompts, settings, count), expected in zip(turns, alone, strict=True):
                engine.forget()
                assert engine.generate(prompts, settings, max_new_tokens=count).tokens == expected
                made.append(Double.made)
        assert made[2] > made[1]
        if name == "head-chain":
            assert made[1] == made[0]


@pytest.mark.parametrize("name", ["none", "head-chain", "head-tree"])
def test_steps_with_logprobs_are_replayed_too(name, monkeypatch):
    """One row asks for them. Only its logits are computed again, outside of the graph."""
    target = make_target()
    options = {"max_new_tokens": 12, "eos_token_ids": ()}

    def decoded() -> list:
        engine = Engine(target, make_drafter(name, target), slots=2)
        requests = [engine.submit(PROMPTS[row], logprobs=[None, 2][row], **options) for row in (0, 1)]
        engine.run()
        assert not requests[0].token_logprobs
        chances = [(each.logprob, *(chance for _, chance in each.top)) for each in requests[1].token_logprobs]
        return [
            [request.tokens for request in requests],
            [[i for i, _ in t.top] for t in requests[1].token_logprobs],
        ], (torch.tensor(chances))

    expected, chances = decoded()
    capturing(monkeypatch, Double)
    found, again = decoded()
    assert Double.made
    assert found == expected
    torch.testing.assert_close(again, chances)


@pytest.mark.parametrize("name", ["none", "head-chain", "head-tree"])
def test_steps_of_a_row_that_may_not_end_yet_are_replayed_too(name, monkeypatch):
    """One row has `min_tokens`, and would have ended at once without it."""
    target = make_target()
    ends = set(generate(target, None, PROMPTS[:1], max_new_tokens=6, eos_token_ids=()).tokens[0])

    def decoded(*least: int) -> list:
        engine = Engine(target, make_drafter(name, target), slots=2)
        requests = [
            engine.submit(prompt, max_new_tokens=14, eos_token_ids=ends, min_tokens=own)
            for prompt, own in zip(PROMPTS, least, strict=False)
        ]
        engine.run()
        return [request.tokens for request in requests]

    expected = decoded(14, 0)
    assert len(expected[0]) == 14
    assert len(decoded(0)[0]) == 1
    capturing(monkeypatch, Double)
    assert decoded(14, 14)[0] == expected[0]
    assert Double.made
    assert decoded(14, 0) == expected


def test_a_drop_of_a_pools_only_graph_leaves_its_pool():
    """torch can't capture into a pool whose graphs are gone, so the next keys would fail too."""
    work = graphs.Captured(lambda: None, pool=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.Captured, "failures", 0)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: 2)
        work._entries["a"], work._entries["b"] = graphs._Entry(graph=Mock()), graphs._Entry(graph=Mock())
        work._drop("a", inf, "")
        assert work.pool == 1
        work._drop("b", inf, "")
        assert work.pool == 2


def test_a_chunk_next_to_a_long_prefix_fits_the_rounded_cache(monkeypatch):
    """One prompt has a prefix in its slot already, the other has none."""
    target = make_target()
    monkeypatch.setitem(cache_module.BUCKETS, "cpu", 32)
    prompts = [[i % 31 for i in range(48)], [i % 7 for i in range(48)]]
    expected = [generate(target, None, [prompt], max_new_tokens=4).tokens[0] for prompt in prompts]
    engine = Engine(target, slots=2, chunk=64)
    engine.generate([prompts[0][:40]], max_new_tokens=2)
    assert engine.generate(prompts, max_new_tokens=4).tokens == expected


def test_graphs_of_a_grown_cache_get_a_new_pool(monkeypatch):
    """torch rejects a capture into a pool whose graphs are gone."""
    target, pools = make_target(), []
    capturing(monkeypatch, Double)
    double = graphs.capture
    monkeypatch.setattr(graphs, "new_pool", lambda device: object())
    monkeypatch.setattr(graphs, "capture", lambda work, pool, *given: pools.append(pool) or double(work, pool, *given))
    engine = Engine(target, make_drafter("head-chain", target), slots=1)
    for count in (20, 120):
        engine.generate([[1, 2]], max_new_tokens=count, eos_token_ids=())
        if count == 20:
            before = set(map(id, pools))
    assert len(before) == 1
    assert len(set(map(id, pools))) == 2


def test_requests_join_and_leave_captured_steps(monkeypatch):
    """Rows finish, are replaced, or wait in a captured step for the rest of their prompt."""
    target = make_target()
    prompts = [PROMPTS[i % 4][: 1 + i] for i in range(10)]
    settings = [replace(SAMPLINGS["sampled"][i % 4], seed=i) for i in range(10)]
    limits = [3, 30, 7, 12, 22, 5, 9, 16, 2, 11]
    for name in ("none", "model-tree", "attention-fixed-tree"):
        expected = [
            generate(target, make_drafter(name, target), [prompt], [own], max_new_tokens=limit).tokens[0]
            for prompt, own, limit in zip(prompts, settings, limits, strict=True)
        ]
        with monkeypatch.context() as patch:
            capturing(patch, Double)
            engine = Engine(target, make_drafter(name, target), slots=3, chunk=4)
            assert engine.generate(prompts, settings, max_new_tokens=limits).tokens == expected
            assert Double.made >= 2


def test_drafters_that_need_the_host_run_eagerly(target, monkeypatch):
    capturing(monkeypatch, Double)

    def tokens(drafter):
        return Engine(target, drafter, slots=2).generate(PROMPTS[:2], max_new_tokens=12).tokens

    plain = tokens(None)
    assert Double.made
    Double.made = 0
    assert tokens(Oracle(plain, prompts=PROMPTS)) == plain
    target.capturable = False
    assert tokens(HeadDrafter(tiny_head())) == plain
    assert Double.made == 0


def test_generate_captures_only_if_the_expected_steps_pay_for_it(target, monkeypatch):
    capturing(monkeypatch, Double)
    short = generate(target, HeadDrafter(tiny_head()), PROMPTS[:2], max_new_tokens=20).tokens
    assert Double.made == 0
    prompts = PROMPTS[:2] * 16
    long = generate(target, HeadDrafter(tiny_head()), prompts, max_new_tokens=20, max_batch_size=2).tokens
    assert Double.made > 0
    assert long == short * 16


def test_the_least_recently_used_graph_is_freed(target, monkeypatch):
    """Three kinds of sampling take turns, and two graphs are kept."""
    capturing(monkeypatch, Double)
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    monkeypatch.setitem(cache_module.BUCKETS, "cpu", 256)
    freed = []
    monkeypatch.setattr(Double, "reset", lambda graph: freed.append(graph))
    engine = Engine(target, slots=1)
    samplings = [Sampling(), Sampling(1.0, seed=1), Sampling(1.0, min_p=0.1, seed=2)]
    expected = [generate(target, None, PROMPTS[:1], one, max_new_tokens=8).tokens for one in samplings]
    for turn in range(2):
        for one, tokens in zip(samplings, expected, strict=True):
            engine.forget()
            assert engine.generate(PROMPTS[:1], one, max_new_tokens=8).tokens == tokens
        assert (Double.made, len(freed)) == ((3, 1) if turn == 0 else (6, 4))


def refused(work, pool, *given):
    raise RuntimeError("operation not permitted when stream is capturing")


class Wrong(Double):
    """A graph whose replay gives a wrong result."""

    def replay(self):
        super().replay()
        self.result[0].add_(1)


class Forgetful(Double):
    """A graph that gives the right result but does not update the cache's lengths."""

    def __init__(self, work, given):
        lengths = given[0].cache.lengths
        before = lengths.clone()
        super().__init__(work, given)
        lengths.copy_(before)


@pytest.mark.parametrize("kind", [refused, Wrong, Forgetful])
def test_three_failed_or_wrong_graphs_switch_capturing_off(kind, monkeypatch):
    target, name = make_target(), "head-tree"

    def tokens() -> list[list[int]]:
        return texts(target, make_drafter(name, target), "greedy", 2, max_new_tokens=90)

    expected = tokens()
    capturing(monkeypatch, Double if kind is refused else kind)
    if kind is refused:
        monkeypatch.setattr(graphs, "capture", refused)
    with pytest.warns(UserWarning, match="not permitted" if kind is refused else "differed") as warned:
        assert tokens() == expected
    assert len(warned) == 1
    assert not graphs.enabled
    made = Double.made, kind.made if kind is not refused else 0
    assert tokens() == expected
    assert made == (Double.made, kind.made if kind is not refused else 0)


@pytest.mark.parametrize("name", ["head-chain", "attention-tree"])
def test_a_request_whose_states_are_not_finite_leaves_captures_on(name, monkeypatch):
    """NaN differs from NaN, and what is compared holds the states of all rows."""
    target = Target(tiny_model().double(), None)
    target.model.get_input_embeddings().weight.data[31] = torch.nan
    capturing(monkeypatch, Double)
    engine = Engine(target, make_drafter(name, target), slots=2)
    settings = {"max_new_tokens": 60, "eos_token_ids": ()}
    bad, good = engine.submit([5, 31], **settings), engine.submit([1, 2, 3], **settings)
    engine.run()
    assert (bad.finish_reason, good.finish_reason) == ("not_finite", "length")
    assert (graphs.Captured.failures, Double.made > 1) == (0, True)
    assert all(buffer.isfinite().all() for buffer in (*engine.cache.state, *engine.rows.memory.buffers))


@pytest.mark.parametrize("fault", [RuntimeError("not permitted"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_failed_capture_costs_its_own_key_alone(fault, monkeypatch):
    """The first key fails; graphs of the others are made. After a lack of memory the key is tried again."""
    target = make_target()
    expected = texts(target, None, "greedy", 2, max_new_tokens=60)
    capturing(monkeypatch, Double)
    monkeypatch.setattr(graphs, "_RETRY", 4)
    capture, tried = graphs.capture, []

    def fails_once(work, pool, *given):
        tried.append(given[0].cache.longest)
        if len(tried) == 1:
            raise fault
        return capture(work, pool, *given)

    monkeypatch.setattr(graphs, "capture", fails_once)
    assert texts(target, None, "greedy", 2, max_new_tokens=60) == expected
    assert graphs.enabled
    assert tried == ([16, 32, 48, 64] if fault.args[0] == "not permitted" else [16, 16, 32, 48, 64])


def test_calls_that_fail_do_not_count(monkeypatch):
    """A step that lacks memory is tried again by the caller."""
    capturing(monkeypatch, Double)
    failing = [False, True, True, False, False, False]

    def work(x):
        if failing and failing.pop(0):
            raise torch.OutOfMemoryError
        return x + 1

    captured, x = graphs.Captured(work, None), torch.zeros(3)
    results = []
    for _ in range(8):
        with contextlib.suppress(torch.OutOfMemoryError):
            results.append(captured("key", [], x).clone())
    assert len(results) == 6
    assert all(torch.equal(result, x + 1) for result in results)
    assert Double.made == 1


def test_an_engine_frees_its_cache_when_deleted(target, monkeypatch):
    """A cache in a reference cycle would wait for the garbage collector."""
    monkeypatch.setattr(graphs, "DEVICES", ())
    for captured in (False, True):
        if captured:
            capturing(monkeypatch, Double)
        gc.collect()
        gc.disable()
        try:
            engine = Engine(target, HeadDrafter(tiny_head()), slots=2)
            engine.generate(PROMPTS[:2], max_new_tokens=20)
            cache = weakref.ref(engine.cache)
            del engine
            assert cache() is None
        finally:
            gc.enable()


def test_measured_costs_exclude_captures(target, monkeypatch):
    """Slow captures change no cost."""
    capturing(monkeypatch, Double)
    quick = graphs.capture

    def slow(work, pool, *given):
        time.sleep(0.2)
        return quick(work, pool, *given)

    monkeypatch.setattr(graphs, "capture", slow)
    pairs = paired_steps(target, HeadDrafter(tiny_head()), PROMPTS[:2], Sampling(), 8)
    assert Double.made
    assert len(pairs) == 8
    assert max(max(pair) for pair in pairs) < 0.2


def test_a_run_with_a_capture_is_timed_again(target, monkeypatch):
    capturing(monkeypatch, Double)
    engines: Engines = {}
    drafter = HeadDrafter(tiny_head())
    for prompts in (PROMPTS[:1], PROMPTS[2:3], PROMPTS[:2], PROMPTS[:1]):
        timed, seen = Timed(), []

        def replay(graph, seen=seen, original=Double.replay):
            seen.append(graph.replays)
            original(graph)

        with monkeypatch.context() as patch:
            patch.setattr(Double, "replay", replay)
            time_ours(target, drafter, prompts, Sampling(), 20, timed, engines=engines)
        (decoded,) = timed.batches
        assert decoded.tokens == generate(target, None, prompts, max_new_tokens=20).tokens
        assert 0 not in seen[-len(decoded.steps[0]) :], "the run that counts replays what was there"


def test_a_model_that_waits_for_the_device_is_not_capturable():
    assert make_target().capturable
    experts = tiny_model("mixtral")
    experts.set_experts_implementation("eager")
    config = copy.deepcopy(CONFIGS["llama"])
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for model in (experts, AutoModelForCausalLM.from_config(config)):
        assert not Target(model, tokenizer=None).capturable


def test_operations_that_wait_for_the_device_are_recorded():
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.arange(4)
            with HostSyncs() as syncs:
                x.sum().item()
                x[x > 1]
                x + torch.tensor([1, 2, 3, 4])
                x[x.flip(0)] = torch.where(x > 2, x, 0).cumsum(0)
            assert Counter(syncs.names) == {"_local_scalar_dense": 1, "index": 1, "lift_fresh": 1}


# ---- with one

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def on_gpu(monkeypatch, request) -> Target:
    monkeypatch.setitem(cache_module.BUCKETS, "cuda", 16)
    return make_target("cuda", request.param)


ON_THE_GPU = [
    *("none", "head-chain", "head-tree", "head-candidates", "model-chain", "model-tree", "attention-chain"),
    *("attention-tree", "block-chain", "block-tree", "ngram", "attention-fixed-tree", "adaptive-attention"),
]


def test_the_drafters_of_the_gpu_tests_exist():
    """A wrong name would be seen only where there is a GPU."""
    assert [make_drafter(name) is None for name in ON_THE_GPU] == [name == "none" for name in ON_THE_GPU]


@pytest.mark.parametrize("name", ON_THE_GPU)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rows", [1, 4])
class TestOnTheGpu:
    pytestmark = gpu

    def test_replayed_and_called_steps_give_the_same_tokens(self, on_gpu, name, sampling, rows):
        """Lengths grow through several captures, rows end at different times."""
        eos = early_end(texts(on_gpu, make_drafter(name, on_gpu), sampling, rows))
        replayed = texts(on_gpu, make_drafter(name, on_gpu), sampling, rows, eos)
        on_gpu.capturable = False
        assert replayed == texts(on_gpu, make_drafter(name, on_gpu), sampling, rows, eos)

    @torch.inference_mode()
    def test_a_replay_does_not_wait_for_the_device(self, on_gpu, name, sampling, rows):
        cache_module.BUCKETS["cuda"] = 64  # all steps of one key; `on_gpu` puts it back
        engine = Engine(on_gpu, make_drafter(name, on_gpu), slots=rows)
        for prompt, own in zip(PROMPTS, SAMPLINGS[sampling][:rows], strict=False):
            engine.submit(prompt, own, max_new_tokens=64)
        for _ in range(4):  # warm-up, capture, proof
            engine.step()
        before = engine.cache.lengths.clone()
        batch = engine.schedule()
        torch.cuda.set_sync_debug_mode("error")
        try:
            report, _ = engine.forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(engine.cache.lengths, before + report[:, -3] + 1)
