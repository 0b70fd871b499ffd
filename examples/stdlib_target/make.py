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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from data.packing import pack  # noqa: E402
from data.sources import PYTHON_SOURCES, documents, token_documents  # noqa: E402

EOS = "<|endoftext|>"
VOCAB, LENGTH = 4096, 512


@dataclass
class Phase:
    """A stretch of training at one row length."""

    length: int
    batch_size: int
    steps: int
    schedule: str


# Short rows first: attention over 256 tokens costs half of what 512 does. The learning rate falls on full rows.
PHASES = [Phase(256, 8, 3600, "constant_with_warmup"), Phase(512, 4, 950, "linear")]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text round-trips exactly."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, model_max_length=LENGTH, clean_up_tokenization_spaces=False
    )


class Log(TrainerCallback):
    """Every logged figure as a line of training_log.jsonl."""

    def __init__(self, path: Path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        with self.path.open("a") as stream:
            stream.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


def new_model(eos_token_id: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def pieces(row: dict, length: int) -> list[list[int]]:
    return [row["input_ids"][i : i + length] for i in range(0, LENGTH, length)]


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def train(model: LlamaForCausalLM, phase: Phase, rows: dict[str, Dataset], args: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.work / f"length{phase.length}"),
            max_steps=phase.steps,
            per_device_train_batch_size=phase.batch_size,
            per_device_eval_batch_size=phase.batch_size,
            learning_rate=args.learning_rate,
            lr_scheduler_type=phase.schedule,
            warmup_steps=min(100, phase.steps // 10),
            weight_decay=0.1,
            adam_beta2=0.95,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            torch_compile=True,
            logging_steps=50,
            eval_strategy="steps",
            eval_steps=400,
            save_steps=400,
            save_total_limit=2,
            seed=0,
            report_to="none",
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=collate,
        callbacks=[Log(args.output / "training_log.jsonl")],
    )
    trainer.train()


def corpus_rows(tokenizer: PreTrainedTokenizerFast, split: str, max_package_bytes: int) -> Dataset:
    """The split's text as shuffled rows of LENGTH tokens."""
    docs = token_documents([PYTHON_SOURCES], split, tokenizer, max_package_bytes=max_package_bytes)
    rows = [{"input_ids": row["input_ids"]} for row in pack(docs, LENGTH)]
    return Dataset.from_list(rows).shuffle(seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--layers", type=int, default=12, help="2 makes a draft model")
    parser.add_argument("--tokenizer", type=Path, help="folder of one to use; default: a new one")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--max_package_bytes", type=int, default=12_000_000)
    parser.add_argument("--work", type=Path, default=Path("runs/stdlib_target"), help="checkpoints while training")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "training_log.jsonl").write_text("")
    torch.set_num_threads(os.cpu_count() or 1)

    train_files = list(documents([PYTHON_SOURCES], "train", max_package_bytes=args.max_package_bytes))
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer([row["text"] for row in train_files[::4]])
    tokenizer.save_pretrained(args.output)
    full = {split: corpus_rows(tokenizer, split, args.max_package_bytes) for split in ("train", "validation")}
    facts = {
        "python": platform.python_version(),
        "train_files": len(train_files),
        "train_characters": sum(len(row["text"]) for row in train_files),
        "train_tokens": len(full["train"]) * LENGTH,
        "files_per_package": dict(Counter(row["id"].split("/")[0] for row in train_files).most_common()),
    }
    (args.output / "corpus.json").write_text(json.dumps(facts, indent=1))
    full["validation"] = full["validation"].select(range(min(128, len(full["validation"]))))
    model = new_model(tokenizer.eos_token_id, args.layers)
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
    model.config.use_cache = True  # the Trainer turned it off
    model.to(torch.bfloat16).save_pretrained(args.output)


if __name__ == "__main__":
    main()
