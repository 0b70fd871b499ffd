"""Measure how much each part of the training recipe contributes, on the embedded target.

    python -m benchmarks.study [--table TABLE] [--steps N] [--seeds N] --output OUT

Each arm trains a fresh head on the same rows for the same number of tokens. Its learning rate is the best of a grid for
seed 0 on validation prompts; the table shows held-out prompts over all seeds. The target's hidden states are computed
once. A result is a file, so an interrupted study resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import get_cosine_schedule_with_warmup, set_seed
from transformers.utils import logging as transformers_logging

from data.mixture import mixture_of
from data.prepare import RowRequest, token_rows
from data.writers.engine import EngineWriter
from data.writing import Writing
from eval.suites import Suite, from_text
from speculator import Chain, HeadDrafter, MLPSpeculator, Sampling, Tree, generate
from speculator.acceptance import Acceptance
from speculator.decoding.drafter import Shape
from speculator.errors import OneLineParser, run_command
from speculator.files import write_text
from speculator.heads import MLPSpeculatorConfig, Speculator
from speculator.prompts import Conversation
from speculator.tables import markdown_table
from speculator.target.in_process import InProcessTarget
from speculator.target.model import Target
from train.door.gpus import Place
from train.door.initialise import new_head
from train.door.settle import Run
from train.loop import Loop
from train.optimizers import MuonAndAdamW
from train.options.config import DataConfig, EvalConfig, HeadOptions, LossConfig, RunConfig, StageConfig
from train.states.batch import Collator, StageRows, StateSource

SOURCES = ["python-sources"]
LENGTH = 256
STEPS = 1200
RATES = (5e-3, 1e-2, 2e-2)
SEEDS = (0, 1, 2)
PROMPTS = {"validation": 32, "held-out": 64}
PROMPT_TOKENS, NEW_TOKENS = 64, 128
DRAFTS: dict[str, tuple[float, Shape]] = {
    "T=0": (0.0, Chain(4)),
    "T=1": (1.0, Chain(4)),
    "T=0, tree of 16": (0.0, Tree([4, 3, 2, 1], 16)),
}

HARD = LossConfig(cross_entropy=1.0, kl=0.0)
KL = LossConfig(kl=1.0)
LK = LossConfig(kl=0.0, lk=1.0)
DSPARK = LossConfig(cross_entropy=0.1, kl=0.0, total_variation=1.8, head_decay=0.78)
DFLASH = LossConfig(cross_entropy=1.0, kl=0.0, head_decay=0.78)
D_PACE = LossConfig(cross_entropy=1.0, kl=0.0, d_pace=0.5)


@dataclass(frozen=True)
class Arm:
    """One row of a table.

    `on_policy`: share of the budget for the target's own text, at the end. `passes`: reads of a row of other text.
    """

    name: str
    loss: LossConfig
    initialise: Literal["random", "target"] = "random"
    bf16_weights: bool = False
    muon: bool = False
    weight_decay: float = 0.0
    rates: tuple[float, ...] = RATES
    on_policy: float = 0.0
    passes: int = 1
    shape: dict[str, Any] = field(default_factory=dict)


PUBLISHED = Arm("published", HARD, bf16_weights=True, weight_decay=0.1, rates=(1e-3,))
RECIPES = [
    PUBLISHED,
    dataclasses.replace(PUBLISHED, name="published, rate tuned", rates=RATES),
    Arm("float32 weights", HARD),
    Arm("+ initialised from the target", HARD, "target"),
    Arm("+ KL instead of cross-entropy", KL, "target"),
    Arm("+ LK instead of KL", LK, "target"),
    Arm("KL, a quarter on the target's own text", KL, "target", on_policy=0.25),
]
INDEPENDENT = "independent"
ARCHITECTURES = [
    Arm("MLP", KL),
    Arm("independent heads", KL, shape={"architecture": INDEPENDENT}),
    Arm("MTP layer", KL, rates=(1.25e-3, 2.5e-3, 5e-3), shape={"architecture": "mtp"}),
    Arm("EAGLE-3", KL, rates=(2.5e-3, 5e-3, 1e-2), shape={"architecture": "eagle3"}),
]


def block_drafter(name: str, loss: LossConfig, layers: int = 2, rank: int = 64, **options: Any) -> Arm:
    """A head that drafts four tokens in one pass."""
    shape = {"num_hidden_layers": layers, "markov_rank": rank, "mask_token_id": 3, "anchors": 64, **options}
    return Arm(name, loss, rates=(1e-3, 2e-3, 4e-3), shape={"architecture": "dspark", "options": shape})


FILL_IN = {"sample_from_anchor": False, "confidence_head": False}
CONVOLUTIONS, SELECTOR = {"conv_group_size": 16}, {"selector_rank": 64}
BLOCKS = [
    ARCHITECTURES[-1],
    block_drafter("DFlash, 2 layers", DFLASH, rank=0, **FILL_IN),
    block_drafter("DFlash, 2 layers, D-PACE", D_PACE, rank=0, **FILL_IN),
    block_drafter("DSpark, 1 layer", DSPARK, layers=1),
    block_drafter("DSpark, 2 layers", DSPARK),
    block_drafter("DSpark, 3 layers", DSPARK, layers=3),
    block_drafter("DSpark, 2 layers, rank 0", DSPARK, rank=0),
    block_drafter("DSpark, 2 layers, D-PACE", dataclasses.replace(DSPARK, head_decay=1.0, d_pace=0.5)),
    block_drafter("DFlash 2, 2 layers", DFLASH, rank=0, **FILL_IN, **CONVOLUTIONS, **SELECTOR),
    block_drafter("DFlash 2, no selector", DFLASH, rank=0, **FILL_IN, **CONVOLUTIONS),
    block_drafter("DFlash 2, no convolutions", DFLASH, rank=0, **FILL_IN, **SELECTOR),
]
EAGLE3: dict[str, Any] = {"rates": (1.25e-3, 2.5e-3, 5e-3), "shape": {"architecture": "eagle3"}}
KNOBS = [
    Arm("EAGLE-3, KL", KL, **EAGLE3),
    Arm("D-PACE", dataclasses.replace(KL, d_pace=0.5), **EAGLE3),
    Arm("Muon", KL, muon=True, **EAGLE3),
    Arm("Muon, D-PACE", dataclasses.replace(KL, d_pace=0.5), muon=True, **EAGLE3),
]
AMOUNTS = [
    Arm(f"Muon, read {passes} times", KL, muon=True, passes=passes, rates=(5e-3,), shape={"architecture": "eagle3"})
    for passes in (16, 8, 4, 2, 1)
]
OPTIMIZERS = [
    arm if not muon else dataclasses.replace(arm, name=f"{arm.name}, Muon", muon=True, rates=(2.5e-3, 5e-3, 1e-2))
    for arm in (ARCHITECTURES[0], block_drafter("DSpark, 2 layers", DSPARK), *ARCHITECTURES[2:4])
    for muon in (False, True)
]
TABLES = {
    "recipes": RECIPES,
    "architectures": ARCHITECTURES,
    "blocks": BLOCKS,
    "knobs": KNOBS,
    "optimizers": OPTIMIZERS,
    "text": AMOUNTS,
}
LONGER = {"recipes": (RECIPES[0], RECIPES[2], RECIPES[4], RECIPES[6]), "blocks": (BLOCKS[0], BLOCKS[2], BLOCKS[4])}
"""Arms that are also trained on four times the tokens, with one seed."""


class Independent(MLPSpeculator):
    """Medusa-style heads (2401.10774): each sees the hidden state only, not the tokens drafted before it."""

    def advance(self, index: int, state: Tensor, token: Tensor) -> Tensor:
        return state

    def features(self, index: int, state: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.ln[index](self.proj[index](state)))


class BF16AdamW(AdamW):
    """AdamW with weights, gradients and moments in bfloat16, as in the published recipe; products stay in float32."""

    def __init__(self, parameters: list[torch.nn.Parameter], **settings: Any):
        self._shown = parameters
        self._kept = [torch.nn.Parameter(p.detach().bfloat16()) for p in parameters]
        super().__init__(self._kept, **settings)
        self._show()

    @torch.no_grad()
    def _show(self) -> None:
        for shown, kept in zip(self._shown, self._kept, strict=True):
            shown.copy_(kept)

    def step(self, closure: Any = None) -> None:
        for shown, kept in zip(self._shown, self._kept, strict=True):
            kept.grad = shown.grad.bfloat16()
        super().step(closure)
        self._show()


class CachedTarget(InProcessTarget):
    """The training half of a target that caches the states of every row, with the auxiliary layers requested last."""

    def __init__(self, target: Target):
        vars(self).update(vars(target))  # no second probe
        self._wanted: tuple[int, ...] = ()
        self._kept: dict[bytes, tuple[Tensor, Tensor]] = {}

    def training_states(
        self,
        tokens: Tensor,  # [B, S]
        documents: Tensor,  # [B, S] all the same
        aux_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:  # [B, S, D], [B, S, nD]
        if tuple(aux_layers) != self._wanted:
            self._wanted, self._kept = tuple(aux_layers), {}
        keys = [row.numpy().tobytes() for row in tokens]
        for key, row in zip(keys, tokens, strict=True):
            if key not in self._kept:
                last, states = super().training_states(row[None], None, aux_layers)
                self._kept[key] = last[0], states[0]
        last, states = (torch.stack(each) for each in zip(*map(self._kept.__getitem__, keys), strict=True))
        return last, states


def fresh_head(arm: Arm, seed: int, target: Target, rows: Dataset) -> Speculator:
    if arm.shape.get("architecture") == INDEPENDENT:
        torch.manual_seed(seed)
        return Independent(
            MLPSpeculatorConfig(
                vocab_size=target.vocab_size, emb_dim=target.hidden_size, n_predict=4, tie_weights=False
            )
        )
    shape = HeadOptions(initialise=arm.initialise, **arm.shape)
    config = RunConfig(
        speculator=shape,
        data=DataConfig(seq_length=LENGTH),
        stage2=replace(RunConfig().stage2, max_steps=0),
        eval=EvalConfig(prompt_tokens=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS),
        seed=seed,
    )
    return new_head(Run.of(config, target.config, Place(1)), target, rows, LENGTH)


def train(arm: Arm, rate: float, seed: int, rows: Dataset, target: CachedTarget, head: Speculator) -> Speculator:
    """Train a head on rows, one row per step."""
    set_seed(seed)
    steps = len(rows)
    settings = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": arm.weight_decay}
    optimiser: Optimizer = (BF16AdamW if arm.bf16_weights else AdamW)(list(head.parameters()), **settings)
    if arm.muon:
        optimiser = MuonAndAdamW(optimiser, head)
    stage = StageConfig(max_steps=steps, per_device_train_batch_size=1, logging_steps=200)
    given = StageRows(rows, Collator(head.config), seed=seed)
    loop = Loop(head, StateSource(target, head.aux_layers), stage, arm.loss, given, Path())
    loop.optimizer = optimiser
    loop.schedule = get_cosine_schedule_with_warmup(optimiser, steps // 20, steps)
    loop.run()
    return head


def measure(head: Speculator, target: Target, suite: Suite) -> dict[str, float]:
    """Acceptance length of sampled chains and, at temperature 0, of a tree."""
    found = {}
    for column, (temperature, shape) in DRAFTS.items():
        made = generate(
            target, HeadDrafter(head, shape), suite.prompts, Sampling(temperature), max_new_tokens=NEW_TOKENS
        ).check()
        steps = [step for row in made.steps for step in row]
        found[column] = Acceptance.of(steps).length
    return found


class Study:
    """Results in a folder, in a subfolder of each target; missing ones are computed on demand."""

    def __init__(self, target: Target, folder: Path, steps: int = STEPS):
        self.target, self.steps = target, steps
        self.folder = folder / f"{Path(target.name).name} {(target.digest or '')[:8]}".replace(" ", "_")
        self.folder.mkdir(parents=True, exist_ok=True)
        mixture = mixture_of(SOURCES)
        text = token_rows(
            RowRequest(
                mixture=mixture, split="train", tokenizer=target.tokenizer, length=LENGTH, max_tokens=4 * steps * LENGTH
            )
        )
        self.text = text.select_columns("input_ids")
        self.suites = {
            split: from_text(mixture, target.tokenizer, PROMPT_TOKENS, count, split=split)
            for split, count in PROMPTS.items()
        }
        self.cached = CachedTarget(target)

    def _own_text(self, count: int) -> Dataset:
        """Generate `count` rows of the target's own text, the same rows for every arm and seed."""
        prompts = [
            Conversation(row[:PROMPT_TOKENS]) for row in self.text[2 * self.steps : 2 * self.steps + count]["input_ids"]
        ]
        writing = Writing(samplings=(Sampling(0.0), Sampling(1.0)), max_new_tokens=LENGTH - PROMPT_TOKENS)
        return EngineWriter(self.target, batch_size=50).write(prompts, self.folder / f"own_text_{count}", writing)

    def _trained(self, arm: Arm, rate: float, seed: int, steps: int) -> Speculator:
        """Train a head on text, then at half the rate on the target's own text."""
        own = round(arm.on_policy * steps)
        text = self.text.select([row % max(1, (steps - own) // arm.passes) for row in range(steps - own)])
        head = train(arm, rate, seed, text, self.cached, fresh_head(arm, seed, self.target, text))
        return train(arm, rate / 2, seed, self._own_text(own), self.cached, head.train()) if own else head

    def result(self, arm: Arm, rate: float, seed: int, budget: int = 1) -> dict[str, Any]:
        """Acceptance lengths of one head on both splits, read from its file or computed now."""
        steps = budget * self.steps
        file = self.folder / f"{arm.name} {rate:g} {steps} steps seed {seed}.json".replace(" ", "_")
        if not file.exists():
            began = time.monotonic()
            head = self._trained(arm, rate, seed, steps)
            seconds = time.monotonic() - began
            figures = {split: measure(head, self.target, suite) for split, suite in self.suites.items()}
            about = {"arm": arm.name, "rate": rate, "seed": seed, "budget": budget, "seconds": seconds}
            write_text(file, json.dumps(about | figures))
            print(f"{file.name}: {figures}", file=sys.stderr)
        return json.loads(file.read_text())

    def best_rate(self, arm: Arm) -> float:
        """Best learning rate for seed 0 on validation prompts; extends the grid while the best is at its edge."""
        if len(arm.rates) == 1:
            return arm.rates[0]
        rates = sorted(arm.rates)
        while True:
            best = max(rates, key=lambda rate: mean(self.result(arm, rate, 0)["validation"].values()))
            if rates[0] < best < rates[-1]:
                return best
            rates = sorted([*rates, best * 2 if best == rates[-1] else best / 2])

    def row(self, arm: Arm, seeds: tuple[int, ...], budget: int = 1) -> dict[str, Any]:
        """Means and standard deviations over seeds."""
        rate = self.best_rate(arm)
        results = [self.result(arm, rate, seed, budget) for seed in seeds]
        columns = {name: [result["held-out"][name] for result in results] for name in results[0]["held-out"]}
        return {
            "arm": arm.name,
            "budget": budget,
            "tokens": budget * self.steps * LENGTH,
            "seconds": mean(result["seconds"] for result in results),
            "rate": rate,
            "seeds": len(seeds),
            **{name: (mean(values), stdev(values) if len(values) > 1 else 0.0) for name, values in columns.items()},
        }


def table(rows: list[dict[str, Any]]) -> str:
    """Render rows; accepted tokens are compared with the first row of the same budget."""
    header = ("recipe", "tokens", "seconds", "rate", *DRAFTS, f"accepted, against {rows[0]['arm']}")
    lines = []
    for row in rows:
        first = next(r for r in rows if r["budget"] == row["budget"])
        gains = [f"{(row[t][0] - 1) / (first[t][0] - 1) - 1:+.0%}" for t in DRAFTS]
        cells = [f"{row[t][0]:.2f} ± {row[t][1]:.2f}" for t in DRAFTS]
        costs = f"{row['tokens']:,}", f"{row['seconds']:.0f}", f"{row['rate']:g}"
        lines.append((row["arm"], *costs, *cells, " / ".join(gains)))
    return markdown_table(header, lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.study", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="examples/stdlib_target", help="hub id or folder")
    parser.add_argument("--output", required=True, help="folder of the results; what is there is kept")
    parser.add_argument("--table", choices=TABLES, default="recipes", help="what is compared; default: recipes")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"rows of {LENGTH} tokens; default: {STEPS}")
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 4), help="heads of each arm; default: 3")
    flags = parser.parse_args(argv)
    return run_command(parser.prog, lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    transformers_logging.set_verbosity_error()
    target, folder = Target.load(flags.target, dtype="float32"), Path(flags.output)
    study = Study(target, folder, flags.steps)
    rows = [study.row(arm, SEEDS[: flags.seeds]) for arm in TABLES[flags.table]]
    rows += [study.row(arm, (0,), budget=4) for arm in LONGER.get(flags.table, ())]
    text = table(rows)
    write_text(folder / f"{flags.table}.json", json.dumps(rows, indent=1))
    write_text(folder / f"{flags.table}.md", text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
