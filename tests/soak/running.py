"""Helpers of the soak tests: commands as processes, and the results of a run that must not depend on interruptions."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from datasets import load_from_disk

ROOT = Path(__file__).parents[2]
STAGE = {
    "per_device_train_batch_size": 8,
    "warmup_steps": 2,
    "logging_steps": 5,
    "eval_steps": 5,
    "save_steps": 5,
}
SETTINGS: dict[str, Any] = {
    "data.seq_length": 64,
    "data.max_tokens": 40_000,
    "report_to": "none",
    "stage1.max_steps": 20,
    "stage2.max_steps": 10,
    "stage2.generate.max_rows": 80,
    "stage2.generate.prompt_tokens": 16,
    "stage2.generate.max_new_tokens": 32,
    "eval.validation_rows": 16,
    "eval.validation_prompts": 4,
    "eval.tune_prompts": 0,
    "eval.prompt_tokens": 16,
    "eval.max_prompts": 2,
    "eval.max_new_tokens": 12,
    "speculator.n_predict": 3,
    "speculator.initialise": "random",
    **{f"{stage}.{name}": value for stage in ("stage1", "stage2") for name, value in STAGE.items()},
}
HEADS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "eagle3": {
        "speculator.architecture": "eagle3",
        "speculator.options": "{aux_layers: [0, 1]}",
        "speculator.draft_vocab_size": 100,
        "stage1.learning_rate": 2e-3,
    },
}
_COUNTED = (
    "steps",
    "acceptance_length",
    "acceptance_by_position",
    "accepted_lengths",
    "identical_to_greedy",
    "prompts",
)


def train_argv(inputs: dict[str, Path], output: Path, **settings: Any) -> list[str]:
    """Flags of a tiny run."""
    values = {
        **SETTINGS,
        "config": ROOT / "tests/plain.yaml",
        "target.name_or_path": inputs["TARGET"],
        "data.sources": f"[{inputs['TEXT']}]",
        **settings,
    }
    return ["--output_dir", str(output), *(f"--{name}={value}" for name, value in values.items())]


def start(argv: list[str], cache: Path, **options: Any) -> subprocess.Popen:
    """Start a command as a user does: `train.py`, or `-m data` and the other modules."""
    environment = {**os.environ, "SPECULATOR_CACHE": str(cache), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, **options}
    return subprocess.Popen([sys.executable, *argv], env=environment, **options)


def finish(argv: list[str], cache: Path, timeout: float = 300, **options: Any) -> str:
    """Run a command to exit code 0 and return its stderr."""
    process = start(argv, cache, **options)
    _, error = process.communicate(timeout=timeout)
    assert process.returncode == 0, error
    return error


def kill(process: subprocess.Popen) -> bool:
    """Kill a process with SIGKILL. Returns False if it had already ended."""
    alive = process.poll() is None
    if alive:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    return alive


def terminate_group(process: subprocess.Popen) -> bool:
    """Send SIGTERM to a process and those that it started, the last one first. Returns False if it had ended."""
    if process.poll() is not None:
        return False
    for pid in reversed(process_tree(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode in (0, 143), error
    assert "Traceback" not in error, error
    return process.returncode == 143


def process_tree(pid: int) -> list[int]:
    tree = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        tree += [each for child in children.read_text().split() for each in process_tree(int(child))]
    return tree


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rows_of(folder: Path) -> str:
    """Checksum of the rows of a `datasets` folder, independent of its file names."""
    saved = load_from_disk(str(folder))
    splits = saved if isinstance(saved, dict) else {"": saved}
    return hashlib.sha256(json.dumps({name: rows.to_dict() for name, rows in splits.items()}).encode()).hexdigest()


def outcome(run: Path) -> dict[str, Any]:
    """Results of a run that must not depend on interruptions: weights, rows and counts."""
    found: dict[str, Any] = {
        "head": sha(run / "speculator" / "model.safetensors"),
        "rows": rows_of(run / "generated/rows"),
    }
    for stage in ("stage1", "stage2"):
        found[stage] = sha(run / stage / "speculator" / "model.safetensors")
    suites = json.loads((run / "eval" / "report.json").read_text())["suites"]
    found["report"] = [
        {name: row[name] for name in ("drafter", "temperature", *_COUNTED) if name in row}
        for row in suites
        if row["drafter"] != "adaptive"  # its drafts follow step costs that each run measures by the clock
    ]
    return found
