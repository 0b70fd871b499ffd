"""Ctrl-C and SIGTERM, as a shell sends them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_first_sigterm_waits_for_the_checkpoint_and_a_second_signal_does_not(tmp_path, number, code):
    process = start(SAVING, tmp_path / "temporary", "interrupts.saving()")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(number)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == code


def test_ctrl_c_while_train_py_imports_is_without_a_word():
    process = subprocess.Popen([sys.executable, "train.py", "--seed", "1"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[1] == ""
    assert process.returncode == 130
