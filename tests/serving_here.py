"""A server in a thread of the test process; its tiny target is in float64, so texts can be compared by token."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import uvicorn
from chat_templates import chat_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from speculator import Engine, HeadDrafter, MLPSpeculator, MLPSpeculatorConfig, Sampling, Target
from speculator.cli.serve import _bind as bind
from speculator.decoding.request import Request, StopStrings
from speculator.server.app import create_app
from speculator.server.worker import StepOutput, Worker

SLOTS = 4


@contextmanager
def serving(target: Target, drafter=None, slots: int = SLOTS, engine=Engine, **settings):
    """Start a server and yield its URL and its worker."""
    worker = Worker(partial(engine, target, slots=slots), drafter, settings.pop("head", None))
    app = create_app(target, worker, **{"name": "tiny", **settings})
    listening = bind("127.0.0.1", 0)
    listening.listen(1024)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", worker
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def outputs(tokenizer, tokens, end, stops=(), min_tokens=0, size=lambda: 1) -> list[StepOutput]:
    """Outputs of the engine's steps for an answer of `tokens`, each of `size()` tokens.

    `end` is its finish reason if no stop string ends it.
    """
    made, left = [], list(tokens)
    stop = StopStrings(stops, tokenizer) if stops else None
    request = Request([1], Sampling(), max_new_tokens=len(left) + 1, stop=stop, min_tokens=min_tokens)
    request.on_step = lambda new, _: made.append(StepOutput(0, new, [], request.finish_reason))
    while left and not request.finish_reason:
        count = size()
        part, left = left[:count], left[count:]
        request.append(part)
    made[-1].finish_reason = request.finish_reason or end
    return made


def until(condition, seconds: float = 10.0) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def tiny_target(tokenizer) -> Target:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **shape, **ends)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 4
    return Target(model.double().eval(), tokenizer)


def tiny_head_for(target: Target) -> MLPSpeculator:
    torch.manual_seed(1)
    sizes = {"vocab_size": target.vocab_size, "emb_dim": target.hidden_size, "inner_dim": 16, "n_predict": 3}
    return MLPSpeculator(MLPSpeculatorConfig(**sizes)).double()


@pytest.fixture(scope="module")
def chat_target() -> Target:
    return tiny_target(chat_tokenizer("qwen3"))


@pytest.fixture(scope="module")
def drafter(chat_target) -> HeadDrafter:
    return HeadDrafter(tiny_head_for(chat_target))
