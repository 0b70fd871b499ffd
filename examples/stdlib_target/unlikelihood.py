"""Teach the embedded target not to run in circles: sequence-level unlikelihood training (1908.04319).

    python examples/stdlib_target/unlikelihood.py

A small language model at temperature 0 soon repeats itself, and circles flatter a drafter that copies. So the model
continues prompts greedily, and every token that is part of a repeated 4-gram is made less likely; ordinary training on
the same rows goes on beside it. Run after `make.py`; changes the model in its folder.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from language_model import LanguageModelTrainer, Log, arguments, save
from make import corpus_rows
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

_NGRAM, _PROMPT, _NEW = 4, 64, 128
_READ = 8  # of a batch's rows, those that ordinary training reads whole


def repeated(text: list[int], ngram: int = _NGRAM) -> list[bool]:
    """Which tokens are part of an n-gram that the text had before."""
    seen: set[tuple[int, ...]] = set()
    flags = [False] * len(text)
    for i in range(len(text) - ngram + 1):
        gram = tuple(text[i : i + ngram])
        if gram in seen:
            flags[i : i + ngram] = [True] * ngram
        seen.add(gram)
    return flags


class UnlikelihoodTrainer(LanguageModelTrainer):
    """Loss: -log(1 - p) over repeated tokens of the model's own greedy text, plus cross-entropy on real text."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows: Tensor = inputs["input_ids"]  # [B, S]
        read = rows[:_READ]
        likelihood = model(read, labels=read).loss
        if not model.training:
            return (likelihood, {}) if return_outputs else likelihood
        prompts = rows[:, :_PROMPT]
        model.eval()
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            texts = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=_NEW,
                max_new_tokens=_NEW,
                pad_token_id=0,
                use_cache=True,
            )
        model.train()
        bad = torch.tensor([repeated(text) for text in texts.tolist()], device=rows.device)[:, _PROMPT:]
        distributions = model(texts[:, :-1]).logits[:, _PROMPT - 1 :].float().log_softmax(-1)
        chosen = distributions.gather(2, texts[:, _PROMPT:, None])[..., 0]
        unlikelihood = -torch.log((1 - chosen.exp()).clamp_min(1e-5))
        return likelihood + (unlikelihood * bad).sum() / bad.sum().clamp_min(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="of the model to change")
    parser.add_argument("--steps", type=int, default=160)
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    model = LlamaForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    UnlikelihoodTrainer(
        model=model,
        args=arguments(
            output_dir="runs/stdlib_target/unlikelihood",
            max_steps=args.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-4,
            lr_scheduler_type="linear",
            warmup_steps=10,
            weight_decay=0.0,
            logging_steps=10,
            save_strategy="no",
        ),
        train_dataset=corpus_rows(tokenizer, "train"),
        callbacks=[Log(args.folder / "training_log.jsonl")],
    ).train()
    save(model, args.folder)


if __name__ == "__main__":
    main()
