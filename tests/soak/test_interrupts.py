"""Ctrl-C, SIGTERM, closed outputs and full disks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from soak.running import ROOT, finish, start, train_argv

_SHORT = ["--prompt_tokens", "8", "--max_new_tokens", "64"]


def commands(inputs: dict[str, Path], out: Path) -> dict[str, list[str]]:
    target, head = ["--target", str(inputs["TARGET"])], ["--speculator", str(inputs["MLP"])]
    samples = ["--prompt", "x", "--num_samples", "1000", "--temperature", "1"]
    suite, source = ["--suite", str(inputs["TEXT"])], ["--sources", str(inputs["TEXT"])]
    return {
        "train": ["train.py", *train_argv(inputs, out / "run", **{"stage1.max_steps": 400})],
        "data prepare": ["-m", "data", "prepare", *target, *source, "--seq_length", "64", "--output", str(out / "p")],
        "data generate": ["-m", "data", "generate", *target, *head, *source, *_SHORT, "--output", str(out / "g")],
        "eval": ["-m", "eval", *target, *head, *suite, *_SHORT, "--output", str(out / "e")],
        "eval tune": ["-m", "eval", "tune", *target, *head, *suite, *_SHORT, "--output", str(out / "t.json")],
        "generate": ["-m", "speculator", "generate", *target, *samples],
    }


NAMES = list(commands({name: Path(name) for name in ("TARGET", "MLP", "TEXT")}, Path("out")))


@pytest.mark.parametrize("wait", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_ends_a_command_within_two_seconds(name, wait, inputs, tmp_path):
    process = start(commands(inputs, tmp_path)[name], tmp_path / "cache")
    time.sleep(wait)
    if process.poll() is not None:
        pytest.skip("the command ended before it was interrupted")
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    _, error = process.communicate(timeout=20)
    took = time.monotonic() - sent
    assert "Traceback" not in error, error
    assert process.returncode in (130, -signal.SIGINT), error
    assert took < 2


def test_sigterm_saves_a_checkpoint(inputs, cache, tmp_path):
    sizes = {"stage1.max_steps": 5000, "stage1.save_steps": 5000, "stage1.eval_steps": 5000}
    process = start(["train.py", *train_argv(inputs, tmp_path / "run", **sizes)], cache)
    assert any("step 5/" in line for line in process.stderr)
    process.terminate()
    assert process.wait(60) == 143
    error = process.stderr.read()
    assert "Traceback" not in error
    assert list((tmp_path / "run" / "stage1").glob("checkpoint-*")), error


def test_a_closed_output_is_no_traceback(inputs, cache):
    prompts = ["--prompts", str(inputs["PROMPTS"]), "--max_new_tokens", "64"]
    for argv in (
        ["-m", "speculator", "inspect", str(inputs["MLP"])],
        ["-m", "speculator", "generate", "--target", str(inputs["TARGET"]), *prompts],
        ["-m", "data", "view", str(inputs["TEXT"]), "--target", str(inputs["TARGET"]), "--rows", "50"],
        ["-m", "eval", "compare", str(inputs["REPORT"]), str(inputs["REPORT"])],
        ["train.py", "--help"],
    ):
        reading, writing = os.pipe()
        os.close(reading)
        process = start(argv, cache, stdout=writing)
        os.close(writing)
        _, error = process.communicate(timeout=60)
        assert "Traceback" not in error, error
        assert "Exception ignored" not in error, error
        shell = f"exec {sys.executable} {' '.join(argv)} >&-"
        done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr, done.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["umount", disk])


def test_a_full_disk_fails_in_one_line_and_the_run_resumes(small_disk, inputs, cache):
    argv = ["train.py", *train_argv(inputs, small_disk / "run")]
    process = start(argv, cache)
    _, error = process.communicate(timeout=200)
    assert process.returncode == 2, error
    assert "Traceback" not in error
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    finish(argv, cache)
