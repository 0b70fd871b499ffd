"""Ctrl-C and SIGTERM, as a shell sends them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from soak.running import process_tree, train_argv

ROOT = Path(__file__).parents[2]
BUSY = """
import contextlib, hashlib, pathlib, sys, time
from train import interrupts
interrupts.install()
with interrupts.temporary(pathlib.Path(sys.argv[1])), {}:
    print("ready", flush=True)
    {}
"""
LONG_CALL = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"  # one step of the main thread: no handler gets a turn
STUBBORN = "while True:\n        try: time.sleep(60)\n        except BaseException: pass"
SAVING = """
    while not interrupts.stop_asked(): time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
"""


def start(what: str, folder: Path, within: str = "contextlib.nullcontext()") -> subprocess.Popen:
    folder.mkdir()
    argv = [sys.executable, "-c", BUSY.format(within, what), str(folder)]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("what", [LONG_CALL, STUBBORN], ids=["long call", "stubborn"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_busy_process_at_once_without_a_word(tmp_path, what, number, code):
    process = start(what, tmp_path / "temporary")
    begin = time.monotonic()
    process.send_signal(number)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == code
    assert time.monotonic() - begin < 2
    assert not (tmp_path / "temporary").exists()


def test_sigterm_waits_for_the_checkpoint_and_ctrl_c_does_not(tmp_path):
    process = start(SAVING, tmp_path / "temporary", "interrupts.saving()")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)  # torchrun passes on what a scheduler has sent already
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_waits_for_what_is_being_written(tmp_path, number, code):
    work = f"time.sleep(1) or pathlib.Path({str(tmp_path / 'checkpoint')!r}).touch()"
    process = start(f"interrupts.Background().write(lambda: {work}); {LONG_CALL}", tmp_path / "temporary")
    time.sleep(0.3)
    process.send_signal(number)
    assert process.communicate(timeout=10) == ("", "\nfinishing what is being written\n")
    assert process.returncode == code
    assert (tmp_path / "checkpoint").exists()


def test_sigterm_to_the_workers_first_is_without_a_word(tmp_path):
    work = "list(__import__('data.workers').workers.map_in_order(time.sleep, [0] * 16 + [0.3] * 100, 2))"
    process = start(work, tmp_path / "temporary")
    while len(tree := process_tree(process.pid)) < 3:
        time.sleep(0.1)
    time.sleep(0.3)
    os.kill(tree[-1], signal.SIGTERM)
    time.sleep(0.3)
    process.terminate()
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 143


def test_a_run_says_how_to_resume(tmp_path):
    process = start(f"interrupts.print_when_interrupted('resume'); {LONG_CALL}", tmp_path / "temporary")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[1].strip() == "resume"
    assert process.returncode == 130


def test_a_run_that_fails_does_not_wait_for_its_data_loaders(tmp_path):
    loading = "rows = iter(torch.utils.data.DataLoader(range(100), num_workers=1)); next(rows); sys.exit(2)"
    process = start(f"import torch; {loading}", tmp_path / "temporary")
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_a_stage_and_its_data_loaders(target_folder, text_file, tmp_path, number, code):
    inputs, steps = {"TARGET": target_folder, "TEXT": text_file}, ("max_steps", "save_steps", "eval_steps")
    flags = train_argv(inputs, tmp_path / "run", **{f"stage1.{name}": 5000 for name in steps})
    environment = {**os.environ, "SPECULATOR_CACHE": str(tmp_path / "cache")}
    process = forked.Popen(["tests/soak/with_loaders.py", *flags], environment)
    assert any("step 5/" in line for line in process.stderr)
    tree = process_tree(process.pid)
    assert len(tree) > 2
    for pid in reversed(tree):
        os.kill(pid, number)
    try:
        ended = process.wait(60)
    finally:
        process.kill()
    error = process.stderr.read()
    assert ended == code, error
    assert "Traceback" not in error
    assert len(list((tmp_path / "run" / "stage1").glob("checkpoint-*"))) == (number == signal.SIGTERM)


def test_ctrl_c_while_train_py_imports_is_without_a_word():
    process = subprocess.Popen([sys.executable, "train.py", "--seed", "1"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[1] == ""
    assert process.returncode == 130
