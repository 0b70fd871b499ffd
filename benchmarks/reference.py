"""The reference run: a target, its head, and every figure of docs/reference, on one machine, offline.

    python -m benchmarks.reference                       everything; what is done is not done again
    python -m benchmarks.reference target speculator     these phases alone, for a machine that is lent by the minute
    python -m benchmarks.reference --rehearse            the same on tiny sizes, on any CPU, in minutes

Each phase is a command that a user could type; it is printed before it runs. What it makes lies under --output and
appears there when it is whole, so a phase that was cut off is done again (the speculator's goes on from its newest
checkpoint). After each, all reports so far are copied to --publish.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from speculator.device import hardware, resolve_device
from speculator.errors import OneLineParser, UserError, refuse, run_command
from speculator.files import make_folder, write_text
from train.config import ROOT
from train.folder import git_commit

_PUBLISHED = (
    "run.json",
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


@dataclass(frozen=True)
class Phase:
    """A command, and what is there when it is done."""

    name: str
    product: Path
    command: list[str]


def phases(folder: Path, scale: Scale, minutes: float, sources: list[str]) -> list[Phase]:
    """What is done, in this order: first what the rest needs, then the figures, the most wanted first."""
    found: list[Phase] = []

    def add(name: str, product: str, *command: str | int | Path) -> None:
        found.append(Phase(name, folder / product, [str(word) for word in command]))

    tokenizer, target, run, draft_model = (folder / name for name in ("tokenizer", "target", "run", "draft_model"))
    text = [word for source in sources for word in ("--source", source)]
    model = ["-m", "benchmarks.language_model", *text, *scale.text.split()]
    add("tokenizer", "tokenizer", *model, "--only_tokenizer", "--output", tokenizer)
    model += ["--tokenizer", str(tokenizer)]
    add("target", "target", *model, *scale.target.split(), "--minutes", f"{minutes:g}", "--output", target)
    recipe = [_shown("train.py"), "--config", _shown("configs/reference.yaml"), "--data.sources", json.dumps(sources)]
    where = ["--target.name_or_path", target, "--output_dir", run]
    add("speculator", "run/eval/report.json", *recipe, *where, *scale.speculator.split())
    how = [_shown("examples/stdlib_target/measure.py"), "--target", target, *scale.quality.split()]
    add("quality", "quality.json", *how, "--output", folder / "quality.json")
    evaluate = scale.evaluate.split()
    for size, prompts in scale.batches.items():
        how = ["--target", target, "--speculator", run / "speculator", "--batch_size", size, *evaluate]
        report, tuned = f"batch{size}", f"tuned-batch{size}.json"
        add(report, f"{report}/report.json", "-m", "eval", *how, "--max_prompts", prompts, "--output", folder / report)
        how = ["tune", *how, "--max_prompts", prompts // 2]
        add(f"tuned-{report}", tuned, "-m", "eval", *how, "--output", folder / tuned)
    add("draft_model", "draft_model", *model, *scale.draft_model.split(), "--output", draft_model)
    how = ["--target", target, "--draft_model", draft_model, *evaluate, *scale.peers.split()]
    add("peers", "peers.json", "-m", "benchmarks.peers", *how, "--output", folder)
    for preset in scale.steps:
        how = ["--preset", preset, *scale.step.split()]
        add(f"step-{preset}", f"step-{preset}.json", "-m", "benchmarks.step", *how, "--output", folder)
    for preset in scale.training:
        how = ["--preset", preset, "--runs", 5]
        add(f"training-{preset}", f"training-{preset}.json", "-m", "benchmarks.training", *how, "--output", folder)
    return found


def _shown(file: str) -> str:
    """A file of this checkout, as it would be typed here."""
    return os.path.relpath(ROOT / file)


def call(command: list[str]) -> int:
    """Run Python with these arguments; gives its exit code. Nothing is looked for on the network."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *command], env=environment, check=False).returncode


def record(folder: Path, phase: Phase, seconds: float) -> None:
    """Add a phase to run.json: on what machine, with which versions, and by which command it was done."""
    file = folder / "run.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[phase.name] = {
        "command": " ".join(["python", *phase.command]),
        "seconds": round(seconds, 1),
        "hardware": hardware(resolve_device()),
        "versions": {"python": sys.version.split()[0], "cuda": torch.version.cuda}
        | {name: version(name) for name in ("torch", "transformers", "datasets", "accelerate")},
        "git_commit": git_commit(),
    }
    write_text(file, json.dumps(known, indent=1))


def publish(folder: Path, output: Path) -> None:
    """Copy the reports that there are."""
    for pattern in _PUBLISHED:
        for file in folder.glob(pattern):
            place = output / file.relative_to(folder)
            make_folder(place.parent)
            shutil.copy(file, place)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.reference", description=__doc__)
    parser.add_argument("phase", nargs="*", help="of those that --list shows; default: all")
    parser.add_argument("--list", action="store_true", help="show the phases and what is done, and stop")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes")
    parser.add_argument("--minutes", type=float, help="of training the target; default: 8")
    parser.add_argument("--source", action="append", default=[], help="local text beside python-sources; repeatable")
    parser.add_argument("--output", type=Path, help="default: runs/reference, or runs/rehearsal")
    parser.add_argument("--publish", type=Path, help="default: docs/reference, or OUTPUT/published in a rehearsal")
    flags = parser.parse_args(argv)
    return run_command("reference", lambda: run(flags))


def run(flags: argparse.Namespace) -> None:
    """Do the phases that are not done."""
    scale = REHEARSAL if flags.rehearse else FULL
    folder = flags.output or Path("runs", "rehearsal" if flags.rehearse else "reference")
    published = flags.publish or (folder / "published" if flags.rehearse else ROOT / "docs" / "reference")
    minutes = scale.minutes if flags.minutes is None else flags.minutes
    refuse(
        (not minutes > 0, "--minutes must be above 0"),
        *((not Path(source).exists(), f"--source {source}: not here") for source in flags.source),
    )
    table = phases(folder, scale, minutes, ["python-sources", *flags.source])
    names = [phase.name for phase in table]
    for name in flags.phase:
        refuse((name not in names, f"no phase {name!r}: there are {', '.join(names)}"))
    if flags.list:
        print("\n".join(f"{phase.name}: {'done' if phase.product.exists() else 'to do'}" for phase in table))
        return
    make_folder(folder)
    for phase in table:
        if flags.phase and phase.name not in flags.phase:
            continue
        if phase.product.exists():
            print(f"{phase.name}: done, {phase.product}", flush=True)
            continue
        print(f"\n{phase.name}: python {' '.join(phase.command)}", flush=True)
        started = time.perf_counter()
        code = call(phase.command)
        if code or not phase.product.exists():
            raise UserError(f"phase {phase.name} ended with exit code {code} and without {phase.product}")
        record(folder, phase, time.perf_counter() - started)
        publish(folder, published)
    print(f"\nThe reports are in {published}")


if __name__ == "__main__":
    sys.exit(main())
