"""What a step costs is what the table of costs says. Needs an idle core; three attempts."""

import statistics
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speculator import Engine, Sampling, Target
from speculator.checkpoints.loading import bind
from speculator.drafters import tuning
from speculator.drafters.price import LONGEST_PATH, PricedDraft
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig

ROWS, STEPS = (1, 6, 12), 12


@pytest.fixture(scope="module")
def models():
    """A target with a large vocabulary, whose logits and noise take much of a step, and an EAGLE-3 head."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32_000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
    target = Target(LlamaForCausalLM(config).eval(), tokenizer=None)
    head = Eagle3Speculator(Eagle3SpeculatorConfig.for_target(config, n_predict=3, draft_vocab_size=4000))
    return target, bind(head, target)


def plans(drafter, rows: int) -> dict[str, PricedDraft]:
    chains = {choice.shape.nodes: choice for choice in drafter.choices}
    # In a row in the middle, as most are: its neighbours on both sides attend apart from it.
    one, every = [LONGEST_PATH * (row == rows // 2) for row in range(rows)], [LONGEST_PATH] * rows
    made = {
        "plain": PricedDraft(rate=1, choice=None, lengths=[0] * rows, tokens=0),
        "a path in one row": PricedDraft(rate=1, choice=None, lengths=one, tokens=LONGEST_PATH),
        "paths in all rows": PricedDraft(rate=1, choice=None, lengths=every, tokens=LONGEST_PATH * rows),
        **{
            f"chains of {n}": PricedDraft(rate=1, choice=choice, lengths=[0] * rows, tokens=n * rows)
            for n, choice in chains.items()
        },
    }
    if rows > 1:
        second = [LONGEST_PATH * (row % 2) for row in range(rows)]
        made["paths in every second row"] = PricedDraft(rate=1, choice=None, lengths=second, tokens=sum(second))
        made["chains of 2 and a path"] = PricedDraft(
            rate=1, choice=chains[2], lengths=one, tokens=LONGEST_PATH + 2 * (rows - 1)
        )
    return made


def costs(target, drafter, rows: int, temperature: float) -> dict[str, tuple[float, float]]:
    """Predicted and measured cost of a step by what it drafts."""
    engine = Engine(target, drafter, slots=rows)
    for row in range(rows):
        engine.submit([row + 1, *range(2, 257)], Sampling(temperature, seed=row), max_new_tokens=10_000)
    while engine.waiting or engine.scheduler.prefilling:
        engine.step()
    own, taken = engine.drafter, plans(drafter, rows)
    seconds: dict[str, list[float]] = {name: [] for name in taken}
    own._ngrams.look = lambda texts: [(1, [5] * LONGEST_PATH)] * len(texts)
    for _ in range(STEPS):
        for name, plan in taken.items():
            own._chooser.choose = lambda requests, found, plan=plan: plan
            began = time.perf_counter()
            engine.step()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    shapes = {name: plan.choice and plan.choice.shape for name, plan in taken.items()}
    return {
        name: (
            drafter.cost(shapes[name], plan.tokens, any(plan.lengths), temperature == 0, rows),
            medians[name] / medians["plain"],
        )
        for name, plan in taken.items()
    }


def test_predicted_and_measured_costs_agree(models, monkeypatch, tmp_path):
    target, head = models
    for attempt in range(3):
        monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / str(attempt)))  # measured again
        drafter = tuning.adaptive_drafter(head, target, batch_size=max(ROWS))
        found = {
            (rows, temperature, name): pair
            for rows in ROWS
            for temperature in (0.0, 1.0)
            for name, pair in costs(target, drafter, rows, temperature).items()
        }
        off = {key: pair for key, pair in found.items() if not 0.75 < pair[0] / pair[1] < 1.25}
        if not off:
            return
    pytest.fail(f"predicted and measured cost differ: {off}")
