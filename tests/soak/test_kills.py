"""Kills at random moments: every command resumes to the result of an uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from soak.running import HEADS, finish, kill, outcome, rows_of, sha, start, terminate_group, train_argv

Kill = Callable[[subprocess.Popen], bool]
CHAINS = [(0, "mlp"), (1, "mlp"), (2, "mlp"), (3, "mlp"), (4, "eagle3"), (5, "eagle3")]
PREPARES, GENERATIONS, EXPORTS, EVALUATIONS = 2, 3, 2, 1


def kill_after(
    argv: list[str], cache: Path, begun: Callable[[], bool], wait: float, progress: str, kill: Kill = kill
) -> bool:
    """Start a command and kill it `wait` seconds after `begun` is true. Returns False if it ended before that."""
    process = start(argv, cache, start_new_session=True)
    deadline = time.monotonic() + 200
    while not begun() and process.poll() is None:
        assert time.monotonic() < deadline, progress
        time.sleep(0.005)
    time.sleep(wait)
    alive = kill(process)
    print(f"{progress}: {'killed' if alive else 'already ended'} {wait:.2f} s after it began", flush=True)
    return alive


def phases(run: Path, cache: Path) -> dict[str, tuple[Callable[[], bool], float]]:
    """For each phase of a run: a test that it has begun, and its length in seconds."""
    return {
        "preparation": (lambda: any(cache.glob("*.work")), 0.3),
        "stage1": (lambda: (run / "stage1").exists(), 1.5),
        "generation": (lambda: (run / "generated").exists(), 1.5),
        "stage2": (lambda: (run / "stage2").exists(), 1.0),
        "publishing": (lambda: (run / "stage2" / "speculator").exists(), 0.05),
        "evaluation": (lambda: (run / "speculator").exists(), 1.0),
    }


@pytest.mark.parametrize(("chain", "architecture"), CHAINS)
def test_a_run_killed_in_every_phase_gives_the_same_result(chain, architecture, inputs, uninterrupted, tmp_path):
    whole = uninterrupted(architecture)
    draw = random.Random(chain)
    run, cache = tmp_path / "run", tmp_path / "cache"
    argv = ["train.py", *train_argv(inputs, run, **HEADS[architecture])]
    killed = 0
    for phase, (begun, length) in phases(run, cache).items():
        killed += kill_after(argv, cache, begun, draw.uniform(0, length), f"chain {chain}, {phase}")
    assert killed >= 5, "the phases were over before they could be killed"
    finish(argv, cache)
    assert outcome(run) == outcome(whole)


def test_sigterm_to_all_processes_of_a_run_in_every_phase_gives_the_same_result(inputs, uninterrupted, tmp_path):
    whole = uninterrupted("mlp")
    run, cache = tmp_path / "run", tmp_path / "cache"
    argv = ["tests/soak/with_loaders.py", *train_argv(inputs, run, **{"data.num_proc": 2})]
    for phase, (begun, length) in phases(run, cache).items():
        assert kill_after(argv, cache, begun, length / 3, phase, terminate_group), phase
        assert not phase.startswith("stage") or list((run / phase).glob("checkpoint-*"))
    finish(argv, cache)
    assert outcome(run) == outcome(whole)


@pytest.mark.parametrize("number", range(PREPARES))
def test_a_killed_prepare_leaves_no_partial_rows(number, inputs, cache, tmp_path):
    def argv(name: str) -> list[str]:
        flags = ["--target", str(inputs["TARGET"]), "--sources", str(inputs["TEXT"]), "--seq_length", "32"]
        return ["-m", "data", "prepare", *flags, "--output", str(tmp_path / name)]

    wait = random.Random(number).uniform(0, 0.3)
    own = tmp_path / "cache"
    assert kill_after(argv("rows"), own, lambda: any(own.glob("*.work")), wait, f"prepare {number}")
    assert not (tmp_path / "rows").exists()
    finish(argv("rows"), own)
    finish(argv("again"), cache)
    assert rows_of(tmp_path / "rows") == rows_of(tmp_path / "again")


def test_a_killed_generation_resumes(inputs, cache, tmp_path):
    def argv(name: str) -> list[str]:
        flags = [
            "--target",
            str(inputs["TARGET"]),
            "--speculator",
            str(inputs["MLP"]),
            "--sources",
            str(inputs["TEXT"]),
        ]
        flags += ["--prompt_tokens", "8", "--max_rows", "100", "--max_new_tokens", "64", "--batch_size", "4"]
        return ["-m", "data", "generate", *flags, "--output", str(tmp_path / name)]

    draw = random.Random(0)
    for number in range(GENERATIONS):
        done = len(list((tmp_path / "rows").glob("batches/*")))
        further = lambda done=done: len(list((tmp_path / "rows").glob("batches/*"))) > done  # noqa: E731
        assert kill_after(argv("rows"), cache, further, draw.uniform(0, 0.3), f"generation {number}")
    finish(argv("rows"), cache)
    finish(argv("again"), cache)
    assert rows_of(tmp_path / "rows" / "rows") == rows_of(tmp_path / "again" / "rows")


@pytest.mark.parametrize("number", range(EXPORTS))
def test_a_killed_export_can_be_run_again(number, uninterrupted, cache, tmp_path):
    whole = uninterrupted("mlp")

    def argv(name: str) -> list[str]:
        flags = ["--speculator", str(whole / "speculator"), "--format", "ibm", "--output", str(tmp_path / name)]
        return ["-m", "speculator", "export", *flags]

    before = set(tmp_path.iterdir())
    wait = random.Random(number).uniform(0, 0.02)
    kill_after(argv("out"), cache, lambda: set(tmp_path.iterdir()) > before, wait, f"export {number}")
    if not (tmp_path / "out").exists():
        finish(argv("out"), cache)
    finish(argv("again"), cache)
    for name in ("config.json", "model.safetensors"):
        assert sha(tmp_path / "out" / name) == sha(tmp_path / "again" / name)


@pytest.mark.parametrize("number", range(EVALUATIONS))
def test_a_killed_evaluation_can_be_run_again(number, inputs, uninterrupted, cache, tmp_path):
    whole = uninterrupted("mlp")
    flags = [
        "--target",
        str(inputs["TARGET"]),
        "--speculator",
        str(whole / "speculator"),
        "--suite",
        str(inputs["TEXT"]),
    ]
    flags += ["--prompt_tokens", "8", "--max_new_tokens", "32", "--output", str(tmp_path / "out")]
    assert kill_after(["-m", "eval", *flags], cache, (tmp_path / "out").exists, 1.0, f"evaluation {number}")
    assert not (tmp_path / "out" / "report.json").exists()
    shutil.rmtree(tmp_path / "out")
    finish(["-m", "eval", *flags], cache)
    assert (tmp_path / "out" / "report.json").exists()
