"""The code's branches for CUDA, run on a make-believe GPU: no wrong device, no wrong dtype, no needless wait."""

from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch
from conftest import tiny_block_head, tiny_head, tiny_model, tiny_tokenizer
from drafters import make_drafter
from make_believe_gpu import gpu
from replays import PROMPTS, capturing, overwrite, texts
from serving_here import serving

from data.writers.engine import EngineWriter
from data.writing import Writing
from eval.suites import Suite
from eval.validation import real_acceptance
from speculator import Engine, HeadDrafter, Sampling, Target, generate
from speculator.heads import Speculator
from speculator.kernels import cuda_graphs
from speculator.prompts import Conversation
from speculator.target.attention.attention import VARLEN
from speculator.target.cache import kv_cache
from train.loop import Loop
from train.losses import ChunkedLoss
from train.options.config import LossConfig, StageConfig
from train.states.batch import Collator, StageRows, StateSource

__all__ = ["gpu"]
SAMPLED = ("model-chain", "attention-tree", "block-tree", "attention-fixed-tree")
"""Drafters whose sampled texts are compared; those of `OTHERS` run in `make soak`."""
OTHERS = ("none", "head-chain", "ngram", "adaptive-attention")


def on(device: str, dtype: torch.dtype = torch.bfloat16) -> Target:
    return Target(tiny_model("gemma3").to(device, dtype), tokenizer=None)


def test_the_make_believe_gpu_refuses_tensors_of_two_devices_and_counts_waits(gpu):
    x = torch.zeros(3, device="cuda")
    assert x.device == torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(TypeError, match="cuda:0"):
        x.numpy()
    gpu.waits.clear()
    assert x.sum().item() == 0
    x[x > 1] = 2.0
    assert sum(gpu.waits.values()) == 2


class Again:
    """Stands in for a CUDA graph: a replay runs the work again. The run at its capture counts as the first replay."""

    made = 0

    def __init__(self, work, given):
        self.work, self.given, self.result, self.replays = work, given, work(*given), 0
        type(self).made += 1

    def replay(self):
        if self.replays:
            overwrite(self.result, self.work(*self.given))
        self.replays += 1


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, "sampled") for name in SAMPLED),
        ("adaptive-attention", "greedy"),
        *(pytest.param(name, "sampled", marks=pytest.mark.soak) for name in OTHERS),
        pytest.param("none", "greedy", marks=pytest.mark.soak),
    ],
)
def test_texts_are_those_of_the_cpu(name, sampling, gpu, monkeypatch):
    """In bfloat16, and with captured steps."""
    monkeypatch.setitem(kv_cache.BUCKETS, "cuda", 16)
    monkeypatch.setitem(kv_cache.BUCKETS, "cpu", 16)
    own, target = on("cpu"), on("cuda")
    expected = texts(own, make_drafter(name, own), sampling, 3, max_new_tokens=12)
    capturing(monkeypatch, Again)
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cuda",))
    assert texts(target, make_drafter(name, target), sampling, 3, max_new_tokens=12) == expected
    assert Again.made
    assert cuda_graphs.enabled


@pytest.fixture
def gpu_target(gpu, monkeypatch) -> Target:
    """A Llama in bfloat16 whose steps are captured."""
    capturing(monkeypatch, Again)
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cuda",))
    return Target(tiny_model().to("cuda", torch.bfloat16), tokenizer=None)


def head_for(target: Target, architecture: str) -> Speculator:
    if architecture == "dspark":
        return tiny_block_head(target)
    return tiny_head(architecture=architecture).to(target.device)


def packed_rows(count: int, length: int = 48) -> list[dict]:
    """StageRows of three documents each."""
    ids = torch.arange(count * length).view(count, length) * 7 % 31
    return [{"input_ids": row.tolist(), "document_ids": [3 * i // length for i in range(length)]} for row in ids]


def loop_of(target: Target, head: Speculator, folder: Path, **changes) -> Loop:
    how = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "eval_steps": 2}
    stage = StageConfig(bf16=target.dtype == torch.bfloat16, **how | changes)
    rows = StageRows(packed_rows(4), Collator(head.config), validation=packed_rows(2))
    return Loop(
        head,
        StateSource(target, head.aux_layers),
        stage,
        LossConfig(),
        rows,
        folder,
        decode=lambda head: real_acceptance(target, head, Suite("test", PROMPTS[:2]), seed=0, max_new_tokens=8),
    )


@pytest.mark.parametrize("architecture", ["eagle3", "dspark", pytest.param("mlp", marks=pytest.mark.soak)])
def test_a_head_trains_on_packed_documents_as_on_the_cpu(architecture, gpu, tmp_path):
    losses = {}
    for device in ("cpu", "cuda"):
        target = Target(tiny_model().to(device, torch.bfloat16), tokenizer=None)
        log = loop_of(target, head_for(target, architecture).float(), tmp_path, logging_steps=1).run().log_history
        losses[device] = [entry[name] for entry in log for name in ("loss", "eval_loss") if name in entry]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-2)


def test_rows_are_generated(gpu_target, tmp_path):
    drafter = HeadDrafter(head_for(gpu_target, "mlp").bfloat16())
    writing = Writing(max_new_tokens=8)
    prompts = list(map(Conversation, PROMPTS))
    rows = list(EngineWriter(gpu_target, drafter, 2).write(prompts, tmp_path, writing))
    assert [len(row["input_ids"]) for row in rows] == [len(prompt) + 8 for prompt in PROMPTS]


def test_a_server_answers(gpu_target):
    drafter = HeadDrafter(head_for(gpu_target, "eagle3").bfloat16())
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    gpu_target.tokenizer = tiny_tokenizer()
    with serving(gpu_target, drafter) as (url, _):
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    expected = generate(gpu_target, None, PROMPTS[:1], max_new_tokens=8).tokens[0]
    assert answer["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("shared", [True, False])
def test_an_output_matrix_s_gradient_is_added_up_in_float32(shared, gpu):
    """Then the chunks that it is added up from don't matter: a product in bfloat16 would round each of them."""
    torch.manual_seed(0)
    matrices = [torch.randn(64, 16, device="cuda").requires_grad_() for _ in range(1 if shared else 3)] * (
        3 if shared else 1
    )
    features = [torch.randn(96, 16, device="cuda") for _ in range(3)]
    labels, hidden = torch.arange(3 * 96, device="cuda").view(3, 96) % 64, torch.zeros(96, 4, device="cuda")
    terms = [[(x, matrix)] for x, matrix in zip(features, matrices, strict=True)]

    def gradients(chunk: int) -> list[torch.Tensor]:
        loss = ChunkedLoss(lambda _: None, LossConfig(cross_entropy=1.0, kl=0.0), 64, chunk=chunk)
        with torch.autocast("cuda", torch.bfloat16):
            objective = loss(terms, labels, hidden, torch.ones(3, 1, device="cuda")).objective
        return list(torch.autograd.grad(objective, matrices[:1] if shared else matrices))

    for whole, pieces in zip(gradients(96), gradients(5), strict=True):
        torch.testing.assert_close(pieces.own, whole.own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "mixtral", "gpt2", "gemma2"])
def test_packed_documents_are_kept_apart_without_a_mask(family, gpu):
    """By torch's flash attention with their bounds, which has no soft-capping (Gemma 2)."""
    target = Target(tiny_model(family).to("cuda", torch.bfloat16), tokenizer=None)
    tokens = torch.arange(2 * 24, device="cuda").view(2, 24) * 7 % 31
    documents = torch.tensor([[0] * 10 + [1] * 14, [2] * 3 + [3] * 9 + [4] * 12], device="cuda")
    gpu.signatures.clear()
    hidden = target.hidden(tokens, documents)
    assert (target.document_attention[0] == VARLEN) == (family != "gemma2")
    assert not gpu.signatures
    other = torch.where(documents == 3, 5, tokens)
    differ = (target.hidden(other, documents) - hidden).abs().amax(-1) > 0
    assert torch.equal(differ, differ & (documents == 3))
    alone = target.hidden(tokens[1:, 3:12])
    torch.testing.assert_close(hidden[1:, 3:12].own, alone.own, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("architecture", "most"),
    [("mlp", 2), ("eagle3", 4), ("dspark", 1)],
)
def test_a_micro_batch_rarely_waits_for_the_device(architecture, most, gpu, tmp_path):
    """Each wait drains the queue of kernels. Copies of the batch don't count."""
    target, waits = Target(tiny_model().to("cuda", torch.bfloat16), tokenizer=None), []
    for steps in (2, 6):
        loop = loop_of(target, head_for(target, architecture).float(), tmp_path, max_steps=steps, logging_steps=100)
        loop.validation = None
        gpu.waits.clear()
        loop.run()
        waits.append(Counter(gpu.waits))
    own = [{name: count for name, count in each.items() if "from the host train/loop.py" not in name} for each in waits]
    assert sum(own[1].values()) - sum(own[0].values()) <= 4 * most, own


def test_a_step_of_decoding_waits_once(gpu_target, gpu):
    """For its report."""
    engine = Engine(gpu_target, HeadDrafter(head_for(gpu_target, "eagle3").bfloat16()), slots=2)
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, Sampling(1.0), max_new_tokens=60, eos_token_ids=())
    for _ in range(5):
        engine.step()
    gpu.waits.clear()
    for _ in range(3):
        engine.step()
    assert sum(gpu.waits.values()) == 3, gpu.waits
