"""The reference run on a GPU: a target made from the machine's own Python sources, its head, and what both cost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.phases import Phases, shown

PUBLISHED = (
    "quality.json",
    "target/training.json",
    "target/training_log.jsonl",
    "batch*/report.*",
    "batch*/*.png",
    "tuned-batch*.json",
    "peers.*",
    "step-*",
    "training-*",
)


@dataclass(frozen=True)
class Scale:
    """How large it all is.

    Attributes:
        minutes: of training the target.
        batches: batch size -> prompts that it is measured on, twice as many as for tuning.
        steps, training: presets of the benchmarks with random weights.
        draft_model, text, ...: flags over the defaults of a command, or over configs/reference.yaml.
    """

    minutes: float
    batches: dict[int, int]
    steps: list[str]
    training: list[str]
    draft_model: str
    text: str = ""
    target: str = ""
    speculator: str = ""
    quality: str = ""
    evaluate: str = ""
    peers: str = ""
    step: str = ""


_SMALL = "--num_attention_heads 4 --num_key_value_heads 2 --num_hidden_layers 2"
FULL = Scale(
    minutes=8,
    batches={1: 32, 8: 64, 32: 128},
    steps=["llama-3-8b", "llama-2-13b"],
    training=["llama-3-8b"],
    draft_model=f"--hidden_size 256 --intermediate_size 768 {_SMALL} --minutes 1",
)
_STAGE = "--{0}.max_steps 2 --{0}.per_device_train_batch_size 2 --{0}.eval_steps 2 --{0}.save_steps 2"
REHEARSAL = Scale(
    minutes=0.02,
    batches={2: 4},
    steps=["tiny"],
    training=["tiny"],
    draft_model=f"--hidden_size 32 --intermediate_size 64 {_SMALL} --batch_size 4 --minutes 0.01",
    text="--max_package_bytes 6000 --vocab_size 512 --context 256 --seq_length 64",
    target=f"--hidden_size 64 --intermediate_size 128 {_SMALL} --batch_size 4",
    speculator=(
        f"--speculator.n_predict 2 --data.seq_length 64 --data.max_package_bytes 6000 {_STAGE.format('stage1')} "
        f"{_STAGE.format('stage2')} --stage2.generate.max_rows 4 --stage2.generate.prompt_tokens 16 "
        "--stage2.generate.max_new_tokens 16 --eval.validation_rows 4 --eval.validation_prompts 2 "
        "--eval.prompt_tokens 16 --eval.max_prompts 2 --eval.max_new_tokens 8"
    ),
    quality="--rows 8 --prompts 4",
    evaluate="--prompt_tokens 16 --max_new_tokens 12",
    peers="--max_prompts 2",
    step="--context 32 --blocks 1",
)


def phases(folder: Path, scale: Scale, minutes: float, sources: list[str]) -> Phases:
    """What is done, in this order: first what the rest needs, then the figures, the most wanted first."""
    found = Phases(folder)
    tokenizer, target, run, draft_model = (folder / name for name in ("tokenizer", "target", "run", "draft_model"))
    text = [word for source in sources for word in ("--source", source)]
    model = ["-m", "benchmarks.language_model", *text, *scale.text.split()]
    found.add("tokenizer", "tokenizer", *model, "--only_tokenizer", "--output", tokenizer)
    model += ["--tokenizer", str(tokenizer)]
    found.add("target", "target", *model, *scale.target.split(), "--minutes", f"{minutes:g}", "--output", target)
    recipe = [shown("train.py"), "--config", shown("configs/reference.yaml"), "--data.sources", json.dumps(sources)]
    where = ["--target.name_or_path", target, "--output_dir", run]
    found.add("speculator", "run/eval/report.json", *recipe, *where, *scale.speculator.split())
    how = [shown("examples/stdlib_target/measure.py"), "--target", target, *scale.quality.split()]
    found.add("quality", "quality.json", *how, "--output", folder / "quality.json")
    evaluate = scale.evaluate.split()
    for size, prompts in scale.batches.items():
        how = ["--target", target, "--speculator", run / "speculator", "--batch_size", size, *evaluate]
        report, tuned = f"batch{size}", f"tuned-batch{size}.json"
        found.add(
            report, f"{report}/report.json", "-m", "eval", *how, "--max_prompts", prompts, "--output", folder / report
        )
        how = ["tune", *how, "--max_prompts", prompts // 2]
        found.add(f"tuned-{report}", tuned, "-m", "eval", *how, "--output", folder / tuned)
    found.add("draft_model", "draft_model", *model, *scale.draft_model.split(), "--output", draft_model)
    how = ["--target", target, "--draft_model", draft_model, *evaluate, *scale.peers.split()]
    found.add("peers", "peers.json", "-m", "benchmarks.peers", *how, "--output", folder)
    for preset in scale.steps:
        how = ["--preset", preset, *scale.step.split()]
        found.add(f"step-{preset}", f"step-{preset}.json", "-m", "benchmarks.step", *how, "--output", folder)
    for preset in scale.training:
        how = ["--preset", preset, "--runs", 5]
        found.add(
            f"training-{preset}", f"training-{preset}.json", "-m", "benchmarks.training", *how, "--output", folder
        )
    return found
