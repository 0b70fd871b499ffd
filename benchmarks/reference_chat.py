"""The reference run on a CPU: a real chat model writes its own text, two heads learn it, and what they buy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from timeit import repeat

import torch
from torch.nn.functional import linear

from benchmarks.phases import Phases, shown
from speculator.files import make_folder, read_text, write_text

SUITES = ("spec_bench.jsonl", "openai/gsm8k/main:test", "openai/openai_humaneval:test")
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkentao/Spec-Bench/main/data/spec_bench/question.jsonl"
"""The first of them, to be put where the command is given."""
HEADS = ("eagle3", "mlp")
PUBLISHED = (
    "text/manifest.json",
    "mlp/eval/report.*",
    "eagle3/eval/report.*",
    "eval-*/report.*",
    "eval-*/*.png",
)


@dataclass(frozen=True)
class Scale:
    """How large it all is.

    Attributes:
        questions: of each suite, shared among its categories; the MLP head is asked a fifth of them.
        model, text, ...: flags over the defaults of a command, or over configs/smollm2-135m-*.yaml.
    """

    questions: tuple[int, ...]
    text: str
    answers: str
    model: str = ""
    head: str = ""


FULL = Scale(
    questions=(130, 20, 20),
    text="--max_rows 2688 --max_prompt_tokens 160 --max_new_tokens 256 --batch_size 32",
    answers="--max_new_tokens 16",
)
_STAGE = "--stage1.max_steps 2 --stage1.warmup_steps 1 --stage1.eval_steps 2 --stage1.save_steps 2"
REHEARSAL = Scale(
    questions=(10, 10, 10),
    text="--max_rows 1024 --max_prompt_tokens 24 --max_new_tokens 24 --batch_size 64",
    answers="--max_new_tokens 8",
    model="--tiny",
    head=(
        f"--speculator.draft_vocab_size 64 --data.seq_length 32 {_STAGE} --eval.validation_rows 2 "
        "--eval.validation_prompts 1 --eval.tune_prompts 1 --eval.max_prompts 1 --eval.max_new_tokens 8"
    ),
)


def training_dtype(folder: Path) -> str:
    """The faster of float32 and bfloat16 here for products of many rows: measured once, and kept in the folder.

    Decoding is another matter: its products are of few rows, and bound by memory.
    """
    file = folder / "training_dtype.txt"
    if not file.exists():
        seconds = {}
        for dtype in (torch.float32, torch.bfloat16):
            given = torch.randn(512, 576).to(dtype), torch.randn(1536, 576).to(dtype)  # of the target's own sizes
            seconds[str(dtype).removeprefix("torch.")] = min(repeat(partial(linear, *given), number=5, repeat=20))
        make_folder(folder)
        write_text(file, min(seconds, key=seconds.__getitem__))
    return read_text(file)


def phases(folder: Path, scale: Scale, suites: list[str], dtype: str = "bfloat16") -> Phases:
    """What is done, in this order; heads are trained in `dtype`, everything is decoded in bfloat16."""
    found = Phases(folder)
    model, text = folder / "model", folder / "text"
    found.add("model", "model", "-m", "benchmarks.chat_model", *scale.model.split(), "--output", model, online=True)
    writing = ["-m", "data", "generate", "--target", model, "--sources", "self", "--temperature", "0", "1"]
    found.add("text", "text/manifest.json", *writing, "--dtype", "bfloat16", *scale.text.split(), "--output", text)
    counts = [*scale.questions, *[scale.questions[-1]] * len(suites)]
    for head in HEADS:
        best = head == HEADS[0]
        recipe = [shown("train.py"), "--config", shown(f"configs/smollm2-135m-{head}.yaml"), "--target.dtype", dtype]
        recipe += ["--stage1.bf16", str(dtype == "bfloat16").lower()]
        where = ["--target.name_or_path", model, "--data.sources", json.dumps([str(text)])]
        report = f"{head}/eval/report.json"
        found.add(head, report, *recipe, *where, *scale.head.split(), "--output_dir", folder / head)
        for number, suite in enumerate(suites):
            questions = counts[number] if best else counts[number] // 5
            how = ["--target", model, "--dtype", "bfloat16", "--speculator", folder / head / "speculator"]
            how += ["--suite", suite, "--max_prompts", questions, *scale.answers.split()]
            place = f"eval-{head}-{number + 1}"
            baseline = ["--baseline", "hf_prompt_lookup"] if best else []  # once for each suite
            how += [*baseline, "--output", folder / place]
            found.add(place, f"{place}/report.json", "-m", "eval", *how, online=True)
    return found
