"""Train the embedded target: a small Llama on the Python sources of this machine.

    python examples/stdlib_target/make.py

Leaves the model, its tokenizer, `training_log.jsonl` and `corpus.json` beside this file. Trains on the
train split only, so that the held-out files stay unseen by the target as well as by the speculator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from language_model import (  # noqa: E402
    LanguageModelTrainer,
    Log,
    arguments,
    new_llama,
    save,
    train_tokenizer,
)
from transformers import LlamaForCausalLM  # noqa: E402

from data import python_sources  # noqa: E402
from data.mixture import PYTHON_SOURCES, mixture_of  # noqa: E402
from data.prepare import RowRequest, token_rows  # noqa: E402
from data.rendering import load_tokenizer  # noqa: E402
from data.sources import documents  # noqa: E402

VOCAB, LENGTH = 4096, 512
python_sources.MAX_PACKAGE_BYTES = 12_000_000  # the target reads more of each package than a head does


@dataclass
class Phase:
    """A stretch of training at one row length."""

    length: int
    batch_size: int
    steps: int
    schedule: str


# Short rows first: attention over 256 tokens costs half of what 512 does. The learning rate falls on full rows.
PHASES = [Phase(256, 8, 6000, "constant_with_warmup"), Phase(512, 4, 2000, "linear")]


def pieces(row: dict, length: int) -> list[list[int]]:
    return [row["input_ids"][i : i + length] for i in range(0, LENGTH, length)]


def train(model: LlamaForCausalLM, phase: Phase, rows: dict[str, Dataset], args: argparse.Namespace) -> None:
    LanguageModelTrainer(
        model=model,
        args=arguments(
            output_dir=str(args.work / f"length{phase.length}"),
            max_steps=phase.steps,
            per_device_train_batch_size=phase.batch_size,
            per_device_eval_batch_size=phase.batch_size,
            learning_rate=args.learning_rate,
            lr_scheduler_type=phase.schedule,
            warmup_steps=min(100, phase.steps // 10),
            torch_compile=True,
            eval_strategy="steps",
            eval_steps=400,
            save_steps=400,
            save_total_limit=2,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        callbacks=[Log(args.output / "training_log.jsonl")],
    ).train()


def corpus_rows(tokenizer, split: str) -> Dataset:
    """The split's text as shuffled rows of LENGTH tokens."""
    rows = token_rows(RowRequest(mixture=mixture_of([PYTHON_SOURCES]), split=split, tokenizer=tokenizer, length=LENGTH))
    return rows.select_columns("input_ids").shuffle(seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--layers", type=int, default=12, help="2 makes a draft model")
    parser.add_argument("--tokenizer", type=Path, help="folder of one to use; default: a new one")
    parser.add_argument("--start", type=Path, help="folder of a model to go on from; default: random weights")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--work", type=Path, default=Path("runs/stdlib_target"), help="checkpoints while training")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "training_log.jsonl").write_text("")
    torch.set_num_threads(os.cpu_count() or 1)

    train_files = list(documents(PYTHON_SOURCES, "train"))
    if args.tokenizer:
        tokenizer = load_tokenizer(str(args.tokenizer))
    else:
        tokenizer = train_tokenizer([row["text"] for row in train_files[::4]], VOCAB, LENGTH)
    tokenizer.save_pretrained(args.output)
    full = {split: corpus_rows(tokenizer, split) for split in ("train", "validation")}
    facts = {
        "python": platform.python_version(),
        "train_files": len(train_files),
        "train_characters": sum(len(row["text"]) for row in train_files),
        "train_tokens": len(full["train"]) * LENGTH,
        "files_per_package": dict(Counter(row["id"].split("/")[0] for row in train_files).most_common()),
    }
    (args.output / "corpus.json").write_text(json.dumps(facts, indent=1))
    full["validation"] = full["validation"].select(range(min(128, len(full["validation"]))))
    if args.start:
        model = LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    else:
        model = new_llama(
            tokenizer,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=args.layers,
            num_attention_heads=3,
            num_key_value_heads=1,
        )
    start = 0
    for phase in PHASES:
        # Each phase reads rows that the one before has not seen, cut to its own length.
        count = phase.steps * phase.batch_size * phase.length // LENGTH
        part = full["train"].select(range(start, min(start + count, len(full["train"]))))
        start += count
        cut = {
            split: Dataset.from_list([{"input_ids": piece} for row in rows for piece in pieces(row, phase.length)])
            for split, rows in {"train": part, "validation": full["validation"]}.items()
        }
        train(model, phase, cut, args)
    save(model, args.output)


if __name__ == "__main__":
    main()
