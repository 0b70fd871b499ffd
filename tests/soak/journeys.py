"""The cells of the matrix of journeys, and the tiny targets and sources that they take."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any

import mtp_models
import pyarrow
import torch
from chat_targets import CHATML, tokenizer_of
from conftest import CONFIGS, DFLASH, DFLASH2, RECURRENT
from encoder_decoders import save_encoder_decoder
from gguf_files import tiny_llama, write_gguf
from peft import LoraConfig, get_peft_model
from pyarrow import parquet
from transformers import AutoModelForCausalLM

from train.options.config import ROOT

FACTORS: dict[str, list] = {
    "target": ["stdlib", "adapter", "qwen3", "gemma3", "qwen3_moe", "qwen3_5", "gpt2", "gguf", "mtp"],
    "head": ["mlp", "eagle3", "dspark", "dflash", "dflash2", "mtp"],
    "form": [0, 1, 2],
    "n_predict": [2, 3, 4],
    "draft_vocab": [0, 120],
    "source": ["text", "chats", "pairs", "ids", "self", "two", "parquet"],
    "loss": ["default", "d_pace", "total_variation", "lk", "cross_entropy"],
    "optimizer": ["adamw", "muon"],
    "dtype": ["float32", "bfloat16", "bfloat16 target"],
    "batch": [1, 2],
    "accumulation": [1, 2],
    "keep_states": [False, True],
    "length": ["steps", "epochs"],
    "stages": [1, 2],
    "start": ["new", "killed in stage 1", "killed writing", "killed in stage 2", "head", "export"],
    "processes": [1, 2],
}
"""What a journey is made of. A value that some value of another factor rules out is in `clashes`."""
ENCODER_DECODERS = ["t5", "bart"]
"""Targets of journeys without a head: none is trained for them."""
ENDS = {"qwen3": 2.5, "gemma3": 2.5, "qwen3_moe": 3, "gguf": 4}
"""How likely a turn ends, as a factor of the token's logits."""
STDLIB = ROOT / "examples/stdlib_target"
LOSSES: dict[str, dict[str, float]] = {
    "default": {},
    "d_pace": {"kl": 1, "d_pace": 0.5},
    "total_variation": {"kl": 0, "total_variation": 1.8, "cross_entropy": 0.1, "head_decay": 0.78},
    "lk": {"kl": 0, "lk": 1},
    "cross_entropy": {"kl": 0, "cross_entropy": 1},
}
_BLOCK = {"num_hidden_layers": 1, "anchors": 20}
_WINDOW = {"sliding_window": 24}
FORMS: dict[str, list[dict[str, Any]]] = {
    "mlp": [{}, {"tie_weights": False}, {"own_embedding": False, "scale_input": False}],
    "eagle3": [
        {},
        {"norm_before_fc": True, "fc_norm": False, "norm_output": False, "norm_before_residual": True},
        {"own_embedding": True, "qk_norm": True, "attention_bias": True, **_WINDOW},
    ],
    "dspark": [
        {**_BLOCK, "markov_rank": 8},
        {"num_hidden_layers": 2, "markov_rank": 0, "anchors": 20},
        {**_BLOCK, "markov_rank": 8, "is_causal": True, "confidence_head": False, **_WINDOW},
    ],
    "dflash": [{**_BLOCK, **DFLASH}, {**_BLOCK, **DFLASH, **_WINDOW}, {**_BLOCK, **DFLASH, "is_causal": True}],
    "dflash2": [
        {**_BLOCK, **DFLASH2},
        {**_BLOCK, **DFLASH, "conv_group_size": 8},
        {**_BLOCK, **DFLASH, "selector_rank": 6, "selector_top_k": 4, **_WINDOW},
    ],
    "mtp": [{}, {"recycle_normed": False}, {"zero_first": True}],
}


CLASHES: list[dict[str, list]] = [
    {"head": ["mtp"], "target": FACTORS["target"][:-1]},
    {"head": ["mtp", "dflash2"], "draft_vocab": [120]},
    {"target": ["stdlib", "adapter"], "source": ["chats", "two"]},  # no chat template
    {"start": ["killed in stage 2"], "stages": [1]},
    {"start": ["killed writing"], "stages": [1], "source": [name for name in FACTORS["source"] if name != "self"]},
    # Two processes are compared with one, bit by bit.
    {"processes": [2], "start": FACTORS["start"][1:]},
    {"processes": [2], "dtype": FACTORS["dtype"][1:]},
    {"processes": [2], "length": ["epochs"]},
]
"""What the documentation rules out; a cell, which may lack factors, is no journey if one of these holds."""


def fits(cell: dict[str, Any]) -> bool:
    return not any(all(cell.get(name) in values for name, values in each.items()) for each in CLASHES)


@functools.cache
def cells() -> list[tuple[int, dict[str, Any]]]:
    """Return cells that hold each pair of values at least once, each with the number of pairs covered up to it.

    Greedy: a cell begins with a pair that is left, and takes the values that cover the most others.
    """
    draw, made = random.Random(6), []
    both = (
        itertools.product(*([(name, value) for value in FACTORS[name]] for name in pair))
        for pair in itertools.combinations(FACTORS, 2)
    )
    left = {frozenset(pair): None for pair in itertools.chain(*both) if fits(dict(pair))}
    pairs = len(left)

    def covered(cell: dict[str, Any], *new: tuple[str, Any]) -> list[frozenset]:
        some = itertools.product(new, cell.items()) if new else itertools.combinations(cell.items(), 2)
        return [pair for pair in map(frozenset, some) if pair in left]

    def completed(start: frozenset) -> dict[str, Any]:
        cell: dict[str, Any] = dict(start)
        names = [name for name in FACTORS if name not in cell]
        for name in draw.sample(names, len(names)):
            values = [value for value in FACTORS[name] if fits({**cell, name: value})]
            gains = {value: len(covered(cell, (name, value))) for value in values}
            cell[name] = max(values, key=lambda value: (gains[value], draw.random()))
        return cell

    while left:
        best = max(map(completed, draw.sample([*left], min(4, len(left)))), key=lambda cell: len(covered(cell)))
        for pair in covered(best):
            del left[pair]
        made.append((pairs - len(left), {name: best[name] for name in FACTORS}))
    return made


def make_targets(folder: Path) -> None:
    """Save a tiny random target of each kind; their turns end, and what they say depends on the text."""
    tokenizer = tokenizer_of(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def lively(model: Any, name: str) -> Any:
        matrix = model.get_output_embeddings().weight
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 5 if weight.ndim == 2 else 1
            matrix.normal_(generator=torch.Generator().manual_seed(0))
            matrix[end] *= ENDS.get(name, 1.5)
            matrix[len(tokenizer) :] = 0  # no text has these
        model.generation_config.eos_token_id = [0, end]
        return model.eval()

    model = lively(mtp_models.model_of(mtp_models.config_of("glm4_moe", vocab_size=300, eos_token_id=[0, end])), "mtp")
    mtp_models.save(folder / "mtp", model, mtp_models.mtp_of(model))
    for name in ("qwen3", "gemma3", "qwen3_moe", "qwen3_5", "gpt2"):
        config = copy.deepcopy((CONFIGS | RECURRENT)[name])
        sizes = {"vocab_size": 300, "max_position_embeddings": 512, "tie_word_embeddings": False}
        config.update({**sizes, "eos_token_id": [0, end]})
        torch.manual_seed(0)
        lively(AutoModelForCausalLM.from_config(config), name).save_pretrained(folder / name)
    for name in ("mtp", "qwen3", "gemma3", "qwen3_moe", "qwen3_5", "gpt2"):
        tokenizer.save_pretrained(folder / name)
    write_gguf(folder / "gguf.gguf", lively(tiny_llama(len(tokenizer)), "gguf"), tokenizer)
    for name in ENCODER_DECODERS:
        save_encoder_decoder(folder / name, name, max_position_embeddings=512)
    shape = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(STDLIB, dtype=torch.float32), shape)
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    tuned.save_pretrained(folder / "adapter")


def make_sources(folder: Path, functions: Path) -> None:
    """Write sources of each kind, suites and prompts, from a file with functions as texts."""
    texts = [json.loads(line)["text"][:500] for line in functions.read_text().splitlines()][:120]
    words = [[" ".join(text.split()[j : j + 5]) for j in range(0, 20, 5)] for text in texts if len(text.split()) >= 20]
    roles = ["user", "assistant", "user", "assistant"]
    turns = [list(zip(roles, row[: 4 if i % 2 else 2], strict=False)) for i, row in enumerate(words)]
    ids = [tokenizer_of(CHATML)(text)["input_ids"][:80] for text in texts]
    rows = {
        "text": [*({"text": text} for text in texts), {"note": 1}, {"text": texts[0]}, {"text": ""}],
        "chats": [{"messages": [{"role": role, "content": turn} for role, turn in row]} for row in turns],
        "pairs": [{"prompt": text[: len(text) // 3], "completion": text[len(text) // 3 :][:160]} for text in texts],
        "ids": [{"input_ids": row, "loss_mask": [int(i >= len(row) // 3) for i in range(len(row))]} for row in ids],
        "suite": [{"text": text} for text in texts[-4:]],
        "prompts": [{"prompt": text[:length]} for text, length in zip(texts, (20, 70, 110), strict=False)],
    }
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    parquet.write_table(pyarrow.table({"text": texts}), folder / "parquet.parquet")


def sources(kind: str, folder: Path) -> list[str]:
    """Return `data.sources` of a kind."""
    if kind == "two":
        return [f"{folder / 'chats.jsonl'}@0.6", f"{folder / 'text.jsonl'}@0.4"]
    return ["self"] if kind == "self" else [str(folder / f"{kind}.{'parquet' if kind == 'parquet' else 'jsonl'}")]
