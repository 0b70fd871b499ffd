"""A verify step computes what exists: one row's long draft costs the others nothing."""

import pytest
import torch
from conftest import tiny_model

from speculator import Engine, Sampling, Target, generate
from speculator.decoding import sampling as sampling_module
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


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_seeded_texts_do_not_depend_on_the_rows_and_their_drafts(target, rows):
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 32, (3 + i % 9,), generator=draw).tolist() * (1 + i % 3) for i in range(48)]
    settings = [Sampling(i % 3 / 2, seed=i) for i in range(48)]
    plain = [
        generate(target, None, [p], [s], max_new_tokens=24).tokens[0] for p, s in zip(prompts, settings, strict=True)
    ]
    drafted = generate(target, NgramDrafter(6), prompts, settings, max_new_tokens=24, max_batch_size=rows)
    assert drafted.tokens == plain
