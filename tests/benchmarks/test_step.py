"""Steps at a shape: what must be read is counted right, what is measured is set against it."""

import pytest
import torch

from benchmarks import shapes
from benchmarks.shapes import PRESETS, bandwidth, random_head, random_target, step_bytes
from benchmarks.step import measure_steps
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig


def test_the_bound_counts_every_weight_that_is_read_and_the_live_cache():
    """tiny: D 64, V 512, inner 128, 2 layers, 2 of 4 heads of 16 with keys of their own; two bytes a number."""
    target = random_target("tiny")
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    assert step_bytes(target, rows=3, live=0) == 2 * (2 * layer + 64 + 512 * 64), "the embedding is not read"
    cache = target.cache(3, 10)
    target.extend(cache, torch.zeros(3, 10, dtype=torch.long))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert step_bytes(target, rows=3, live=10) - step_bytes(target, rows=3, live=0) == held


def test_a_step_takes_longer_than_reading_its_bytes():
    target = random_target("tiny")
    found = measure_steps(target, random_head(target, PRESETS["tiny"].head), 3, 2, 16, 1, bandwidth())
    assert found["verify_seconds"] == pytest.approx(found["verify_over_decode"] * found["decode_seconds"])
    assert found["decode_over_bound"] > 1, "nothing reads faster than the machine copies"


def test_the_preset_is_the_published_shape(monkeypatch):
    """8.03 billion weights; IBM's head has 3.19 billion."""
    name = "llama-3-8b"
    monkeypatch.setattr(shapes, "resolve_device", lambda: torch.device("meta"))
    monkeypatch.setattr(shapes, "Target", lambda model, tokenizer: model)
    model = random_target(name)
    assert model.num_parameters() == pytest.approx(8.03e9, rel=1e-3)
    config = MLPSpeculatorConfig(vocab_size=model.vocab_size, emb_dim=model.config.hidden_size, **PRESETS[name].head)
    with torch.device("meta"):
        head = MLPSpeculator(config)
    assert head.num_parameters() == pytest.approx(3.19e9, rel=5e-3)
