"""What it costs to read rows of training, and a long prompt, through a `Target`: against the model's own forward pass.

    python -m benchmarks.reading [--turns 3] [--rows 4] [--length 2048] [--prompt 8192]

Rows of training are packed with documents of 50 to 1,000 tokens; the model's own forward is given the same rows with
positions that begin again in each. The prompt goes through the engine's chunks into its cache, and through the model's
own code in one piece into transformers' cache. Time is the median ratio of turns in one process. Memory is what the
process takes at the height of the pass, above what it has before and above the cache that is left; each figure is of a
process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from eval.timing import peak_memory, restart_memory
from speculator import Engine, Target
from speculator.device import hardware
from speculator.errors import OneLineParser, refuse_below, run_command
from speculator.target.packed import packed

CPU = torch.device("cpu")
GROUPED = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=16384,
)
MODELS = ("examples/stdlib_target", "a Llama of 16 heads over 4")
WAYS = ("Target", "its own")
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Memory that is freed goes back at once, so that the height is of what is in use."""


def load(name: str) -> PreTrainedModel:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    grouped = name == MODELS[1]
    model = LlamaForCausalLM(GROUPED) if grouped else AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def rows(model: PreTrainedModel, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens [B, S], and the documents that they are of."""
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(50, 1000, (count, length // 50), generator=draw).cumsum(1)
    documents = torch.searchsorted(ends, torch.arange(length).repeat(count, 1), right=True)
    return torch.randint(model.config.vocab_size, (count, length), generator=draw), documents


def training(way: str, model: PreTrainedModel, count: int, length: int) -> tuple[Callable[[], object], int]:
    tokens, documents = rows(model, count, length)
    if way == "Target":
        target = Target(model, tokenizer=None)  # type: ignore[arg-type]
        return lambda: target.hidden(tokens, documents), 0
    given = packed(model, tokens, documents)
    return torch.no_grad()(lambda: model.base_model(**given, use_cache=False)), 0


def prefill(way: str, model: PreTrainedModel, length: int) -> tuple[Callable[[], object], int]:
    """A prompt and the first token after it; and the bytes of its keys and values."""
    (tokens,), _ = rows(model, 1, length)
    config = model.config
    cache = 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length
    if way == "its own":
        return torch.no_grad()(lambda: model(tokens[None], use_cache=True, logits_to_keep=1)), cache
    target = Target(model, tokenizer=None)  # type: ignore[arg-type]

    def work() -> object:
        engine = Engine(target, slots=1)
        return engine.generate([tokens.tolist()], max_new_tokens=1, eos_token_ids=())

    return work, cache


def prepare(what: str, way: str, name: str, arguments: argparse.Namespace) -> tuple[Callable[[], object], int]:
    model = load(name)
    if what == "prefill":
        return prefill(way, model, arguments.prompt)
    return training(way, model, arguments.rows, arguments.length)


def height(what: str, way: str, name: str, arguments: argparse.Namespace) -> float:
    """MiB of one pass, the first of its process."""
    work, cache = prepare(what, way, name, arguments)
    restart_memory(CPU)
    before = peak_memory(CPU)
    work()
    return (peak_memory(CPU) - before - cache) / 2**20


def ratio(what: str, name: str, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds of both ways, and the median of their ratio over turns in which either comes first."""
    works = [prepare(what, way, name, arguments)[0] for way in WAYS]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(arguments.turns + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            works[which]()
            if turn:  # the first warms up
                seconds[which].append(time.perf_counter() - started)
    both = [a / b for a, b in zip(*seconds, strict=True)]
    return statistics.median(seconds[0]), statistics.median(seconds[1]), statistics.median(both)


def run(arguments: argparse.Namespace) -> None:
    """Measure and print the table."""
    refuse_below(arguments, turns=1, rows=1, length=50, prompt=50)
    if arguments.one:
        print(height(*arguments.one, arguments))
        return
    print(f"{hardware(CPU)}, float32\n")
    print(
        "| what | model | Target, s | its own, s | ratio | Target, MiB | its own, MiB |\n|---|---|---|---|---|---|---|"
    )
    for what, name in (("rows", MODELS[0]), ("rows", MODELS[1]), ("prefill", MODELS[1])):
        heights = []
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.reading", *sys.argv[1:], "--one", what, way, name]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | RETURNED)
            heights.append(float(done.stdout))
        ours, theirs, both = ratio(what, name, arguments)
        cells = f"{ours:.2f} | {theirs:.2f} | {both:.2f} | {heights[0]:,.0f} | {heights[1]:,.0f}"
        print(f"| {what} | {name} | {cells} |", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="timings of each; default: 3")
    parser.add_argument("--rows", type=int, default=4, help="of training; default: 4")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each; default: 2048")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt; default: 8192")
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "WAY", "MODEL"), help="one figure of memory")
    return run_command("reading", lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
