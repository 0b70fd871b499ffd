"""`python -m benchmarks.shards`: what each of two processes holds of a target, whole and in shards, against the plan.

A Llama of 1.1 billion random weights in bfloat16, a head, two optimiser steps of the trainer on the CPU. Memory is what
torch has allocated when it has allocated most, in the process that has most. The copies of matrices for oneDNN are left
out, as in `benchmarks.plan`. Takes some minutes, 5 GB of the disk and 15 of memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor, distributed, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.plan import foreseen, run_of, trained
from benchmarks.shapes import NO_ENDS, llama
from speculator.errors import OneLineParser
from speculator.tables import markdown_table
from speculator.target.model import Target
from train.config import ROOT, HeadOptions, RunConfig, TargetConfig
from train.place import Place
from train.plan import TARGET

PROCESSES = 2
SIZES = llama(32_000, 2048, 5632, 22, 32, 4, 2048)
KINDS = {"none": "whole", "tp": "tp 2", "fsdp": "fsdp 2"}


def run(folder: Path, kind: str) -> RunConfig:
    """Two steps of a head on short rows."""
    made = run_of(HeadOptions(n_predict=3, inner_dim=512), 256, per_device_train_batch_size=2)
    return replace(made, target=TargetConfig(str(folder), dtype="bfloat16", parallel=kind))


def held() -> int:
    """Bytes of all tensors that there are."""
    tensors = [
        each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided
    ]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


def measure(folder: Path, kind: str) -> None:
    """One of the processes: leaves its figures in the folder."""
    state = PartialState(cpu=True)
    gc.collect()
    before = held()
    target = Target.load(str(folder), dtype="bfloat16", parallel=kind)
    gc.collect()
    weights = held() - before
    found = trained(target, run(folder, kind), weights)
    (folder / f"{kind}.{state.process_index}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def main(argv: list[str]) -> None:
    """Print the table."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parser = OneLineParser(prog="python -m benchmarks.shards", description=__doc__)
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    process = parser.parse_args(argv).process
    if process:
        return measure(Path(process[0]), process[1])
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = LlamaConfig(**SIZES, **NO_ENDS)
        torch.manual_seed(0)
        # In float32: weights that are loaded as they are stored stay where the file is mapped, and are not allocated.
        LlamaForCausalLM(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(ROOT / "examples" / "stdlib_target").save_pretrained(folder)
        gc.collect()
        for kind, said in KINDS.items():
            launch = ["torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}", "-m"]
            subprocess.run(
                [sys.executable, "-m", *launch, "benchmarks.shards", "--process", str(folder), kind], check=True
            )
            real = [json.loads(file.read_text()) for file in folder.glob(f"{kind}.*.json")]
            place = Place("cpu", PROCESSES, "CPU", shards=1 if kind == "none" else PROCESSES)
            plan, most = foreseen(config, run(folder, kind), place), {}
            for part in (TARGET, "in all"):
                most[part] = max(each[part] for each in real)
            figures = [f"{each[part] / 1e6:,.0f}" for part in most for each in (plan, most)]
            rows.append((said, *figures, f"{plan['in all'] / most['in all'] - 1:+.1%}"))
            print(rows[-1], file=sys.stderr, flush=True)
    header = ("target", "its weights, planned, MB", "measured", "in all, planned, MB", "measured", "off by")
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
