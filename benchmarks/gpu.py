"""What to measure when a GPU is at hand for half an hour: each part in a process of its own, into one results file.

The most telling part is first, and none takes more than five minutes. Finished parts of the same commit and card are
kept, so an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from speculator.device import hardware, resolve_device
from speculator.errors import OneLineParser, run_command
from speculator.files import write_text
from train.folder import git_commit

_LIMIT = 300  # seconds of a part
_KEPT = 12_000  # characters of a part's output, from its end


@dataclass(frozen=True)
class Part:
    """A command after `python -m`, and what it shows."""

    shows: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def _recipe(name: str) -> list[str]:
    return ["benchmarks.recipe", "--preset", "llama-3-8b", "--config", f"configs/{name}.yaml"]


def _engine(slots: int) -> list[str]:
    head = ["--target", "HuggingFaceTB/SmolLM2-135M-Instruct", "--speculator", "examples/smollm2_135m_instruct"]
    return ["benchmarks.engine", *head, "--turns", "1", "--requests", str(4 * slots), "--slots", str(slots)]


_CUDNN = {"TORCH_CUDNN_SDPA_CACHE_DEBUG": "1"}  # prints the plans that cuDNN makes: none are expected
_STEP = ["benchmarks.step", "--preset", "llama-3-8b", "--batch_size", "1", "--batch_size", "8", "--blocks", "8"]
_TARGET = ["--target", "examples/stdlib_target"]
_SERVER = shlex.join([sys.executable, "-m", "speculator", "serve", *_TARGET, "--max_num_seqs", "128", "--port"])
_LOAD = ["--seconds", "60", "--clients", "8", "128", "--server", f"ours={_SERVER} {{port}}"]
PARTS = {
    "dspark": Part("DSpark's recipe: plans of cuDNN, MFU", _recipe("llama-3.1-8b-instruct-dspark"), _CUDNN),
    "mlp": Part("the MLP recipe: 52% MFU by the budget", _recipe("llama-3.1-8b-instruct")),
    "eagle3": Part("the EAGLE-3 recipe: 45% MFU by the budget", _recipe("llama-3.1-8b-instruct-eagle3")),
    "step": Part("a plain step: 1.33 times its bytes by the budget", [*_STEP, "--context", "512"], _CUDNN),
    "tests": Part("the tests that need a GPU", ["pytest", "-q", "-m", "gpu", "--maxfail", "20"]),
    "long": Part("a step after a long text, whose keys are not split", [*_STEP, "--context", "7900"]),
    "serve": Part("8 and 128 clients", ["benchmarks.serving", *_TARGET, "--output", "{folder}", *_LOAD], _CUDNN),
    **{f"smollm2-{slots}": Part(f"SmolLM2 at {slots} requests", _engine(slots)) for slots in (1, 8, 32, 128)},
}


def measured(part: Part, folder: Path) -> dict[str, Any]:
    """Run a part; return its exit code (None: it took too long), seconds and output."""
    words = [str(folder) if word == "{folder}" else word for word in part.command]
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        env={**os.environ, **part.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, code = process.communicate(timeout=_LIMIT)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a server of its own too
        output, code = process.communicate()[0], None
    return {"code": code, "seconds": round(time.monotonic() - started), "output": output[-_KEPT:]}


def markdown(found: dict[str, Any]) -> str:
    """The results file."""
    lines = [f"# {found['card']}", "", f"{found['date']}, commit {found['commit']}, torch {found['torch']}"]
    for name, result in found["parts"].items():
        state = {0: "", None: f", stopped after {_LIMIT} s"}.get(result["code"], f", exit code {result['code']}")
        lines += [
            "",
            f"## {name}: {PARTS[name].shows}",
            "",
            f"`{shlex.join(PARTS[name].command)}`, {result['seconds']} s{state}",
        ]
        lines += ["", "```", result["output"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def run(arguments: argparse.Namespace, parts: Sequence[str]) -> None:
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "gpu.json"
    here = {"card": hardware(resolve_device()), "commit": git_commit(), "torch": torch.__version__}
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if any(found.get(name) != value for name, value in here.items()):
        found = {**here, "date": str(date.today()), "parts": {}}
    for name in parts:
        if found["parts"].get(name, {}).get("code") == 0:
            continue
        print(f"{name}: {PARTS[name].shows}", flush=True)
        found["parts"][name] = measured(PARTS[name], folder)
        write_text(file, json.dumps(found, indent=1))
        write_text(folder / "gpu.md", markdown(found))


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder for gpu.md and gpu.json")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part only (repeatable)")
    arguments = parser.parse_args(argv)
    return run_command("gpu", lambda: run(arguments, arguments.only or list(PARTS)))


if __name__ == "__main__":
    sys.exit(main())
