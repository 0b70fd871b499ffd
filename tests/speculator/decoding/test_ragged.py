"""A verify step computes what exists: one row's long draft costs the others nothing."""

import pytest
import torch
from conftest import tiny_model
from enumeration import distance_of_runs, four_token_pair, joint_distribution

from speculator import Engine, HeadDrafter, Sampling, Target, generate
from speculator.decoding import sampling as sampling_module
from speculator.decoding.draft import Draft
from speculator.decoding.sampling import Noise, RowSampling
from speculator.decoding.verify import REJECTION_RULES
from speculator.drafters.ngram import NgramDrafter

REPEATS = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3
OTHERS = [[10 + i, 16 + 2 * i, 31 - 3 * i] for i in range(5)]


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model().double(), tokenizer=None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_and_noise_are_computed_for_the_tokens_that_exist(target, temperature, monkeypatch):
    engine = Engine(target, NgramDrafter(8), slots=6)
    for number, prompt in enumerate([REPEATS, *OTHERS]):
        engine.submit(prompt, Sampling(temperature, seed=number), max_new_tokens=99)
    engine.step()  # prefill, and the first verification
    counted = {"logits": 0, "noise": 0, "layers": 0}
    logits, gumbel, layer = target.logits, sampling_module.gumbel, target.model.model.layers[0].mlp.forward

    def counting(name, function, size):
        def counted_function(*args):
            result = function(*args)
            counted[name] += size(result)
            return result

        return counted_function

    monkeypatch.setattr(target, "logits", counting("logits", logits, lambda out: out[..., 0].numel()))
    monkeypatch.setattr(sampling_module, "gumbel", counting("noise", gumbel, lambda out: out[..., 0].numel()))
    mlp = target.model.model.layers[0].mlp
    monkeypatch.setattr(mlp, "forward", counting("layers", layer, lambda out: out[..., 0].numel()))
    requests, ragged = [slot.request for slot in engine.scheduler.slots], 0
    for _ in range(12):
        counted.update(dict.fromkeys(counted, 0))
        engine.step()
        drafted = [request.steps[-1].drafted for request in requests]
        tokens, padded = sum(drafted) + len(drafted), len(drafted) * (1 + max(drafted))
        ragged += tokens < padded
        assert counted["logits"] == tokens
        assert counted["noise"] == (tokens if temperature else 0)
        assert tokens <= counted["layers"] <= padded
    assert ragged


@pytest.mark.parametrize("ragged", [False, True])
def test_noise_that_made_the_draft_is_not_made_again(ragged, monkeypatch):
    made, gumbel = [], sampling_module.gumbel
    monkeypatch.setattr(sampling_module, "gumbel", lambda *given: made.append(len(given[0])) or gumbel(*given))
    sampling = RowSampling([Sampling(1.0, seed=row) for row in range(6)], torch.device("cpu"))
    noise = Noise(sampling, torch.arange(6), 32, 4, coupled=True)
    for level in range(2):
        noise.scores(torch.zeros(6, 1, 32), level)
    lengths = torch.tensor([2, 2, 4, 2, 0, 2] if ragged else [2] * 6)
    draft = Draft(torch.zeros(6, 4 if ragged else 2, dtype=torch.long), lengths, ragged=ragged)
    logits = torch.randn(6, draft.tokens.shape[1] + 1, 32)
    samples = noise.samples(logits if draft.unpadded is None else logits[draft.unpadded], draft, draft.unpadded)
    assert sum(made) == 2 * 6 + (
        5 + 2 if ragged else 6
    )  # two levels, then the depths 2 to 4 of the rows that have them
    whole = gumbel(sampling.seeds[:, None], torch.arange(6)[:, None] + draft.depths, 32)
    expected = (logits + whole).argmax(-1)
    there = torch.arange(logits.shape[1]) <= lengths[:, None]
    assert torch.equal(samples[there], expected[there])


@pytest.mark.parametrize("drafter", [None, NgramDrafter(8)])
def test_a_row_reads_its_own_keys(target, drafter, monkeypatch):
    """Neighbours of like length are padded to the longest of them, by less than another call costs."""
    # A position has the keys of 2 heads of 8, so that a call costs as much as 64 positions.
    monkeypatch.setattr("speculator.target.attention.write._CALL", 64 * 2 * 8)
    engine, fused, read = Engine(target, drafter, slots=5), torch.nn.functional.scaled_dot_product_attention, []
    for length in (7, 100, 5, 9, 30):
        engine.submit([i * i % 31 for i in range(length)], max_new_tokens=99)
    engine.step()

    def counting(query, key, value, **options):
        read.append((len(key), key.shape[2]))
        return fused(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    requests, layers = [slot.request for slot in engine.scheduler.slots], len(target.model.model.layers)
    for _ in range(6):
        read.clear()
        before = [len(request.sequence) for request in requests]
        engine.step()
        own = [length + request.steps[-1].drafted for length, request in zip(before, requests, strict=True)]
        positions = sum(rows * extent for rows, extent in read) / layers
        assert sum(own) <= positions <= sum(own) + 64 * len(read) / layers < len(own) * max(own)


def test_seeded_texts_do_not_depend_on_the_rows_and_their_drafts(target):
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 32, (3 + i % 9,), generator=draw).tolist() * (1 + i % 3) for i in range(32)]
    settings = [Sampling(i % 3 / 2, seed=i) for i in range(32)]
    plain = [
        generate(target, None, [p], [s], max_new_tokens=16).tokens[0] for p, s in zip(prompts, settings, strict=True)
    ]
    for rows in (1, 4, 16):
        drafted = generate(target, NgramDrafter(6), prompts, settings, max_new_tokens=16, max_batch_size=rows)
        assert drafted.tokens == plain, rows


# ---- how long each row's draft is


@pytest.fixture(scope="module")
def small():
    target, head = four_token_pair()
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.data *= 4
    return target, head


class Cut(HeadDrafter):
    """Drafts two tokens and keeps as many as `lengths` says of the laws [R, 2, V] and of the tokens."""

    def __init__(self, head, lengths):
        super().__init__(head, 2)
        self.lengths = lengths

    def propose(self, pending, noise, texts):
        draft = super().propose(pending, noise, texts)
        laws = draft.probs if draft.probs is not None else torch.ones(*draft.tokens.shape, 4)
        return Draft(draft.tokens, self.lengths(laws, draft.tokens), draft.probs, ragged=True)


def by_price(laws, tokens):
    """Each token is kept while the chance of the likeliest ones up to it is at least a price."""
    return (laws.amax(-1).cumprod(1) >= 0.6).sum(1)


def by_drawn_token(laws, tokens):
    """A token is kept if it was likely itself."""
    return (laws.gather(2, tokens[:, :, None])[:, :, 0] >= 0.6).long().cumprod(1).sum(1)


def by_budget(laws, tokens):
    """The number of tokens with the most expected ones per cost: whether the first is kept depends on the second."""
    kept = torch.cat([torch.ones(len(laws), 1), laws.amax(-1).cumprod(1)], 1).cumsum(1)
    return (kept / torch.tensor([1.0, 2.0, 2.35])).argmax(1)


def distance(small, monkeypatch, lengths, rule, rows=1, count=3) -> float:
    target, head = small
    sampling, prompts = Sampling(1.0, top_k=2), [[0, 1, 0, 2], [3, 1]][:rows]

    def run() -> tuple[int, ...]:
        engine = Engine(target, Cut(head, lengths), slots=rows, rule=rule)
        requests = [engine.submit(prompt, sampling, max_new_tokens=count) for prompt in prompts]
        engine.run()
        return tuple(token for request in requests for token in request.tokens)

    exact = {(): 1.0}
    for prompt in prompts:
        own = joint_distribution(target.model, prompt, count, sampling)
        exact = {(*a, *b): p * q for a, p in exact.items() for b, q in own.items()}
    return distance_of_runs(monkeypatch, run, exact, REJECTION_RULES)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_lengths_that_follow_from_laws_keep_the_distribution(small, monkeypatch, rule):
    assert distance(small, monkeypatch, by_price, rule) < 1e-12


@pytest.mark.parametrize(("wrong", "rule"), [(by_drawn_token, "block"), (by_budget, "rejection")])
def test_lengths_that_depend_on_the_token_that_they_drop_are_seen(small, monkeypatch, wrong, rule):
    assert distance(small, monkeypatch, wrong, rule) > 0.01


@pytest.mark.parametrize("lengths", [by_drawn_token, by_budget])
def test_under_match_any_length_keeps_the_distribution(small, monkeypatch, lengths):
    assert distance(small, monkeypatch, lengths, "match") < 1e-12


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_ragged_rows_keep_their_joint_distribution(small, monkeypatch, rule):
    assert distance(small, monkeypatch, by_price, rule, rows=2, count=2) < 1e-12
