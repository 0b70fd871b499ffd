"""What a training step costs: memory of the loss against a naive one, time of a step against the target's forward.

    python -m train.bench [--target T] [--output DIR]

Memory is what torch has allocated at the height of a pass, above parameters and their gradients; resident memory would
miss the pages of a gradient that nothing has touched. Time is a ratio within one process, beside the ratio of
floating-point operations that were counted in the same code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from speculator.errors import OneLineParser, refuse, run_command
from speculator.files import write_text
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig
from speculator.target import Target, resolve_device
from train.config import LossConfig
from train.losses import IGNORE, Measure, align

LOSSES = {
    "cross-entropy": LossConfig(cross_entropy=1, kl=0),
    "KL": LossConfig(kl=1),
    "LK": LossConfig(kl=0, lk=1),
}


def naive(head: MLPSpeculator, hidden: Tensor, tokens: Tensor, labels: Tensor, lm_head: nn.Linear) -> Tensor:
    """Cross-entropy or KL the plain way: every head's logits and every law at once."""
    length = labels.shape[-1]
    logits = head.logits(hidden[:, :length], tokens[:, 1:-1])  # [N, B, S, V]
    if lm_head is None:
        return F.cross_entropy(logits.flatten(0, 2), labels.transpose(0, 1).flatten(), reduction="sum")
    law = lm_head(hidden).log_softmax(-1)
    laws = torch.stack([law[:, i + 1 : i + 1 + length] for i in range(head.n_predict)])
    return F.kl_div(logits.log_softmax(-1), laws, log_target=True, reduction="sum")


def memory(tokens: int, vocabulary: int, width: int, heads: int) -> list[dict]:
    """Bytes of one forward and backward pass of each loss at the most, above parameters and gradients."""
    device = resolve_device()
    rows = []
    for loss, chunked in tqdm([("cross-entropy", False), ("KL", False), *((name, True) for name in LOSSES)]):
        torch.manual_seed(0)
        with torch.device(device):
            head = MLPSpeculator(MLPSpeculatorConfig(vocab_size=vocabulary, emb_dim=width, n_predict=heads)).to(device)
            lm_head = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
            ids = torch.randint(vocabulary, (1, tokens + heads + 1))
            hidden = torch.randn(1, tokens + heads + 1, width)
        labels = align(ids, torch.zeros_like(ids), torch.ones_like(ids), heads)
        if chunked:
            measure = Measure(labels, hidden, lm_head, LOSSES[loss])
            height = _height(lambda: head(hidden[:, :tokens], ids[:, 1:-1], measure)["objective"].backward(), device)  # noqa: B023
        else:
            law = lm_head if LOSSES[loss].kl else None
            height = _height(lambda: naive(head, hidden, ids, labels, law).backward(), device)  # noqa: B023
        gradients = sum(parameter.grad.nbytes for parameter in head.parameters() if parameter.grad is not None)
        rows.append({"loss": loss, "chunked": chunked, "bytes": height - gradients})
    return rows


def _height(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes that `work` had allocated at once; what it leaves behind counts."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(profile_memory=True) as profiler:
        work()
    assert profiler.kineto_results is not None
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


def step_over_target(target: Target, heads: int, length: int, runs: int) -> list[dict]:
    """A training step over the target's forward, in time and in floating-point operations, for each loss."""
    torch.manual_seed(0)
    ids = torch.randint(target.vocab_size, (1, length), device=target.device)
    ones = torch.ones_like(ids)
    labels = align(ids, ones, ones, heads)
    assert (labels != IGNORE).all()
    rows = []
    for name, weights in LOSSES.items():
        config = MLPSpeculatorConfig(vocab_size=target.vocab_size, emb_dim=target.hidden_size, n_predict=heads)
        head = MLPSpeculator(config).to(target.device)
        optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3)

        def forward() -> Tensor:
            return target.hidden(ids)

        def step(head=head, optimiser=optimiser, weights=weights) -> None:
            hidden = forward()
            measure = Measure(labels, hidden, target.logits, weights)
            head(hidden[:, : labels.shape[-1]].float(), ids[:, 1:-1], measure)["objective"].backward()
            optimiser.step()
            optimiser.zero_grad()

        for warm_up in (forward, step):
            warm_up()
        # One after the other, so that both see the same machine; the ratio of each pair.
        ratios = [_seconds(step) / _seconds(forward) for _ in range(runs)]
        rows.append({"loss": name, "time": median(ratios), "operations": _operations(step) / _operations(forward)})
    return rows


def _seconds(call: Callable) -> float:
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def _operations(call: Callable) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m train.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="examples/stdlib_target", help="whose forward a step is compared with")
    parser.add_argument("--tokens", type=int, default=512, help="of the memory test's batch")
    parser.add_argument("--vocab_size", type=int, default=128_256, help="of the memory test")
    parser.add_argument("--hidden_size", type=int, default=1024, help="of the memory test, target and head alike")
    parser.add_argument("--n_predict", type=int, default=4, help="heads")
    parser.add_argument("--length", type=int, default=256, help="tokens of the row that a step is timed on")
    parser.add_argument("--runs", type=int, default=20, help="timed pairs")
    parser.add_argument("--output", help="folder for training.json")
    flags = parser.parse_args(argv)
    return run_command(parser.prog, lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    sizes = ("tokens", "vocab_size", "hidden_size", "runs")
    refuse(
        *((getattr(flags, name) < 1, f"--{name} must be at least 1") for name in sizes),
        (flags.n_predict < 2, "--n_predict must be at least 2"),
        (flags.length < flags.n_predict + 2, "--length is too short for that many heads"),
    )
    steps = step_over_target(Target.load(flags.target), flags.n_predict, flags.length, flags.runs)
    peaks = memory(flags.tokens, flags.vocab_size, flags.hidden_size, flags.n_predict)
    print("| loss | peak memory, MiB |\n|---|---|")
    for row in peaks:
        print(f"| {row['loss']}, {'chunked' if row['chunked'] else 'naive'} | {row['bytes'] / 2**20:,.0f} |")
    print("\n| loss | step over target, time | operations |\n|---|---|---|")
    for row in steps:
        print(f"| {row['loss']} | {row['time']:.2f} | {row['operations']:.2f} |")
    if flags.output:
        write_text(Path(flags.output) / "training.json", json.dumps({"memory": peaks, "step": steps}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
