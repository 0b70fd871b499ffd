"""A small Llama, its tokenizer and its trainer: shared by make.py and unlikelihood.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # an installed package has no `train` at the top

from speculator.kernels.linear import bfloat16_pays

EOS = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; any text round-trips exactly."""
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
    """Create a random Llama with tied embeddings for a tokenizer."""
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
    """Appends every logged figure to a .jsonl file."""

    def __init__(self, path: Path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        with self.path.open("a") as stream:
            stream.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


class LanguageModelTrainer(Trainer):
    """Trains on rows {"input_ids"} of equal length."""

    def __init__(self, **kwargs: Any):
        super().__init__(data_collator=collate, **kwargs)


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def arguments(**settings: Any) -> TrainingArguments:
    """TrainingArguments with the settings that all trainings of the model share."""
    on_gpu = torch.cuda.is_available()
    shared = {"weight_decay": 0.1, "adam_beta2": 0.95, "logging_steps": 50, "seed": 0, "report_to": "none"}
    bf16 = on_gpu or bfloat16_pays()
    made = TrainingArguments(**(shared | settings), bf16=bf16, use_cpu=not on_gpu)
    made._n_gpu = min(made.n_gpu, 1)  # the Trainer would wrap several visible GPUs in nn.DataParallel
    return made


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Save the model in bfloat16."""
    model.config.use_cache = True  # the Trainer turned it off
    model.to(torch.bfloat16).save_pretrained(folder)
