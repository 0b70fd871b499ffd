"""`python -m benchmarks.plan`: what `train.py --plan` foresees against what training then allocates, on the CPU.

    python -m benchmarks.plan
    python -m benchmarks.plan --device cuda [--output DIR]      instead: the recipes, on a GPU (`benchmarks.recipes`)
    python -m benchmarks.plan --shapes      instead: plans of three targets on 1, 8 and 64 GPUs, nothing is run

Five runs of two optimiser steps by the trainer itself, on Llamas of random weights; memory is what torch has allocated
when it has allocated most, by its profiler. The copies of matrices for oneDNN are made before, and left out of both.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen3MoeConfig
from transformers.utils import logging

from benchmarks.recipes import parts_of, trainer_of
from benchmarks.recipes import run as on_recipes
from benchmarks.shapes import NO_ENDS, llama
from benchmarks.training import peak_bytes
from speculator.device import resolve_device
from speculator.errors import OneLineParser, refuse, run_command
from speculator.tables import markdown_table
from speculator.target.model import Target
from train.command_line import parse
from train.config import ROOT, HeadOptions, RunConfig, StageConfig
from train.place import GPUS, Place
from train.plan import BUCKET, COPIES, GATHERED, MOMENTS, TARGET, WEIGHTS, Plan
from train.shapes import GRADIENTS

HEAD = HeadOptions()
STAGE = StageConfig(max_steps=2, warmup_steps=0)


def sizes(width: int, layers: int, vocabulary: int) -> dict:
    """Of a Llama."""
    heads = width // 64
    return llama(vocabulary, width, 3 * width, layers, heads, max(1, heads // 4), 2048)


def run_of(head: HeadOptions, length: int, **stage: int | bool) -> RunConfig:
    """A run of one stage."""
    made = RunConfig(speculator=head, stage1=replace(STAGE, **stage))  # type: ignore[arg-type]
    made.data.seq_length, made.stage2.max_steps = length, 0
    return made


CONFIGURATIONS = {
    "mlp, 4 tokens": (sizes(768, 12, 32_000), run_of(HEAD, 512, per_device_train_batch_size=4)),
    "mlp, not tied, bfloat16, 2 passes a step": (
        sizes(768, 12, 32_000),
        run_of(
            replace(HEAD, options={"tie_weights": False}, n_predict=3),
            512,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            bf16=True,
        ),
    ),
    "lstm, bfloat16": (
        sizes(1024, 16, 32_000),
        run_of(replace(HEAD, architecture="lstm"), 512, per_device_train_batch_size=4, bf16=True),
    ),
    "eagle3, draft vocabulary of 8,000": (
        sizes(1024, 16, 32_000),
        run_of(replace(HEAD, architecture="eagle3", draft_vocab_size=8000), 512, per_device_train_batch_size=4),
    ),
    "eagle3, bfloat16, 2 passes a step": (
        sizes(768, 12, 64_000),
        run_of(
            replace(HEAD, architecture="eagle3", n_predict=5),
            1024,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            bf16=True,
        ),
    ),
}


HERE = Place("cpu", 1, "CPU")


def foreseen(target: LlamaConfig, config: RunConfig, place: Place = HERE) -> dict[str, float]:
    """Bytes by part, as planned; "in all" without the copies for oneDNN."""
    parts = Plan(config, target, place).memory()["stage1"]
    return {**parts, "in all": sum(parts.values()) - parts[COPIES]}


def measured(config: LlamaConfig, run: RunConfig) -> dict[str, float]:
    """As `trained`, of a Llama made here."""
    gc.collect()  # a model that goes while this one is measured would count as memory that it gave back
    torch.manual_seed(0)
    target = Target(LlamaForCausalLM(config), tokenizer=None)  # type: ignore[arg-type]
    return trained(target, run, sum(each.nbytes for each in (*target.model.parameters(), *target.model.buffers())))


def trained(target: Target, run: RunConfig, weights: int) -> dict[str, float]:
    """Bytes that are there when two steps of the trainer need most, and of three parts; the target has `weights`."""
    stage = run.stage1
    count = stage.max_steps * stage.gradient_accumulation_steps * stage.per_device_train_batch_size
    rows = Dataset.from_dict({"input_ids": torch.randint(target.vocab_size, (count, run.data.seq_length)).tolist()})
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(run, target, rows, folder)
        target.logits(target.hidden(torch.zeros(1, 64, dtype=torch.long)))  # makes the copies
        before = [(weight, weight.data_ptr()) for weight in trainer.model.parameters()]
        height = peak_bytes(trainer.train, torch.device("cpu"))
        # Among several processes the weights are copied first, and the profiler does not see that the old ones go.
        height -= sum(weight.nbytes for weight, place in before if weight.data_ptr() != place)
    held = parts_of(trainer) | {TARGET: weights}
    return {**held, "in all": held[TARGET] + held[WEIGHTS] + height}


ATTENTION = HeadOptions(architecture="eagle3", n_predict=5, draft_vocab_size=32_000)
LARGE: dict[str, PreTrainedConfig] = {
    "8B (Llama 3.1)": LlamaConfig(**sizes(4096, 32, 128_256) | {"intermediate_size": 14_336}, dtype="bfloat16"),
    "70B (Llama 3.1)": LlamaConfig(**sizes(8192, 80, 128_256) | {"intermediate_size": 28_672}, dtype="bfloat16"),
    "400B mixture (Qwen 3 MoE's code)": Qwen3MoeConfig(
        **sizes(7168, 72, 151_936),
        moe_intermediate_size=2048,
        num_experts=128,
        num_experts_per_tok=8,
        head_dim=128,
        dtype="bfloat16",
    ),
}
for _config in LARGE.values():
    _config.num_attention_heads, _config.num_key_value_heads, _config.head_dim = _config.hidden_size // 128, 8, 128


def large(architecture: str) -> str:
    """The recipe of the 8B target on targets of three sizes, the batch of a step the same on any number of GPUs."""
    recipe = parse(["--config", str(ROOT / "configs" / "llama-3.1-8b-instruct.yaml")])
    rows = []
    for name, target in LARGE.items():
        for processes, parallel in ((1, "none"), (8, "none"), (8, "tp"), (8, "fsdp"), (64, "tp")):
            shards, at_once = 1 if parallel == "none" else 8, min(8, 64 // processes)
            own = {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": 64 // processes // at_once}
            stages = {name: replace(getattr(recipe, name), **own) for name in ("stage1", "stage2")}
            head = recipe.speculator if architecture == "mlp" else ATTENTION
            own_target = replace(recipe.target, parallel=parallel)
            config = replace(recipe, target=own_target, speculator=head, shard_optimizer=True, **stages)
            plan = Plan(config, target, Place("cuda", processes, "H100", 80 * 10**9, GPUS["H100"], shards))
            memory, operations, traffic = plan.memory(), plan.operations(), plan.traffic()
            parts = memory["stage1"]
            head_own = sum(parts[part] for part in (WEIGHTS, GRADIENTS, MOMENTS, BUCKET))
            held = parts[TARGET] + parts[GATHERED]
            cells = [held, head_own, sum(parts.values()) - held - head_own, sum(parts.values())]
            cells.append(sum(memory["generating"].values()))
            days = [operations[stage][0] / GPUS["H100"].half / 1e12 / 86400 for stage in ("stage1", "stage2")]
            days.append(traffic["generating"] / GPUS["H100"].bandwidth / 1e12 / 86400)
            fits = "yes" if max(cells) <= 80e9 else "no"
            over = f"{parallel} {shards}" if shards > 1 else "1"
            figures = (*(f"{x / 1e9:,.0f}" for x in cells), fits, *(f"{24 * x:,.1f}" for x in days))
            rows.append((name, processes, over, *figures))
            print(rows[-1], file=sys.stderr, flush=True)
    header = ("target", "H100s", "target over", "target, GB", "head", "activations", "stage 1", "generating", "fits")
    return markdown_table((*header, "stage 1, h", "stage 2, h", "generating, h"), rows)


def on_cpu() -> str:
    """The table of what is foreseen and measured here, on a CPU."""
    rows = []
    for name, (target, run) in CONFIGURATIONS.items():
        config = LlamaConfig(**target, **NO_ENDS)
        plan, real = foreseen(config, run), measured(config, run)
        exact = all(plan[part] == real[part] for part in (TARGET, WEIGHTS, MOMENTS))
        sums = [f"{each['in all'] / 1e6:,.0f}" for each in (plan, real)]
        rows.append((name, *sums, f"{plan['in all'] / real['in all'] - 1:+.1%}", "to the byte" if exact else "NO"))
        print(rows[-1], file=sys.stderr, flush=True)
    header = ("run", "planned, MB", "measured, MB", "off by", "weights and moments")
    return markdown_table(header, rows)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", action="store_true", help="plans of three targets on 1, 8 and 64 GPUs, nothing run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the recipes, on the GPU here")
    parser.add_argument("--output", type=Path, help="folder for plan.json and plan.md, with --device cuda")
    return run_command(parser.prog, lambda: _run(parser.parse_args(argv)))


def _run(flags: argparse.Namespace) -> None:
    refuse((flags.output and flags.device == "cpu", "--output: with --device cuda alone"))
    logging.set_verbosity_error()
    if flags.shapes:
        for architecture in ("mlp", "eagle3"):
            print(f"{architecture}\n\n{large(architecture)}\n")
    elif flags.device == "cuda":
        on_recipes(resolve_device("cuda:0"), flags.output)
    else:
        print(on_cpu())


if __name__ == "__main__":
    sys.exit(main())
