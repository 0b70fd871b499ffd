"""What costs time on a GPU, counted on a make-believe one: signatures of attention, host waits, captures."""

import copy
import random

import pytest
import torch
from conftest import CONFIGS, tiny_block_head
from make_believe_gpu import gpu
from transformers import AutoModelForCausalLM

from speculator import Engine, Sampling, Target
from speculator.heads.dspark import model as dspark
from speculator.heads.training import TrainingBatch
from train.config import LossConfig
from train.losses import ChunkedLoss
from train.trainer import Collator

__all__ = ["gpu"]


def long_target(length: int = 4096) -> Target:
    """A Llama of one layer that reads long texts."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers, config.max_position_embeddings = 1, length
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16), tokenizer=None)


def prompts(count: int) -> list[list[int]]:
    """Prompts with the lengths of chats: 400 tokens in the median, half of them between 200 and 800."""
    draw = random.Random(0)
    return [[draw.randrange(32) for _ in range(min(3000, int(draw.lognormvariate(6, 1))))] for _ in range(count)]


def serve(engine: Engine, count: int, new_tokens: int, samplings: list[Sampling], arrivals: int = 4) -> None:
    """Run requests that arrive while others decode."""
    waiting = list(enumerate(prompts(count)))
    while waiting or engine.busy:
        if len(engine.waiting) < 2 and waiting:
            for index, prompt in waiting[:arrivals]:
                engine.submit(prompt, samplings[index % len(samplings)], max_new_tokens=new_tokens, eos_token_ids=())
            del waiting[:arrivals]
        engine.step()


def test_attention_never_runs_on_cudnn(gpu):
    """It builds a plan for every signature."""
    assert torch.backends.cuda.cudnn_sdp_enabled()
    long_target()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_server_asks_for_few_signatures_of_attention(gpu):
    """100 prompts; each was nearly a signature of its own (121) when shapes followed the prompts' lengths."""
    engine = Engine(long_target(), None, slots=8, capture=False)
    gpu.signatures.clear()
    serve(engine, 100, 2, [Sampling()], arrivals=1)
    assert len(gpu.signatures) <= 70


def documents(rows: int, length: int, seed: int) -> list[dict]:
    """Rows of packed documents, 200 tokens each on average."""
    draw = random.Random(seed)
    made = []
    for _ in range(rows):
        numbers: list[int] = []
        while len(numbers) < length:
            numbers += [len(made) * length + len(numbers)] * int(draw.expovariate(1 / 200) + 1)
        made.append({"input_ids": [draw.randrange(32) for _ in range(length)], "document_ids": numbers[:length]})
    return made


def to_gpu(batch: dict) -> dict:
    return {name: x.to("cuda") if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def dspark_step(target: Target, head, rows: list[dict]) -> None:
    """A micro-batch as the Trainer runs it."""
    batch = to_gpu(Collator(head.config)(rows))
    ids, number = batch.pop("input_ids"), batch.pop("document_ids")
    hidden = torch.zeros(*ids.shape, target.hidden_size, dtype=target.dtype, device="cuda")
    states = torch.zeros(*ids.shape, len(head.aux_layers) * target.hidden_size, device="cuda")
    loss = ChunkedLoss(target.logits, LossConfig(cross_entropy=0.1, kl=0.0, total_variation=1.8), 2**22)
    with torch.autocast("cuda", torch.bfloat16):
        total, count = head(TrainingBatch(ids, number, hidden, states, batch), loss)["objective"]
    (total / count).backward()


@pytest.fixture
def block_head(gpu, monkeypatch):
    """A target and a head that trains rows of 2,048 tokens in 8 chunks each, as the recipes do."""
    target = long_target()
    head = tiny_block_head(target, n_predict=7, anchors=64, aux_layers=[0], num_hidden_layers=1).float()
    monkeypatch.setattr(dspark, "_SCORES_ON_GPU", head.config.num_attention_heads * 2048 * 7 * 8)
    return target, head


def test_training_dspark_asks_for_few_signatures_of_attention(block_head, gpu):
    """Every micro-batch had 16 new ones when each chunk had the width of its text."""
    gpu.signatures.clear()
    for batch in range(3):
        dspark_step(*block_head, documents(2, 2048, batch))
    assert sum(gpu.signatures.values()) == 3 * 2 * 8
    assert len(gpu.signatures) <= 4


def test_training_dspark_does_not_wait_for_the_device(block_head, gpu):
    dspark_step(*block_head, documents(2, 2048, 0))
    gpu.waits.clear()
    dspark_step(*block_head, documents(2, 2048, 1))
    assert not {name: count for name, count in gpu.waits.items() if "test_gpu_costs" not in name}
