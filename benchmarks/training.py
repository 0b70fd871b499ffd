"""What a training step costs: memory of the loss against a naive one, time of a step against the target's forward.

    python -m benchmarks.training [--target T] [--output DIR]
    python -m benchmarks.training --preset llama-3-8b [--output DIR]

Memory is what torch has allocated at the height of a pass, above parameters and their gradients; resident memory would
miss the pages of a gradient that nothing has touched. Time is a ratio within one process, beside the ratio of
floating-point operations that were counted in the same code.

With a preset, a step at a published shape with random weights is compared with the time that its counted operations
take at the rate of a large bfloat16 matrix product, which this machine is asked for first; its memory counts all.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from benchmarks.shapes import PRESETS, matrix_rate, random_target
from speculator.device import hardware, resolve_device
from speculator.drafters.measure import clock
from speculator.errors import OneLineParser, refuse, refuse_below, run_command
from speculator.files import make_folder, write_text
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig
from speculator.heads.training import TrainingBatch
from speculator.heads.unrolled import align
from speculator.kernels.linear import HAS_ONEDNN
from speculator.tables import markdown_table
from speculator.target.model import Target
from train.losses import ChunkedLoss
from train.options.config import LossConfig

LOSSES = {
    "cross-entropy": LossConfig(cross_entropy=1, kl=0),
    "KL": LossConfig(kl=1),
    "LK": LossConfig(kl=0, lk=1),
}


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
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


def naive(head: MLPSpeculator, hidden: Tensor, tokens: Tensor, labels: Tensor, lm_head: nn.Linear) -> Tensor:
    """Cross-entropy or KL the plain way: every head's logits and every distribution at once."""
    length = labels.shape[-1]
    tokens = F.pad(tokens[:, 1:-1], (0, head.n_predict - 1))
    logits = head.logits(hidden[:, :length], tokens)  # [N, B, S, V]
    if lm_head is None:
        return F.cross_entropy(logits.flatten(0, 2), labels.transpose(0, 1).flatten(), reduction="sum")
    log_p = lm_head(hidden).log_softmax(-1)
    # Step i has no label at the last i positions.
    log_ps = torch.cat([log_p[:, i + 1 : 1 + length] for i in range(head.n_predict)], 1)
    logits = torch.cat([each[:, : length - i] for i, each in enumerate(logits)], 1)
    return F.kl_div(logits.log_softmax(-1), log_ps, log_target=True, reduction="sum")


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
            batch = TrainingBatch(
                input_ids=ids,
                document_ids=torch.zeros_like(ids),
                hidden=hidden,
                states=hidden,
                targets={"labels": labels},
            )
            token_loss = ChunkedLoss(lm_head, LOSSES[loss], vocabulary)
            height = peak_bytes(lambda: head(batch, token_loss)["objective"][0].backward(), device)  # noqa: B023
        else:
            log_p = lm_head if LOSSES[loss].kl else None
            height = peak_bytes(lambda: naive(head, hidden, ids, labels, log_p).backward(), device)  # noqa: B023
        gradients = sum(parameter.grad.nbytes for parameter in head.parameters() if parameter.grad is not None)
        rows.append({"loss": loss, "chunked": chunked, "bytes": height - gradients})
    return rows


def step_over_target(target: Target, heads: int, length: int, runs: int) -> list[dict]:
    """A training step over the target's forward, in time and in floating-point operations, for each loss."""
    rows = []
    for name, weights in LOSSES.items():
        training = Training(target, weights, 1, length, n_predict=heads)
        for warm_up in (training.forward, training.step):
            warm_up()
        # One after the other, so that both see the same machine; the ratio of each pair.
        ratios = [clock(training.step)[0] / clock(training.forward)[0] for _ in range(runs)]
        operations = _operations(training.step) / _operations(training.forward)
        rows.append({"loss": name, "time": median(ratios), "operations": operations})
    return rows


_DOCUMENT = 512
"""Tokens of a document; rows hold several, as those of recipes do."""


class Training:
    """A head that is trained on random tokens, step by step, as `train.loop.Loop` does it but for clipping.

    Args:
        target: in bfloat16 it, and the head's products with it, run under autocast; the head's weights are float32.
        weights: of the losses.
        rows, length: of a batch.
        shape: of MLPSpeculatorConfig.
    """

    def __init__(self, target: Target, weights: LossConfig, rows: int, length: int, **shape: Any):
        torch.manual_seed(0)
        self.target, self.weights = target, weights
        self.ids = torch.randint(target.vocab_size, (rows, length), device=target.device)
        self.documents = (torch.arange(length, device=target.device) // _DOCUMENT).expand_as(self.ids).contiguous()
        with target.device:
            self.head = MLPSpeculator(
                MLPSpeculatorConfig(vocab_size=target.vocab_size, emb_dim=target.hidden_size, **shape)
            )
        ones = torch.ones_like(self.ids)
        self.labels = align(self.ids, self.documents, ones, self.head.n_predict)
        self.optimiser = torch.optim.AdamW(self.head.parameters(), lr=1e-3, fused=target.device.type == "cuda")

    def forward(self) -> Tensor:
        return self.target.hidden(self.ids, self.documents)

    def step(self) -> None:
        """Forward, backward, update; the gradients are then given back."""
        half = self.target.dtype == torch.bfloat16
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=half):
            hidden = self.forward()
            batch = TrainingBatch(
                input_ids=self.ids,
                document_ids=self.documents,
                hidden=hidden,
                states=hidden.float(),
                targets={"labels": self.labels},
            )
            token_loss = ChunkedLoss(self.target.logits, self.weights, self.target.vocab_size)
            objective = self.head(batch, token_loss)["objective"][0] / self.head.n_predict
        objective.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    @property
    def held(self) -> int:
        """Bytes of what is there between two steps: both models' weights, and the optimiser's moments."""
        weights = [*self.target.model.parameters(), *self.head.parameters()]
        moments = [v for state in self.optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]
        return sum(tensor.nbytes for tensor in [*weights, *moments])


@dataclass(frozen=True)
class Batch:
    """What is trained at a preset's shape: a tied head of so many steps, on so many tokens at once."""

    n_predict: int
    rows_at_once: int
    length: int


BATCHES = {
    "llama-3-8b": Batch(3, 8, 2048),
    "llama-2-13b": Batch(3, 8, 2048),
    "smollm2-135m": Batch(3, 8, 512),
    "tiny": Batch(3, 2, 64),
}


def step_over_bound(preset: str, runs: int) -> list[dict]:
    """A training step at a preset's shape over the least time for its operations, for each loss; and its memory."""
    target, batch, rate = random_target(preset), BATCHES[preset], matrix_rate()
    rows = []
    for name, weights in LOSSES.items():
        inner = PRESETS[preset].head["inner_dim"]
        training = Training(
            target, weights, batch.rows_at_once, batch.length, n_predict=batch.n_predict, inner_dim=inner
        )
        training.step()  # makes the moments, so that they count as held and not as this step's
        peak = training.held + peak_bytes(training.step, target.device)
        operations = _operations(training.step)
        seconds = median(clock(training.step)[0] for _ in range(runs))
        rows.append(
            {
                "loss": name,
                "seconds": seconds,
                "operations": operations,
                "operations_per_second": rate,
                "time_over_bound": seconds / (operations / rate),
                "bytes": peak,
            }
        )
    return rows


def _product(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * math.prod(x) * weight[0]


def _attention(query: torch.Size, key: torch.Size, *_: object, **__: object) -> int:
    batch, heads, length, size = query
    return 4 * batch * heads * length * key[2] * size


# The counter knows torch's own products alone, and no attention whose query heads share key heads.
_COUNTED = {torch.ops.mkldnn._linear_pointwise: _product} if HAS_ONEDNN else {}
for _kind in ("cudnn", "flash", "efficient"):
    _COUNTED[getattr(torch.ops.aten, f"_scaled_dot_product_{_kind}_attention")] = _attention


def _operations(call: Callable) -> int:
    with FlopCounterMode(display=False, custom_mapping=_COUNTED) as counter:
        call()
    return counter.get_total_flops()


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.training", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="examples/stdlib_target", help="whose forward a step is compared with")
    parser.add_argument("--tokens", type=int, default=512, help="of the memory test's batch")
    parser.add_argument("--vocab_size", type=int, default=128_256, help="of the memory test")
    parser.add_argument("--hidden_size", type=int, default=1024, help="of the memory test, target and head alike")
    parser.add_argument("--n_predict", type=int, default=4, help="heads")
    parser.add_argument("--length", type=int, default=256, help="tokens of the row that a step is timed on")
    parser.add_argument("--runs", type=int, default=20, help="timed pairs")
    parser.add_argument("--preset", choices=BATCHES, help="measure a step at this shape, against its bound, instead")
    parser.add_argument("--output", type=Path, help="folder for training.json, or training-PRESET.json and .md")
    flags = parser.parse_args(argv)
    work = _run_preset if flags.preset else _run
    return run_command(parser.prog, lambda: work(flags))


def _run_preset(flags: argparse.Namespace) -> None:
    refuse_below(flags, runs=1)
    if flags.output:
        make_folder(flags.output)
    batch, device = BATCHES[flags.preset], resolve_device()
    rows = step_over_bound(flags.preset, flags.runs)
    report = {
        "preset": flags.preset,
        "hardware": hardware(device),
        "torch": torch.__version__,
        **asdict(batch),
        "runs": flags.runs,
        "rows": rows,
    }
    if flags.output:
        name = f"training-{flags.preset}"
        write_text(flags.output / f"{name}.md", _markdown(report))
        write_text(flags.output / f"{name}.json", json.dumps(report, indent=1))
    print(_markdown(report))


def _markdown(report: dict) -> str:
    rows = report["rows"]
    header = ("loss", "seconds", "TFLOP", "time over bound", "memory, GB")
    table = [
        (
            row["loss"],
            f"{row['seconds']:.3f}",
            f"{row['operations'] / 1e12:,.3f}",
            f"{row['time_over_bound']:.2f}",
            f"{row['bytes'] / 1e9:.2f}",
        )
        for row in rows
    ]
    lines = [
        f"# A training step at the shape of {report['preset']}, random weights",
        "",
        f"{report['hardware']}, torch {report['torch']}: {report['rows_at_once']} x {report['length']:,} tokens, "
        f"{report['n_predict']} tied heads. A large bfloat16 product runs at "
        f"{rows[0]['operations_per_second'] / 1e12:,.2f} TFLOP/s.",
        "",
        markdown_table(header, table),
        "",
    ]
    return "\n".join(lines)


def _run(flags: argparse.Namespace) -> None:
    refuse_below(flags, tokens=1, vocab_size=1, hidden_size=1, runs=1)
    refuse(
        (flags.n_predict < 2, "--n_predict must be at least 2"),
        (flags.length < flags.n_predict + 2, "--length is too short for that many heads"),
    )
    if flags.output:
        make_folder(flags.output)
    steps = step_over_target(Target.load(flags.target), flags.n_predict, flags.length, flags.runs)
    peaks = memory(flags.tokens, flags.vocab_size, flags.hidden_size, flags.n_predict)
    forms = [(f"{row['loss']}, {'chunked' if row['chunked'] else 'naive'}", row["bytes"] / 2**20) for row in peaks]
    print(markdown_table(("loss", "peak memory, MiB"), ((form, f"{size:,.0f}") for form, size in forms)))
    ratios = ((row["loss"], f"{row['time']:.2f}", f"{row['operations']:.2f}") for row in steps)
    print("\n" + markdown_table(("loss", "step over target, time", "operations"), ratios))
    if flags.output:
        write_text(flags.output / "training.json", json.dumps({"memory": peaks, "step": steps}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
