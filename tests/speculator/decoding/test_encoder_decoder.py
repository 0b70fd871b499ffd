"""Decoding of encoder-decoder targets: texts are the model's own, whatever drafts and whoever else is in the batch."""

import pytest
import torch
from conftest import tiny_head, tiny_model
from encoder_decoders import CONFIGS, VOCAB, random_texts, tiny_encoder_decoder
from enumeration import distance_of_runs, joint_distribution
from transformers import T5Config, T5ForConditionalGeneration

from speculator import DraftModelDrafter, Engine, HeadDrafter, Sampling, Target, UserError, generate
from speculator.custom_generate import speculative
from speculator.decoding import scheduler
from speculator.drafters import Chain, FixedTree
from speculator.drafters.ngram import NgramDrafter
from speculator.target.text import Text

_SOURCES = random_texts(9, 3, 14, 5, 7, 9, 2, 11)
_COUNTS = [10, 4, 7, 10, 1, 8, 10, 5]
_FAMILIES = ("t5", "bart", "t5gemma")
"""One for each way in which a decoder knows positions; the others run in `make soak`."""
_OTHERS = ("flan", "umt5", "marian")
_SHAPES = {"chain": 3, "tree": FixedTree([(0,), (1,), (0, 0), (0, 1)])}


def texts_of(model, sources, counts) -> list[list[int]]:
    """Decode each source alone by transformers, greedily, without the start token."""
    texts = []
    for source, count in zip(sources, counts, strict=True):
        ids = torch.tensor([source])
        settings = {"max_new_tokens": count, "num_beams": 1, "do_sample": False, "eos_token_id": None}
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, 1:].tolist())
    return texts


def nearly(family: str) -> Target:
    """Make a target whose weights are a little off."""
    small, generator = tiny_encoder_decoder(family), torch.Generator().manual_seed(5)
    for weight in small.parameters():
        weight.data *= 1 + 0.1 * torch.randn(weight.shape, generator=generator)
    return Target(small, tokenizer=None)


@pytest.fixture(
    scope="module",
    params=[*_FAMILIES, *(pytest.param(name, marks=pytest.mark.soak) for name in _OTHERS if name in CONFIGS)],
)
def case(request):
    """A target, every kind of drafter for it, and its texts by transformers."""
    model = tiny_encoder_decoder(request.param)
    expected = texts_of(model, _SOURCES, _COUNTS)
    target, small = Target(model, tokenizer=None), nearly(request.param)
    drafters = {f"model-{name}": DraftModelDrafter(small, target, shape) for name, shape in _SHAPES.items()}
    drafters |= {"lookup": NgramDrafter(4), "none": None}
    drafters["mlp"] = HeadDrafter(tiny_head(vocab_size=VOCAB))
    return target, drafters, expected


def test_greedy_texts_are_those_of_transformers(case):
    target, drafters, expected = case
    assert len(set(map(tuple, expected))) >= 6  # the source matters
    for name, drafter in drafters.items():
        for batch in (1, 3, 8) if name in ("model-tree", "lookup") else (3,):  # rows end, others take their places
            settings = {"max_new_tokens": _COUNTS, "eos_token_ids": [], "max_batch_size": batch}
            assert generate(target, drafter, _SOURCES, **settings).tokens == expected, (name, batch)


def test_sampled_texts_are_the_same_with_and_without_drafts(case):
    target, drafters, _ = case
    settings = {"max_new_tokens": _COUNTS, "eos_token_ids": []}
    plain = generate(target, None, _SOURCES, Sampling(1.0), max_batch_size=1, **settings).tokens
    for name, drafter in drafters.items():
        found = generate(target, drafter, _SOURCES, Sampling(1.0), rule="match", max_batch_size=3, **settings)
        assert found.tokens == plain, name


def test_a_source_whose_states_are_not_finite_leaves_nothing(case, monkeypatch):
    """Its keys are masked for a shorter source in its row, but NaN + -inf is NaN."""
    target, drafters, expected = case
    bad, encode = (1,) * 14, target.encoder.encode

    def broken(sources):
        states = encode(sources)
        return states * torch.nan if bad in sources else states

    monkeypatch.setattr(target.encoder, "encode", broken)
    engine = Engine(target, drafters["model-tree"], slots=2)
    settings = {"eos_token_ids": []}
    failed = [engine.submit(bad, **settings) for _ in range(2)]
    engine.run()
    assert [request.finish_reason for request in failed] == ["not_finite"] * 2
    assert engine.generate(_SOURCES, max_new_tokens=_COUNTS, **settings).tokens == expected


def test_a_draft_model_reads_the_source_with_its_own_encoder(case):
    target, *_ = case
    settings = {"max_new_tokens": 16, "eos_token_ids": []}
    same = generate(target, DraftModelDrafter(target, target, 3), _SOURCES, **settings)
    assert same.acceptance_length == 4


def test_a_draft_model_may_read_and_write_less_than_its_target():
    target, short = (
        Target(tiny_encoder_decoder("bart", max_position_embeddings=longest), tokenizer=None) for longest in (128, 64)
    )
    sources, settings = random_texts(80, 63, 64, 65), {"max_new_tokens": 70, "eos_token_ids": []}
    plain = generate(target, None, sources, **settings).tokens
    assert generate(target, DraftModelDrafter(short, target, 2), sources, **settings).tokens == plain


@pytest.fixture
def forced() -> Target:
    """A target whose decoder starts with two tokens, so that a slot has one whose keys and values could be reused."""
    model = tiny_encoder_decoder("bart", torch.float64)
    model.generation_config.forced_bos_token_id = 7
    return Target(model, tokenizer=None)


def _logprobs(*engines: Engine) -> torch.Tensor:
    """Log-probabilities of each source's text, decoded one after the other by one engine, or by one engine each."""
    found = []
    for source, engine in zip(_SOURCES, engines * (len(_SOURCES) // len(engines)), strict=True):
        request = engine.submit(source, max_new_tokens=4, logprobs=0, eos_token_ids=[])
        engine.run()
        found += [token.logprob for token in request.token_logprobs]
    return torch.tensor(found, dtype=torch.float64)


def test_no_prefix_is_reused_across_sources(forced, monkeypatch):
    fresh = _logprobs(*(Engine(forced, None, slots=1) for _ in _SOURCES))
    assert (_logprobs(Engine(forced, None, slots=1)) - fresh).abs().max() < 1e-10
    monkeypatch.setattr(scheduler, "source_of", lambda sequence: ())
    assert (_logprobs(Engine(forced, None, slots=1)) - fresh).abs().max() > 1e-3


def test_a_prefix_is_reused_for_the_same_source(forced):
    engine = Engine(forced, None, slots=1)
    first = engine.generate(_SOURCES[:1], max_new_tokens=8, eos_token_ids=[])
    read = engine.num_prefilled_tokens
    assert engine.generate(_SOURCES[:1], max_new_tokens=8, eos_token_ids=[]).tokens == first.tokens
    assert engine.num_prefilled_tokens - read == 1


def test_requests_in_flight_survive_another_drafter(forced):
    expected = generate(forced, None, _SOURCES, max_new_tokens=16, eos_token_ids=[]).tokens
    engine = Engine(forced, NgramDrafter(3), slots=3)
    requests = [engine.submit(source, max_new_tokens=16, eos_token_ids=[]) for source in _SOURCES]
    for _ in range(6):
        engine.step()
    engine.replace_drafter(DraftModelDrafter(forced, forced, 2))
    engine.run()
    assert [request.tokens for request in requests] == expected


class _OfSource:
    """A model that has a source, called as a causal LM is."""

    def __init__(self, model, source):
        self.model, self.source = model, torch.tensor([source])

    def __call__(self, tokens, use_cache):
        return self.model(input_ids=self.source.expand(len(tokens), -1), decoder_input_ids=tokens, use_cache=False)


def four_tokens(seed: int) -> T5ForConditionalGeneration:
    sizes = {"vocab_size": 4, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).double().eval()
    for weight in model.parameters():
        weight.data *= 2
    return model


@pytest.mark.parametrize(("rule", "rows"), [("match", 2), ("rejection", 1), ("block", 1)])
def test_the_distribution_is_that_of_the_target(monkeypatch, rule, rows):
    target, draft = (Target(four_tokens(seed), tokenizer=None) for seed in (3, 4))
    sampling, sources, count = Sampling(1.0, top_k=2), [[1, 2, 3, 1], [3, 2]][:rows], 3

    def run() -> tuple[int, ...]:
        engine = Engine(target, DraftModelDrafter(draft, target, 2), slots=2, rule=rule)
        requests = [engine.submit(s, sampling, max_new_tokens=count, eos_token_ids=[]) for s in sources]
        engine.run()
        return tuple(token for request in requests for token in request.tokens)

    exact, swapped = ({(): 1.0}, {(): 1.0})
    for source, other in zip(sources, [[3, 2], [1, 2, 3, 1]], strict=False):
        own, wrong = (joint_distribution(_OfSource(four_tokens(3), s), [0], count, sampling) for s in (source, other))
        exact = {(*a, *b): p * q for a, p in exact.items() for b, q in own.items()}
        swapped = {(*a, *b): p * q for a, p in swapped.items() for b, q in wrong.items()}
    assert distance_of_runs(monkeypatch, run, exact) < 1e-12
    assert sum(abs(p - swapped.get(text, 0)) for text, p in exact.items()) > 0.1  # the source matters


def test_lookup_finds_what_followed_in_the_source():
    text = Text([0, 5, 6], (9, 5, 6, 7, 8, 3))
    drafter = NgramDrafter(3)
    assert drafter.look([text]) == [(2, [7, 8, 3])]
    text.extend([7, 8, 3])  # the source ends there, and is not followed by the text
    assert drafter.look([text]) == [(0, [])]
    text += [6]  # the end matches both in the text and in the source
    assert drafter.look([text]) == [(1, [7, 8, 3])]
    assert drafter.look([Text([0, 4, 1, 4], (2, 3, 4, 5))]) == [(1, [5])]


def test_unfit_drafts_and_sources_are_refused(forced):
    causal, other = Target(tiny_model(), tokenizer=None), Target(tiny_encoder_decoder("marian"), tokenizer=None)
    for model, target in ((causal, forced), (forced, causal), (other, forced)):
        with pytest.raises(UserError, match="encoder"):
            DraftModelDrafter(model, target, Chain(2))
    with pytest.raises(UserError, match="room for 64"):
        generate(forced, None, [[5] * 65])


def test_max_model_len_limits_the_source_too():
    target = Target(tiny_encoder_decoder("t5"), tokenizer=None)
    generate(target, None, [[5] * 13], max_new_tokens=2)
    target.limit(12)
    with pytest.raises(UserError, match="room for 12"):
        generate(target, None, [[5] * 13], max_new_tokens=2)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_transformers_generate_decodes_with_drafts(family):
    model, plain = tiny_encoder_decoder(family), tiny_encoder_decoder(family)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(source) for source in _SOURCES[:3]], True, 1)
    settings = {"attention_mask": (ids != 1).long(), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    for _ in range(2):  # the model is given back after each call
        found = model.generate(ids, **settings, custom_generate=speculative(NgramDrafter(3)))
        assert torch.equal(found, plain.generate(ids, **settings))
        assert torch.equal(model.generate(ids, **settings), found)


def test_a_draft_model_has_no_source_inside_of_generate():
    """`generate` passes on the encoder's states, which are the target's own."""
    model = tiny_encoder_decoder("t5")
    ids = torch.tensor([_SOURCES[0]])
    drafter = DraftModelDrafter(nearly("t5"), Target(model, tokenizer=None))
    with pytest.raises(UserError, match="encoded states only"):
        model.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=speculative(drafter))
