"""The engine and the loop compute what the plain steps of `speculator.reference` say."""

import inspect

import pytest
import torch
from conftest import tiny_head, tiny_model
from torch.optim.lr_scheduler import LambdaLR
from torch.testing import assert_close

from speculator import Chain, Engine, HeadDrafter, Sampling, Target, reference
from speculator.decoding import verify
from speculator.heads import unrolled
from speculator.heads.training import IGNORE
from train.loop import Loop
from train.options.config import LossConfig, StageConfig
from train.states.batch import Collator, StageRows, StateSource

DEPTH, NEW = 3, 32
PLAIN_STEPS = {"mlp": reference.mlp_step, "eagle3": reference.eagle3_step}

# ---- one step of decoding


class Recorded(Engine):
    """Keeps the draft and the accepted count of every step of one request."""

    def process(self, batch, report, kept=None):
        *draft, drafted, accepted, _, _ = report[0].tolist()
        self.seen.append((draft[:drafted], accepted))
        super().process(batch, report, kept)


def by_engine(model, head, prompt, temperature):
    drafter = HeadDrafter(head, Chain(DEPTH)) if head else None
    engine = Recorded(Target(model, tokenizer=None), drafter, slots=1, rule="match")
    engine.seen = []
    made = engine.generate([prompt], Sampling(temperature, seed=5), max_new_tokens=NEW)
    return made.tokens[0], engine.seen


@pytest.mark.parametrize(
    ("family", "architecture", "temperature"),
    [
        ("llama", "mlp", 0.0),
        ("llama", "mlp", 0.7),
        ("llama", "eagle3", 0.7),
        ("qwen2", "mlp", 0.7),
        ("gpt2", "mlp", 1),
    ],
)
def test_the_engine_decodes_the_text_and_the_drafts_of_the_plain_step(family, architecture, temperature):
    model, head = tiny_model(family), tiny_head(DEPTH, architecture)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    text, steps = reference.decode(model, head, prompt, NEW, DEPTH, temperature, seed=5)
    assert by_engine(model, head, prompt, temperature) == (text, steps)
    # The text is the target's own: the draft decides over the number of steps alone.
    assert by_engine(model, None, prompt, temperature)[0] == text
    if temperature:
        assert len({accepted for _, accepted in steps}) > 2


def shifted(samples, draft):
    """A known-wrong rule: each drafted token is compared with the target's choice for the place after it."""
    last = verify.deepest(draft.tokens == samples[:, 1:], draft)
    return last, samples.gather(1, last[:, None])[:, 0]


def without_bonus(samples, draft):
    """A known-wrong rule: the token after the accepted ones is the target's choice for the place before it."""
    last, _ = verify.match(samples, draft)
    return last, samples.gather(1, (last - 1).clamp_min(0)[:, None])[:, 0]


@pytest.mark.parametrize("wrong", [shifted, without_bonus])
def test_an_engine_with_a_wrong_accept_rule_differs_from_the_plain_step(monkeypatch, wrong):
    model, head, prompts = tiny_model(), tiny_head(DEPTH), [[n, 1, 4] for n in range(8)]
    expected = [reference.decode(model, head, prompt, NEW, DEPTH, 0.7, seed=5) for prompt in prompts]
    assert [by_engine(model, head, prompt, 0.7) for prompt in prompts] == expected
    monkeypatch.setattr("speculator.decoding.engine.match", wrong)
    made = [by_engine(model, head, prompt, 0.7) for prompt in prompts]
    assert [text for text, _ in made] != [text for text, _ in expected]
    assert [steps for _, steps in made] != [steps for _, steps in expected]


# ---- one step of training


def documents(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random documents of 5 to 11 tokens, some of which have no loss."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        length = 5 + i % 7
        tokens = torch.randint(32, (length,), generator=generator)
        has_loss = torch.rand(length, generator=generator) < 0.85
        made.append((tokens, has_loss))
    return made


def keep_gradients(head, optimizer) -> dict[str, torch.Tensor]:
    """A dict that takes the clipped gradients of the optimiser's next step."""
    found: dict[str, torch.Tensor] = {}
    named = list(head.named_parameters())
    optimizer.register_step_pre_hook(
        lambda *_: found.update({name: p.grad.clone() for name, p in named if p.grad is not None})
    )
    return found


def by_loop(folder, model, architecture, pieces, max_norm, cross_entropy, micro_batches):
    """Loss, clipped gradients and weights of the loop's second step, over three rows of two packed documents each."""
    head, rows = tiny_head(DEPTH, architecture), []
    for first, second in zip(pieces[::2], pieces[1::2], strict=True):
        tokens, has_loss = (torch.cat(parts).tolist() for parts in zip(first, second, strict=True))
        ids = [0] * len(first[0]) + [1] * len(second[0])
        rows.append({"input_ids": tokens, "loss_mask": list(map(int, has_loss)), "document_ids": ids})
    source = StateSource(Target(model, tokenizer=None), head.aux_layers)
    sizes = {"per_device_train_batch_size": len(rows) // micro_batches, "gradient_accumulation_steps": micro_batches}
    stage = StageConfig(max_steps=2, max_grad_norm=max_norm, logging_steps=1, **sizes)
    weights, given = LossConfig(kl=1, cross_entropy=cross_entropy), StageRows(rows, Collator(head.config))
    loop = Loop(head, source, stage, weights, given, folder)
    loop.optimizer = torch.optim.SGD(head.parameters(), 0.1)
    loop.schedule = LambdaLR(loop.optimizer, lambda step: 1.0)
    gradients = keep_gradients(head, loop.optimizer)
    loss = loop.run().log_history[-1]["loss"]
    return loss, gradients, {name: p.detach() for name, p in head.named_parameters()}


def compare(folder, architecture, max_norm=0.5, cross_entropy=0.3, micro_batches=1):
    """Hold two steps of the loop against the plain ones."""
    model, head = tiny_model(), tiny_head(DEPTH, architecture)
    pieces = documents(6)
    loss, gradients, weights = by_loop(folder, model, architecture, pieces, max_norm, cross_entropy, micro_batches)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    trained = keep_gradients(head, optimizer)
    for _ in range(2):
        expected = PLAIN_STEPS[architecture](model, head, pieces, optimizer, max_norm, cross_entropy)
    assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == trained.keys()
    assert {p.dtype for p in trained.values()} == {torch.float32}
    own = dict(head.named_parameters())
    for name, gradient in trained.items():
        assert_close(gradients[name], gradient, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        assert_close(weights[name], own[name].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", PLAIN_STEPS)
@pytest.mark.parametrize(
    ("max_norm", "micro_batches"), [(0.5, 1), (1e6, 1), (0.5, 3)], ids=["clipped", "whole", "micro-batches"]
)
def test_the_loop_takes_the_plain_step(tmp_path, architecture, max_norm, micro_batches):
    compare(tmp_path, architecture, max_norm, micro_batches=micro_batches)


def other_tokens(labels):
    """Each label is the one of the next position, if both exist."""
    following = labels.roll(-1, -1)
    return torch.where((labels == IGNORE) | (following == IGNORE), labels, following)


@pytest.mark.parametrize("wrong", [other_tokens, lambda labels: labels.roll(1, -1)], ids=["tokens", "positions"])
def test_a_loop_with_shifted_labels_differs_from_the_plain_step(tmp_path, monkeypatch, wrong):
    align = unrolled.align
    monkeypatch.setattr(unrolled, "align", lambda *row: wrong(align(*row)))
    with pytest.raises(AssertionError, match="not close"):
        compare(tmp_path, "mlp")


def test_a_loop_whose_steps_read_one_token_too_early_differs_from_the_plain_step(tmp_path, monkeypatch):
    forward = unrolled.UnrolledHead.forward

    def early(self, batch, loss):
        unrolled_ = self.unrolled
        self.unrolled = lambda states, tokens, *given: unrolled_(states, tokens.roll(1, -1), *given)
        return forward(self, batch, loss)

    monkeypatch.setattr(unrolled.UnrolledHead, "forward", early)
    with pytest.raises(AssertionError, match="not close"):
        compare(tmp_path, "eagle3")


def test_a_plain_step_fits_a_screen():
    lengths = [len(inspect.getsource(step).splitlines()) for step in (reference.decode, *PLAIN_STEPS.values())]
    assert max(lengths) <= 60
    assert len(inspect.getsource(Loop.step).splitlines()) <= 40
