"""A training step of our heads against one of the `speculators` library, which runs in its own environment.

Both start from the same head and read the same tokens and hidden states. Their steps alternate, and a ratio compares
the tokens/s of neighbouring steps. Each head and dtype has two rows:

- equal work: the output matrix is frozen, and the target's distribution is normalised over the draft vocabulary.
- as configured: each library's default. Ours trains the output matrix of heads that have one, and normalises over the
  whole vocabulary.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig

from benchmarks.shapes import NO_ENDS, PRESETS
from benchmarks.stepping import Stepper
from eval.metrics import paired_bootstrap
from speculator.checkpoints import layout_of, save
from speculator.device import dtype_name, hardware, resolve_device
from speculator.drafters.measure import clock
from speculator.errors import UserError
from speculator.heads import ARCHITECTURES, Speculator
from speculator.heads.training import TokenLosses, TrainingBatch
from speculator.tables import markdown_table, shown
from speculator.target.linear import pack_linears
from train.config import LossConfig
from train.losses import ChunkedLoss, compiling_pays

# Options of the head, our losses, and the arguments of the peer's forward pass: the recipes in configs/ for SmolLM2.
HEADS: dict[str, tuple[dict[str, Any], LossConfig, dict[str, Any]]] = {
    "eagle3": ({"n_predict": 3}, LossConfig(kl=1), {"ttt_steps": 3, "loss": "kl_div"}),
    "dspark": (
        {"n_predict": 5, "num_hidden_layers": 2, "markov_rank": 64, "anchors": 128},
        LossConfig(cross_entropy=0.1, kl=0, total_variation=1.8, head_decay=0.78),
        {"max_anchors": 128, "loss": '{"ce": 0.1, "tv": 1.8}'},
    ),
}
WORK = ("equal work", "as configured")


def peer_python() -> Path:
    """Path of the interpreter in the peer's environment."""
    folder = Path(os.environ.get("SPECULATOR_SERVING", ".venv-serving")) / "speculators"
    if not (folder / "installed").exists():
        raise UserError(f"{folder} is missing or incomplete: `make {folder}/installed` builds it from PyPI")
    return folder.absolute() / "bin" / "python"


class Problem:
    """A new head of a preset's shape, and a row of tokens with random hidden states.

    Args:
        length: tokens of the row.
        drafted: size of the draft vocabulary.
    """

    def __init__(self, kind: str, preset: str, dtype: torch.dtype, length: int, drafted: int, folder: Path):
        torch.manual_seed(0)
        self.options, self.weights, self.call = HEADS[kind]
        self.config = LlamaConfig(**PRESETS[preset].target, **NO_ENDS, tie_word_embeddings=True)
        self.dtype, self.folder, self.device = dtype, folder, resolve_device()
        width, vocabulary = self.config.hidden_size, self.config.vocab_size
        self.embedding = torch.randn(vocabulary, width) / width**0.5
        self.drafted = torch.randperm(vocabulary)[:drafted].sort().values
        self.ids = self.drafted[torch.randint(drafted, (1, length))]  # every token has a cross-entropy
        self.hidden = nn.functional.rms_norm(torch.randn(1, length, width), (width,))
        self.aux_hidden = torch.randn(1, length, 3 * width)
        self.config.save_pretrained(folder)
        norm = {"model.norm.weight": torch.ones(width), "model.embed_tokens.weight": self.embedding}
        save_file(norm, folder / "model.safetensors")
        architecture = ARCHITECTURES[kind]
        shape = {**self.options, "draft_vocab_size": drafted, "base_model_name_or_path": str(folder)}
        self.made = architecture(architecture.config_class.for_target(self.config, **shape))
        self.made.draft_tokens.copy_(self.drafted)
        self.bind(self.made)

    def bind(self, head: Speculator) -> nn.Linear:
        """Share the target's matrices with a head, and return the output matrix."""
        embedding = self.embedding.to(self.device, self.dtype)
        output = nn.Linear(embedding.shape[1], len(embedding), bias=False, device="meta")
        output.weight = nn.Parameter(embedding, requires_grad=False)
        pack_linears(output)
        head.bind(self.config, embedding, output)  # type: ignore[operator]
        if head.config.starts_from_target(False):
            head.initialise_from(self.embedding.to(self.device), self.embedding.to(self.device))  # type: ignore[operator]
        return output

    def ours(self, work: str) -> Stepper:
        head = type(self.made)(self.made.config).to(self.device)
        head.load_state_dict(self.made.state_dict())
        pack_linears(head)  # as the trainer does
        output = self.bind(head)
        compiled = compiling_pays(self.device, len(self.embedding))
        loss: ChunkedLoss = ChunkedLoss(output, self.weights, len(self.embedding), compiled=compiled)
        if work == "equal work":
            for name, weight in head.named_parameters():
                weight.requires_grad_(not name.startswith("lm_head"))
            loss = _OverDraftVocabulary(output, self.drafted.to(self.device), self.weights, compiled)
        ids, documents = self.ids.to(self.device), torch.zeros_like(self.ids).to(self.device)
        targets = head.config.training_targets(self.ids, torch.zeros_like(self.ids), torch.ones_like(self.ids), [0])
        targets = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in targets.items()}
        hidden, states = self.hidden.to(self.device, self.dtype), self.aux_hidden.to(self.device)
        batch = TrainingBatch(ids, documents, hidden, states, targets)

        def objective() -> Tensor:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                total, count = head(batch, loss)["objective"]
            return total / count

        return Stepper([*head.parameters(), output.weight], objective, fused=True)

    @contextmanager
    def theirs(self) -> Iterator[_Peer]:
        """Start the peer's process on the same head and row."""
        head = self.folder / "head"
        save(self.made, head, layout_of("speculators", self.made))
        call = {**self.call, "dtype": dtype_name(self.dtype)}
        shifted = "ttt_steps" in call  # the caller aligns a token with the state before it
        ids, aux_hidden, hidden = self.ids, self.aux_hidden, self.hidden
        if shifted:
            ids, aux_hidden, hidden = ids[:, 1:], aux_hidden[:, :-1], hidden[:, 1:]
        given = {
            "input_ids": ids,
            "hidden_states": aux_hidden,
            "verifier_last_hidden_states": hidden,
            "document_ids": torch.zeros_like(ids),
            "loss_mask": torch.ones_like(ids, dtype=torch.bool),
        }
        save_file({name: x.contiguous() for name, x in given.items()}, head / "inputs.safetensors")
        (head / "call.json").write_text(json.dumps(call))
        command = [str(peer_python()), "-m", "benchmarks.speculators_step", str(head)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        root = Path(__file__).parents[1]
        with subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield _Peer(process)
            finally:
                process.kill()


class _OverDraftVocabulary(ChunkedLoss):
    """Normalises the target's distribution over the draft vocabulary, as the peer does."""

    def __init__(self, output: nn.Linear, drafted: Tensor, weights: LossConfig, compiled: bool):
        rows = nn.Linear(output.in_features, len(drafted), bias=False, device="meta")
        rows.weight = nn.Parameter(output.weight[drafted], requires_grad=False)
        pack_linears(rows)
        super().__init__(rows, weights, len(drafted), compiled=compiled)

    def __call__(self, logits: Any, labels: Any, hidden: Any, weights: Any, *rest: Any) -> TokenLosses:
        return super().__call__(logits, labels, hidden, weights, None, *rest[1:])


class _Peer:
    """The peer's process; `about` has its versions, its loss in the first step, and its peak memory."""

    def __init__(self, process: subprocess.Popen):
        self.process = process
        self.about = self._read()

    def step(self) -> float:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self._read()["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise UserError("the peer's process ended; its error is above")
        return json.loads(line)


def compare(kind: str, preset: str, dtype: torch.dtype, length: int, drafted: int, runs: int) -> list[dict]:
    """Measure both kinds of work against the peer's step, in turns."""
    with TemporaryDirectory() as folder:
        problem = Problem(kind, preset, dtype, length, drafted, Path(folder))
        with problem.theirs() as peer:
            ours, losses, peaks = {}, {}, {}
            for work in WORK:
                ours[work] = problem.ours(work)
                ours[work].step()
                losses[work] = ours[work].loss.item()
                ours[work].step()
                peaks[work] = ours[work].peak()
            rounds = [
                (peer.step(), *(clock(ours[work].step)[0] for work in WORK))
                for _ in tqdm(range(runs), desc=f"{kind}, {dtype_name(dtype)}", unit="round")
            ]
    rows = []
    for column, work in enumerate(WORK, 1):
        pairs = [(each[0], each[column]) for each in rounds]
        rows.append(
            {
                "head": kind,
                "dtype": dtype_name(dtype),
                "work": work,
                "tokens_per_second": {
                    "ours": length / median(own for _, own in pairs),
                    "speculators": length / median(theirs for theirs, _ in pairs),
                },
                "ratio": paired_bootstrap(pairs, lambda some: median(theirs / own for theirs, own in some)),
                "bytes": {"ours": peaks[work], "speculators": peer.about["bytes"]},
                "loss": {"ours": losses[work], "speculators": peer.about["loss"]},
                "speculators": peer.about["version"],
                "speculators_torch": peer.about["torch"],
            }
        )
    return rows


def run(preset: str, length: int, drafted: int, runs: int) -> dict:
    """Compare every head in float32 and bfloat16."""
    rows = []
    for kind in HEADS:
        for dtype in (torch.float32, torch.bfloat16):
            rows += compare(kind, preset, dtype, length, drafted, runs)
    return {
        "preset": preset,
        "hardware": hardware(resolve_device()),
        "torch": torch.__version__,
        "tokens": length,
        "draft_vocab_size": drafted,
        "runs": runs,
        "rows": rows,
    }


def markdown(report: dict) -> str:
    header = (
        "head",
        "dtype",
        "work",
        "ours, tokens/s",
        "speculators, tokens/s",
        "ratio",
        "ours, MB",
        "speculators, MB",
    )
    table = [
        (
            row["head"],
            row["dtype"],
            row["work"],
            *(f"{value:,.0f}" for value in row["tokens_per_second"].values()),
            shown(row["ratio"]),
            *(f"{value / 1e6:,.0f}" for value in row["bytes"].values()),
        )
        for row in report["rows"]
    ]
    first = report["rows"][0]
    lines = [
        f"A training step of {report['tokens']} tokens at the shape of {report['preset']}, draft vocabulary "
        f"{report['draft_vocab_size']:,}, hidden states given: torch {report['torch']}, speculators "
        f"{first['speculators']} with torch {first['speculators_torch']}, {report['hardware']}; {report['runs']} "
        "rounds, medians, 95% interval of the ratio.",
        "",
        markdown_table(header, table),
    ]
    return "\n".join(lines)
