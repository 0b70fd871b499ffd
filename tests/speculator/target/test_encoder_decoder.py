"""Encoder-decoder targets: passes over ragged rows give the model's own logits, each row with its own source."""

import copy

import pytest
import torch
from conftest import tiny_tokenizer
from encoder_decoders import CONFIGS, random_texts, tiny_encoder_decoder
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration, T5Gemma2Config, WhisperConfig

from speculator import Target, UserError
from speculator.decoding.draft import Draft
from speculator.target.attention import attention
from speculator.target.attention.attention import set_attention
from speculator.target.encoder import positions
from speculator.target.loading import auto_class
from speculator.target.probe import gap
from speculator.target.text import Text

_SOURCES, _TEXTS = random_texts(11, 4, 7), random_texts(24, 24, 24, seed=2)
_LENGTHS = [2, 10, 6]
_PARENTS = [-1, -1, 0, 0, 2, 1]
"""A tree of six tokens, three levels deep."""


def own_logits(model, source, text):
    """Compute the model's own logits of a text, alone and without a cache."""
    given = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([text])}
    # Given, because some families make them from pad tokens.
    masks = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
    with torch.no_grad():
        return model(**given, **{mask: torch.ones_like(given[ids]) for mask, ids in masks.items()}).logits[0]


def largest_gap(model, *, sources=_SOURCES, change=lambda target, cache: None, depths=lambda depths: depths) -> float:
    """Run a ragged prefill, a rejected draft, a verification and a tree; return the largest gap to the own logits."""
    reference, target = copy.deepcopy(model), Target(model, tokenizer=None)
    own = [own_logits(reference, source, text) for source, text in zip(_SOURCES, _TEXTS, strict=True)]
    cache, gaps = target.cache(3, 64), []
    cache.read_sources([Text((), tuple(source)) for source in sources])
    change(target, cache)
    for width, right, counts, kept in ((10, 10, _LENGTHS, _LENGTHS), (4, 1, None, [1] * 3), (5, 5, None, [2] * 3)):
        begins = cache.lengths.tolist()
        tokens = torch.tensor([text[n : n + width] for text, n in zip(_TEXTS, begins, strict=True)])
        tokens[:, right:] = (tokens[:, right:] + 1) % target.vocab_size  # the rest of a draft is wrong
        logits = target.logits(target.extend(cache, tokens, counts=counts))
        for row, (n, begin) in enumerate(zip(counts or [right] * 3, begins, strict=True)):
            gaps.append(gap(logits[row, :n], own[row][begin : begin + n]))
        cache.commit(torch.tensor(kept))
        cache.select(0, 3, int(cache.lengths.max()))
    begins, nodes = cache.lengths.tolist(), torch.tensor(random_texts(6, 6, 6, seed=3))
    tree = Draft(nodes, torch.full((3,), 6), parents=torch.tensor([_PARENTS] * 3), depth=3)
    tree.depths = depths(tree.depths)
    pending = torch.tensor([text[n : n + 1] for text, n in zip(_TEXTS, begins, strict=True)])
    logits = target.logits(target.extend(cache, torch.cat([pending, nodes], 1), tree))
    for row, begin in enumerate(begins):
        for leaf in (3, 4, 5):
            path = [k for k in tree.paths[row, leaf + 1].tolist() if k > 0]
            text = _TEXTS[row][: begin + 1] + [int(nodes[row, k - 1]) for k in path]
            gaps.append(gap(logits[row, path], own_logits(reference, _SOURCES[row], text)[begin + 1 :]))
    return max(gaps)


_IN_FLOAT32 = ("t5gemma", "switch")
"""Families that compute their norms or their router in float32, whatever the dtype of the weights."""


@pytest.mark.parametrize("family", CONFIGS)
def test_ragged_rows_have_the_models_own_logits(family):
    assert largest_gap(tiny_encoder_decoder(family, torch.float64)) < (1e-5 if family in _IN_FLOAT32 else 1e-11)


def test_cross_attention_in_blocks_of_queries_reads_its_mask_in_each(monkeypatch):
    monkeypatch.setattr(attention, "_SCORES", 200)
    assert largest_gap(tiny_encoder_decoder("t5gemma", torch.float64)) < 1e-5


_WRONG = {
    "one position for all rows": {"change": lambda target, cache: positions.remove(target.model.get_decoder())},
    "swapped sources": {"sources": [_SOURCES[k] for k in (1, 0, 2)]},
    "a visible pad": {"change": lambda target, cache: setattr(cache.cross, "bias", None)},
    "wrong depths in a tree": {"depths": lambda depths: depths.clamp(max=1)},
}


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("wrong", _WRONG)
def test_known_wrong_variants_change_the_logits(family, wrong):
    assert not largest_gap(tiny_encoder_decoder(family, torch.float64), **_WRONG[wrong]) < 0.01


@pytest.mark.parametrize("family", ["t5", "bart", "t5gemma"])
def test_hidden_states_of_padded_pairs_are_those_of_each_pair(family):
    model = tiny_encoder_decoder(family, torch.float64)
    reference, target = copy.deepcopy(model), Target(model, tokenizer=None)
    logits = target.logits(target.hidden(torch.tensor(_TEXTS), sources=_SOURCES))
    for row, (source, text) in enumerate(zip(_SOURCES, _TEXTS, strict=True)):
        assert gap(logits[row], own_logits(reference, source, text)) < 1e-5


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_model_still_generates_through_transformers_after_loading(family):
    model, source = tiny_encoder_decoder(family), torch.tensor(_SOURCES[:1])
    before = model.generate(source, max_new_tokens=12)
    Target(model, tokenizer=None)
    set_attention(model, "sdpa")
    assert torch.equal(model.generate(source, max_new_tokens=12), before)


def test_rows_with_the_same_source_are_encoded_once(monkeypatch):
    target = Target(tiny_encoder_decoder("t5"), tokenizer=None)
    encoded, encode = [], target.encoder.encode
    monkeypatch.setattr(target.encoder, "encode", lambda sources: encoded.extend(sources) or encode(sources))
    cache = target.cache(4, 16)
    first, second, third = (Text((), tuple(source)) for source in _SOURCES)
    cache.select(0, 3, 0)
    cache.read_sources([first, second, first])
    cache.select(1, 4, 0)
    cache.read_sources([first, third, second])  # a row's old source goes to another row
    assert encoded == [second.source, first.source, third.source]
    fresh = target.cache(4, 16)
    fresh.read_sources([first, first, third, second])
    for held, expected in zip(cache.cross._shown, fresh.cross._shown, strict=True):
        for row, source in enumerate((first, third, second)):
            n = len(source.source)
            torch.testing.assert_close(held.keys[row, :, :n], expected.keys[row + 1, :, :n])


def test_a_model_loads_with_its_cross_attention(tmp_path):
    # BART's kind also has a class for causal LMs, without these weights.
    config = copy.deepcopy(CONFIGS["bart"])
    config.vocab_size, config.tie_word_embeddings = 300, True
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    assert target.config.num_hidden_layers == 3
    logits = target.logits(target.hidden(torch.tensor(_TEXTS[:1]), sources=_SOURCES[:1]))
    assert gap(logits[0], own_logits(model, _SOURCES[0], _TEXTS[0])) < 1e-3


@pytest.mark.parametrize(("config", "reason"), [(WhisperConfig, "read text"), (T5Gemma2Config, "merges")])
def test_unfit_encoder_decoder_models_are_refused_in_one_line(config, reason):
    with pytest.raises(UserError, match=reason) as error:
        auto_class(config())
    assert "\n" not in str(error.value)


def test_a_decoder_without_a_start_token_is_refused():
    sizes = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, decoder_start_token_id=None)
    with pytest.raises(UserError, match="decoder_start_token_id"):
        Target(T5ForConditionalGeneration(config), tokenizer=None)


def test_memory_counts_the_tokens_of_a_row_and_of_its_source():
    """A key and a value of 4 heads of 8 float32 numbers: 256 bytes a layer, of which mT5's decoder has 3."""
    cache = Target(tiny_encoder_decoder("mt5"), tokenizer=None).cache(3, 64)
    assert cache.bytes_per_token == cache.cross.bytes_per_token == 3 * 256
    cache.read_sources([Text((), tuple(source)) for source in _SOURCES])
    assert cache.cross.bytes_per_token == 3 * 256
