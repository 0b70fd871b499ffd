"""What each part of the recipe is worth: one factor at a time on the embedded target, every arm at its own best rate.

    python -m benchmarks.study [--table recipes|architectures|attention|refused] [--steps 1200] --output runs/study

Each arm trains a fresh head on the same rows for the same number of tokens. Its learning rate is the best of the grid
for seed 0 on validation prompts; the table shows held-out prompts, over all seeds. The target's hidden states are
computed once. A result is a file, with its head beside it: what is there is not done again, so a study that was cut off
goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, cast

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments, get_cosine_schedule_with_warmup, set_seed
from transformers.utils import logging as transformers_logging

from data.onpolicy import generate_rows
from data.prepare import token_rows
from eval.metrics import acceptance
from eval.suites import Suite, from_text
from speculator import Chain, HeadDrafter, MLPSpeculator, Sampling, Tree, generate
from speculator.checkpoints import load_any
from speculator.decoding.drafter import Shape
from speculator.errors import OneLineParser, UserError, run_command
from speculator.files import write_text
from speculator.heads import Eagle3Speculator, MLPSpeculatorConfig, Speculator
from speculator.tables import markdown_table
from speculator.target.model import Target
from train.checks import own_sampling
from train.config import GenerateConfig, HeadOptions, LossConfig, RunConfig
from train.initialise import new_head
from train.trainer import Collator, SpeculatorTrainer

SOURCES = ["python-sources"]
LENGTH = 256
STEPS = 1200
"""Of one row each, by default: 307,200 tokens."""
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


@dataclass(frozen=True)
class Arm:
    """One recipe."""

    name: str
    loss: LossConfig
    initialise: Literal["random", "target"] = "random"
    bf16_weights: bool = False
    weight_decay: float = 0.0
    rates: tuple[float, ...] = RATES
    on_policy: float = 0.0
    """The last part of the budget goes to the target's own text, half of it greedy, half at temperature 1."""
    rejected_token_weight: float | None = None
    """The head drafts the target's own text, and so often counts a token there that took a refused draft's place."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Settings of the head."""
    frozen_output: bool = False
    """The output matrix stays as it was initialised."""
    part: float = 1.0
    """Of the budget that is used."""


PUBLISHED = Arm("published", HARD, bf16_weights=True, weight_decay=0.1, rates=(1e-3,))
ARMS = [
    PUBLISHED,
    dataclasses.replace(PUBLISHED, name="published, rate tuned", rates=RATES),
    Arm("float32 weights", HARD),
    Arm("+ initialised from the target", HARD, "target"),
    Arm("+ KL instead of cross-entropy", KL, "target"),
    Arm("+ LK instead of KL", LK, "target"),
    Arm("KL, a quarter on the target's own text", KL, "target", on_policy=0.25),
]


INDEPENDENT = "independent"
EAGLE3 = Arm("EAGLE-3", KL, rates=(2.5e-3, 5e-3, 1e-2), shape={"architecture": "eagle3"})
"""Starts from the target's output matrix, and has fewer weights than the others."""
ARCHITECTURES = [
    Arm("MLP", KL),
    Arm("independent heads", KL, shape={"architecture": INDEPENDENT}),
    Arm("LSTM", KL, shape={"architecture": "lstm", "inner_dim": 171}),  # as many weights as the MLP's
    EAGLE3,
]


def _varied(name: str, frozen_output: bool = False, part: float = 1.0, **shape: Any) -> Arm:
    """One thing changed, at the rate that was the best for EAGLE-3."""
    more = {"shape": EAGLE3.shape | shape, "frozen_output": frozen_output, "part": part}
    return dataclasses.replace(EAGLE3, name=name, rates=(2.5e-3,), **more)


ATTENTION = [
    _varied("EAGLE-3, four steps"),
    *(_varied(f"{steps} step{'s' * (steps > 1)}", n_predict=steps) for steps in (1, 3, 5, 7)),
    _varied("without fc_norm and norm_output", options={"fc_norm": False, "norm_output": False}),
    _varied("norm_before_residual", norm_before_residual=True),
    _varied("output matrix frozen", frozen_output=True),
    _varied("half of the rows", part=0.5),
]

OWN = Arm("counts once", KL, "target", rates=(1e-2,), on_policy=0.25, rejected_token_weight=1.0)
REFUSED = [OWN, *(dataclasses.replace(OWN, name=f"counts {w} times", rejected_token_weight=float(w)) for w in (2, 4))]

TABLES = {"recipes": ARMS, "architectures": ARCHITECTURES, "attention": ATTENTION, "refused": REFUSED}
LONGER = {"recipes": (ARMS[0], ARMS[2], ARMS[4], ARMS[6])}
"""Those that are trained on four times the tokens too, for one seed."""


class Independent(MLPSpeculator):
    """The floor: heads that see the hidden state alone (Medusa's, 2401.10774), none what the one before it drafted.

    Here and not among the heads, as nobody would serve it.
    """

    def advance(self, index: int, state: Tensor, token: Tensor) -> Tensor:
        return state

    def features(self, index: int, state: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.ln[index](self.proj[index](state)))


class BF16AdamW(torch.optim.AdamW):
    """AdamW with weights, gradients and moments in bfloat16, as the published recipe trains.

    The matrix products stay in float32, so a CPU without bfloat16 units does the same training in bearable time.
    """

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


class Remembered:
    """A target that reads each row once and keeps its last states and the taps last asked for."""

    def __init__(self, target: Target):
        self.target, self.logits, self.vocab_size, self.aux_layers = target, target.logits, target.vocab_size, self
        self._wanted: tuple[int, ...] = ()
        self._kept: dict[bytes, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def recorded(self, wanted: Sequence[int]) -> Iterator[Callable[[Tensor], Tensor]]:
        """As `AuxLayers.recorded`, which the trainer asks for."""
        if tuple(wanted) != self._wanted:
            self._wanted, self._kept = tuple(wanted), {}
        yield lambda last: self._read if wanted else last

    def hidden(self, tokens: Tensor, documents: Tensor) -> Tensor:  # [B, S], [B, S] all the same -> [B, S, D]
        keys = [row.numpy().tobytes() for row in tokens]
        for key, row in zip(keys, tokens, strict=True):
            if key not in self._kept:
                with self.target.aux_layers.recorded(self._wanted) as read:
                    last = self.target.hidden(row[None])
                self._kept[key] = last[0], read(last)[0]
        last, self._read = (torch.stack(states) for states in zip(*map(self._kept.__getitem__, keys), strict=True))
        return last


def fresh_head(arm: Arm, seed: int, target: Target, rows: Dataset) -> Speculator:
    if arm.shape.get("architecture") == INDEPENDENT:
        torch.manual_seed(seed)
        return Independent(
            MLPSpeculatorConfig(
                vocab_size=target.vocab_size, emb_dim=target.hidden_size, n_predict=4, tie_weights=False
            )
        )
    shape = HeadOptions(initialise=arm.initialise, **arm.shape)
    head = new_head(RunConfig(speculator=shape, seed=seed), target, rows)
    if arm.frozen_output:
        cast(Eagle3Speculator, head).lm_head.requires_grad_(False)
    return head


def train(arm: Arm, rate: float, seed: int, rows: Dataset, target: Remembered, head: Speculator) -> Speculator:
    """Train a head on rows of text or, with half the rate, of the target's own."""
    set_seed(seed)
    steps = len(rows)
    settings = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": arm.weight_decay}
    optimiser = (BF16AdamW if arm.bf16_weights else torch.optim.AdamW)(list(head.parameters()), **settings)
    arguments = TrainingArguments(
        output_dir="unused", max_steps=steps, per_device_train_batch_size=1, lr_scheduler_type="cosine",
        warmup_steps=steps // 20, learning_rate=rate, max_grad_norm=1.0, seed=seed, use_cpu=True,
        save_strategy="no", logging_steps=200, report_to="none", remove_unused_columns=False,
        label_names=["labels"], disable_tqdm=True,
    )  # fmt: skip
    schedule = get_cosine_schedule_with_warmup(optimiser, steps // 20, steps)
    SpeculatorTrainer(
        model=head, target=target, loss=arm.loss, decode=lambda _: {}, args=arguments, train_dataset=rows,
        data_collator=Collator(head.config, arm.rejected_token_weight), optimizers=(optimiser, schedule),
    ).train()  # fmt: skip
    return head


def measure(head: Speculator, target: Target, suite: Suite) -> dict[str, float]:
    """Tokens per step: of sampled chains and, at temperature 0, of a tree too."""
    found = {}
    for column, (temperature, shape) in DRAFTS.items():
        made = generate(
            target, HeadDrafter(head, shape), suite.prompts, Sampling(temperature), max_new_tokens=NEW_TOKENS
        )
        steps = [step for row in made.steps for step in row]
        found[column] = acceptance(steps, shape.depth)["acceptance_length"]
    return found


class Study:
    """The results in a folder, made where they are missing."""

    def __init__(self, target: Target, folder: Path, steps: int = STEPS):
        self.target, self.folder, self.steps = target, folder, steps
        text = token_rows(SOURCES, "train", target.tokenizer, LENGTH, max_tokens=4 * steps * LENGTH)
        if len(text) < 4 * steps:
            raise UserError(f"{', '.join(SOURCES)} gives {len(text)} rows of {LENGTH} tokens, not {4 * steps}")
        self.text = text.remove_columns([name for name in text.column_names if name != "input_ids"])
        self.suites = {
            split: from_text(SOURCES, target.tokenizer, PROMPT_TOKENS, count, split=split)
            for split, count in PROMPTS.items()
        }
        self.seen = Remembered(target)

    def _own_text(self, count: int, folder: Path, head: Speculator | None) -> Dataset:
        """`count` rows that the target said: without a head to draft them the same for every arm and seed."""
        beginnings = [row[:PROMPT_TOKENS] for row in self.text[2 * self.steps : 2 * self.steps + count]["input_ids"]]
        return generate_rows(
            self.target,
            None if head is None else HeadDrafter(head),
            beginnings,
            folder,
            sampling=own_sampling(GenerateConfig()),
            max_new_tokens=LENGTH - PROMPT_TOKENS,
            batch_size=50,
            keep_refused=head is not None,
        )

    def _trained(self, arm: Arm, rate: float, seed: int, steps: int) -> Speculator:
        """A head after both stages. Arms that weigh refused drafts share the head of stage 1, and what it drafted."""
        own = round(arm.on_policy * steps)
        text, first = self.text.select(range(steps - own)), self.folder / f"first_{rate:g}_{steps}_seed_{seed}"
        if arm.rejected_token_weight is None or not first.exists():
            head = train(arm, rate, seed, text, self.seen, fresh_head(arm, seed, self.target, text))
            if arm.rejected_token_weight is not None:
                head.save_pretrained(first)
        if arm.rejected_token_weight is None:
            folder, drafting = self.folder / f"own_text_{own}", None
        else:
            head = load_any(first)
            folder, drafting = self.folder / f"own_text_{first.name}", head
        return (
            train(arm, rate / 2, seed, self._own_text(own, folder, drafting), self.seen, head.train()) if own else head
        )

    def result(self, arm: Arm, rate: float, seed: int, budget: int = 1) -> dict[str, Any]:
        """acceptance_length of one head on both splits; trained now unless its file is there."""
        steps = round(budget * self.steps * arm.part)
        file = self.folder / f"{arm.name} {rate:g} {steps} steps seed {seed}.json".replace(" ", "_")
        if not file.exists():
            began = time.monotonic()
            head = self._trained(arm, rate, seed, steps)
            seconds = time.monotonic() - began
            head.save_pretrained(file.with_suffix(""))
            splits = ["held-out", *["validation"] * (len(arm.rates) > 1)]  # the latter to choose a rate by
            figures = {split: measure(head, self.target, self.suites[split]) for split in splits}
            about = {"arm": arm.name, "rate": rate, "seed": seed, "budget": budget, "seconds": seconds}
            write_text(file, json.dumps(about | figures))
            print(f"{file.name}: {figures}", file=sys.stderr)
        return json.loads(file.read_text())

    def best_rate(self, arm: Arm) -> float:
        """The best for seed 0, by the mean of both temperatures on validation prompts; never at the grid's edge."""
        if len(arm.rates) == 1:
            return arm.rates[0]
        rates = sorted(arm.rates)
        while True:
            best = max(rates, key=lambda rate: mean(self.result(arm, rate, 0)["validation"].values()))
            if rates[0] < best < rates[-1]:
                return best
            rates = sorted([*rates, best * 2 if best == rates[-1] else best / 2])

    def row(self, arm: Arm, seeds: tuple[int, ...], budget: int = 1) -> dict[str, Any]:
        """One line of the table: means over seeds, and their spread."""
        rate = self.best_rate(arm)
        results = [self.result(arm, rate, seed, budget) for seed in seeds]
        columns = {name: [result["held-out"][name] for result in results] for name in results[0]["held-out"]}
        return {
            "arm": arm.name,
            "budget": budget,
            "tokens": round(budget * self.steps * arm.part) * LENGTH,
            "seconds": mean(result["seconds"] for result in results),
            "rate": rate,
            "seeds": len(seeds),
            **{name: (mean(values), stdev(values) if len(values) > 1 else 0.0) for name, values in columns.items()},
        }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; accepted tokens against the first row of the same budget."""
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
    flags = parser.parse_args(argv)
    return run_command(parser.prog, lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    transformers_logging.set_verbosity_error()
    folder = Path(flags.output)
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(Target.load(flags.target, dtype="float32"), folder, flags.steps)
    rows = [study.row(arm, SEEDS) for arm in TABLES[flags.table]]
    rows += [study.row(arm, (0,), budget=4) for arm in LONGER.get(flags.table, ())]
    text = table(rows)
    write_text(folder / f"{flags.table}.json", json.dumps(rows, indent=1))
    write_text(folder / f"{flags.table}.md", text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
