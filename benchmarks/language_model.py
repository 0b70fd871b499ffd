"""A small Llama, trained from nothing: a target to draft for, or a draft model, on a machine that has no other.

    python -m benchmarks.language_model --output runs/target --minutes 8

trains on the Python sources of this machine, or on local text given with --source, for so many minutes: a tokenizer
first (or the one of --tokenizer), then the model, in float32 under bfloat16 autocast where the hardware has it. Only
the train split is read. Leaves the model in bfloat16, its tokenizer, training_log.jsonl and training.json; all of it or
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from data.prepare import token_rows
from data.rendering import load_tokenizer
from data.sources import PYTHON_SOURCES, documents
from speculator.errors import OneLineParser, refuse, refuse_below, run_command
from speculator.files import new_folder, write_text
from speculator.target.linear import FAST_DTYPES
from train.run import use_all_cores
from train.trainer import on_one_gpu

EOS = "<|endoftext|>"
_VALIDATION_ROWS = 128
_WARMUP_STEPS = 100


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text round-trips exactly."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, model_max_length=max_length, clean_up_tokenization_spaces=False
    )


def new_llama(tokenizer: PreTrainedTokenizerBase, **shape: int) -> LlamaForCausalLM:
    """A random one for a tokenizer, as long as that says, with the output matrix for its embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        **shape,
    )
    return LlamaForCausalLM(config)


class Log(TrainerCallback):
    """Every logged figure as a line of a file."""

    def __init__(self, path: Path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        with self.path.open("a") as stream:
            stream.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


class Deadline(TrainerCallback):
    """Ends a training after so many seconds, and has the learning rate fall to 0 over the second half of them.

    A step count would have to be guessed for each machine.
    """

    def __init__(self, seconds: float):
        self.seconds, self._began = seconds, 0.0

    def on_train_begin(self, *args, **kwargs):
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = self.left <= 0

    @property
    def left(self) -> float:
        """The share of the time that is left; all of it before the training begins."""
        return 1 - (time.perf_counter() - self._began) / self.seconds if self._began else 1.0

    def rate(self, step: int) -> float:
        """The learning rate as a share of its peak."""
        return min(1.0, (step + 1) / _WARMUP_STEPS) * min(1.0, max(0.0, 2 * self.left))


class LanguageModelTrainer(Trainer):
    """transformers' Trainer on rows of equal length, {"input_ids"}, ended by its step count or by a deadline."""

    def __init__(self, *, deadline: Deadline | None = None, **kwargs: Any):
        super().__init__(data_collator=collate, **kwargs)
        self.deadline = deadline
        if deadline:
            self.add_callback(deadline)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.deadline and self.lr_scheduler is None:
            assert (optimizer or self.optimizer) is not None
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self.deadline.rate)  # type: ignore[arg-type]
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def arguments(**settings: Any) -> TrainingArguments:
    """TrainingArguments with what every training of such a model shares."""
    on_gpu = torch.cuda.is_available()
    shared = {"weight_decay": 0.1, "adam_beta2": 0.95, "logging_steps": 50, "seed": 0, "report_to": "none"}
    bf16 = on_gpu or torch.bfloat16 in FAST_DTYPES
    return on_one_gpu(TrainingArguments(**(shared | settings), bf16=bf16, use_cpu=not on_gpu))


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """In bfloat16."""
    model.config.use_cache = True  # the Trainer turned it off
    model.to(torch.bfloat16).save_pretrained(folder)


def build_parser() -> OneLineParser:
    """The flags; the defaults are those of the reference target, 164 million weights."""
    parser = OneLineParser(prog="python -m benchmarks.language_model", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the model's folder, new; with --only_tokenizer its")
    parser.add_argument("--source", action="append", help=f"local text, or {PYTHON_SOURCES}: the default; repeatable")
    parser.add_argument("--tokenizer", help="folder of one to use; default: a new one")
    parser.add_argument("--only_tokenizer", action="store_true", help="make the tokenizer, tokenise the text, and stop")
    parser.add_argument("--vocab_size", type=int, default=16_384, help="of a new tokenizer")
    parser.add_argument("--context", type=int, default=1024, help="positions of a new tokenizer and its models")
    parser.add_argument("--seq_length", type=int, default=512, help="tokens of the rows that are trained on")
    parser.add_argument("--max_package_bytes", type=int, default=12_000_000, help=f"of each package, {PYTHON_SOURCES}")
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--intermediate_size", type=int, default=2048)
    parser.add_argument("--num_hidden_layers", type=int, default=24)
    parser.add_argument("--num_attention_heads", type=int, default=12)
    parser.add_argument("--num_key_value_heads", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training alone; default: 8")
    parser.add_argument("--batch_size", type=int, default=64, help="rows a step")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="at its peak")
    return parser


_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    flags = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(flags))


def run(flags: argparse.Namespace) -> None:
    """Train, and leave the model under its name."""
    refuse_below(flags, vocab_size=512, seq_length=2, batch_size=1, **dict.fromkeys(_SHAPE, 1))
    heads, shared = flags.num_attention_heads, flags.num_key_value_heads
    refuse(
        (not flags.minutes > 0, "--minutes must be above 0"),
        (not flags.learning_rate > 0, "--learning_rate must be above 0"),
        (flags.seq_length > flags.context, f"--seq_length {flags.seq_length} is above --context {flags.context}"),
        (flags.hidden_size % (2 * heads), f"--hidden_size must be a multiple of twice the {heads} attention heads"),
        (heads % shared, f"--num_attention_heads {heads} is not a multiple of --num_key_value_heads {shared}"),
        (flags.output.exists(), f"--output {flags.output} is there already: choose another, or remove it"),
    )
    use_all_cores()
    sources, cap = flags.source or [PYTHON_SOURCES], flags.max_package_bytes
    if flags.tokenizer:
        tokenizer = load_tokenizer(flags.tokenizer)
    else:
        # A quarter of the documents tells as much of the frequencies.
        texts = [row["text"] for row in documents(sources, "train", max_package_bytes=cap) if "text" in row][::4]
        refuse((not texts, f"no text to make a tokenizer of in {', '.join(sources)}"))
        tokenizer = train_tokenizer(texts, flags.vocab_size, flags.context)
    rows, validation = (
        token_rows(sources, split, tokenizer, flags.seq_length, max_package_bytes=cap).select_columns("input_ids")
        for split in ("train", "validation")
    )
    print(f"{len(rows) * flags.seq_length:,} tokens to train on, {len(tokenizer):,} in the vocabulary", flush=True)
    with new_folder(flags.output) as scratch:
        tokenizer.save_pretrained(scratch)
        if flags.only_tokenizer:
            return
        refuse((len(rows) < flags.batch_size, f"{len(rows)} rows are less than one batch of {flags.batch_size}"))
        model = new_llama(tokenizer, **{name: getattr(flags, name) for name in _SHAPE})
        print(f"{model.num_parameters():,} weights, {flags.minutes:g} minutes", flush=True)
        steps = _train(model, rows, validation, flags, scratch)
        save(model, scratch)
        facts = {
            "sources": sources,
            "corpus_tokens": len(rows) * flags.seq_length,
            "tokens_seen": steps * flags.batch_size * flags.seq_length,
            "steps": steps,
            "weights": model.num_parameters(),
            **{name: getattr(flags, name) for name in ("minutes", "batch_size", "seq_length", "learning_rate")},
        }
        write_text(scratch / "training.json", json.dumps(facts, indent=1))


def _train(
    model: LlamaForCausalLM, rows: Dataset, validation: Dataset, flags: argparse.Namespace, folder: Path
) -> int:  # steps
    on_gpu = torch.cuda.is_available()
    trainer = LanguageModelTrainer(
        model=model,
        deadline=Deadline(60 * flags.minutes),
        args=arguments(
            output_dir=str(folder / "unused"),
            max_steps=10**9,
            per_device_train_batch_size=flags.batch_size,
            per_device_eval_batch_size=flags.batch_size,
            learning_rate=flags.learning_rate,
            torch_compile=on_gpu,  # on a CPU it takes longer than it gives back here
            dataloader_num_workers=2 if on_gpu else 0,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=rows.shuffle(seed=0),
        eval_dataset=validation.select(range(min(_VALIDATION_ROWS, len(validation)))),
        callbacks=[Log(folder / "training_log.jsonl")],
    )
    trainer.train()
    trainer.evaluate()
    return trainer.state.global_step


if __name__ == "__main__":
    sys.exit(main())
