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
from gguf_files import tiny_llama, write_gguf
from peft import LoraConfig, get_peft_model
from pyarrow import parquet
from transformers import AutoModelForCausalLM

from train.config import ROOT

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


def clashes(cell: dict[str, Any]) -> bool:
    """Return whether a cell, which may lack factors, is a journey that the documentation rules out."""

    def has(**values: Any) -> bool:
        return all(
            name in cell and (cell[name] in v if isinstance(v, set) else cell[name] == v) for name, v in values.items()
        )

    return (
        has(head="mtp", target={*FACTORS["target"]} - {"mtp"})
        or has(head={"mtp", "dflash2"}, draft_vocab=120)
        or has(target={"stdlib", "adapter"}, source={"chats", "two"})  # no chat template
        or has(start="killed in stage 2", stages=1)
        or has(start="killed writing", stages=1, source={*FACTORS["source"]} - {"self"})
        # Two processes are compared with one, bit by bit.
        or has(processes=2, start={*FACTORS["start"]} - {"new"})
        or has(processes=2, dtype={"bfloat16", "bfloat16 target"})
        or has(processes=2, length="epochs")
    )


@functools.cache
def cells() -> tuple[list[dict[str, Any]], list[int], int]:
    """Return cells that hold each pair of values at least once, the pairs covered up to each cell, and all pairs.

    Greedy: a cell begins with a pair that is left, and takes the values that cover the most others.
    """
    draw, left = random.Random(6), {}
    for (a, first), (b, second) in itertools.combinations(FACTORS.items(), 2):
        left |= {((a, x), (b, y)): None for x, y in itertools.product(first, second) if not clashes({a: x, b: y})}
    order = {name: number for number, name in enumerate(FACTORS)}

    def pair(*two: tuple[str, Any]) -> tuple:
        return tuple(sorted(two, key=lambda each: order[each[0]]))

    def completed(start: tuple) -> dict[str, Any]:
        cell, names = dict(start), [name for name in FACTORS if name not in dict(start)]
        for name in draw.sample(names, len(names)):
            fitting = [value for value in FACTORS[name] if not clashes({**cell, name: value})]
            if not fitting:
                return {}
            gains = {v: sum(pair((name, v), each) in left for each in cell.items()) for v in fitting}
            cell[name] = max(fitting, key=lambda value: (gains[value], draw.random()))
        return cell

    made, covered = [], [0]
    while left:
        best: dict[str, Any] = {}
        gained: list[tuple] = []
        for start in draw.sample([*left], min(4, len(left))):
            cell = completed(start)
            new = [each for each in (pair(*two) for two in itertools.combinations(cell.items(), 2)) if each in left]
            if len(new) > len(gained):
                best, gained = cell, new
        if not best:
            raise AssertionError("clashes rules out a pair by three factors")
        for each in gained:
            del left[each]
        made.append({name: best[name] for name in FACTORS})
        covered.append(covered[-1] + len(gained))
    return made, covered[1:], covered[-1]


def make_targets(folder: Path) -> None:
    """Save a tiny random target of each kind; their turns end, and what they say depends on the text."""
    tokenizer = tokenizer_of(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def lively(model: Any) -> Any:
        matrix = model.get_output_embeddings().weight
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2 and weight is not matrix:
                    weight *= 5
            matrix.normal_(generator=torch.Generator().manual_seed(0))
            matrix[end] *= 1.5
            matrix[len(tokenizer) :] = 0  # no text has these
        model.generation_config.eos_token_id = [0, end]
        return model.eval()

    for name in ("qwen3", "gemma3", "qwen3_moe", "qwen3_5", "gpt2"):
        config = copy.deepcopy((CONFIGS | RECURRENT)[name])
        config.vocab_size, config.eos_token_id, config.tie_word_embeddings = 300, [0, end], False
        config.max_position_embeddings = 512
        torch.manual_seed(0)
        lively(AutoModelForCausalLM.from_config(config)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    model = lively(mtp_models.model_of(mtp_models.config_of("glm4_moe", vocab_size=300, eos_token_id=[0, end])))
    mtp_models.save(folder / "mtp", model, mtp_models.mtp_of(model))
    for file in folder.glob("mtp/*token*"):
        file.unlink()
    tokenizer.save_pretrained(folder / "mtp")
    write_gguf(folder / "gguf.gguf", lively(tiny_llama(len(tokenizer))), tokenizer)
    stdlib = AutoModelForCausalLM.from_pretrained(ROOT / "examples/stdlib_target", dtype=torch.float32)
    shape = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    tuned = get_peft_model(stdlib, shape)
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    tuned.save_pretrained(folder / "adapter")


def make_sources(folder: Path, functions: Path) -> None:
    """Write sources of each kind, suites and prompts, from a file with functions as texts."""
    texts = [json.loads(line)["text"][:500] for line in functions.read_text().splitlines()][:120]
    words = [text.split() for text in texts]
    chats, tokenizer = [], tokenizer_of(CHATML)
    for i, row in enumerate(row for row in words if len(row) >= 20):
        turns = [" ".join(row[j : j + 5]) for j in range(0, 20, 5)][: 4 if i % 2 else 2]
        roles = ["user", "assistant"] * 2
        chats.append({"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]})
    ids = [tokenizer(text)["input_ids"][:80] for text in texts]
    rows = {
        "text": [*({"text": text} for text in texts), {"note": 1}, {"text": texts[0]}, {"text": ""}],
        "chats": chats,
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
    return {
        "self": ["self"],
        "two": [f"{folder / 'chats.jsonl'}@0.6", f"{folder / 'text.jsonl'}@0.4"],
        "parquet": [str(folder / "parquet.parquet")],
    }.get(kind, [str(folder / f"{kind}.jsonl")])
