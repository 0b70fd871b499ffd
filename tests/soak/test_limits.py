"""Whole processes: bounds of memory and time, Ctrl-C, SIGTERM, full disks, closed outputs, servers that never end."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_inputs.damages import config
from bad_inputs.test_train import BOMB
from soak.running import ROOT, finish, start, train_argv

ROOM = 1 << 30
SECONDS = 10
_MEASURE = "import train.run, eval.__main__, data.__main__, data.cli.generate; print(open('/proc/self/status').read())"


@pytest.fixture(scope="module")
def imports(cache) -> tuple[float, int]:
    """Seconds and bytes of address space that the imports alone take."""
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", _MEASURE], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    peak = next(line for line in said.splitlines() if line.startswith("VmPeak"))
    return time.monotonic() - began, int(peak.split()[1]) << 10


def refused(argv: list[str], cache: Path, imports: tuple[float, int], seconds: float = SECONDS) -> str:
    """Run a command in little memory; gives the one line that it must refuse with."""
    took, bytes_ = imports

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (bytes_ + ROOM, bytes_ + ROOM))

    process = start(argv, cache, preexec_fn=limit)
    try:
        _, said = process.communicate(timeout=2 * took + seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"not done {seconds} s after its imports")
    lines = [line for line in said.splitlines() if line.strip() and "/s]" not in line]
    assert process.returncode == 2, said
    assert len(lines) == 1, said
    return lines[0]


def test_a_bomb_of_zeros_is_refused(world, cache, imports, tmp_path):
    """2 GiB behind 2 MB of gzip: as rows, as a suite, as prompts."""
    bomb, block = tmp_path / "bomb.jsonl.gz", bytes(1 << 24)
    with gzip.open(bomb, "wb", compresslevel=1) as stream:
        for _ in range(128):
            stream.write(block)
    target = ["--target", str(world["TARGET"])]
    head = ["--speculator", str(world["MLP"])]
    for argv in (
        [
            "-m",
            "data",
            "prepare",
            *target,
            "--sources",
            str(bomb),
            "--seq_length",
            "32",
            "--output",
            str(tmp_path / "o"),
        ],
        ["-m", "data", "view", *target, str(bomb)],
        ["-m", "data", "generate", *target, "--prompts", str(bomb), "--output", str(tmp_path / "o")],
        ["-m", "speculator", "generate", *target, "--prompts", str(bomb)],
        ["-m", "eval", *target, *head, "--suite", str(bomb), "--output", str(tmp_path / "o")],
        ["train.py", *train_argv(world, tmp_path / "run", **{"data.sources": f"[{bomb}]"})],
    ):
        assert "bomb" in refused(argv, cache, imports)
        assert not (tmp_path / "o").exists()
        assert not (tmp_path / "run").exists()


def test_a_long_line_takes_no_gigabytes(world, cache, imports, tmp_path):
    """16 MB in one row: taken or refused, but never out of memory."""
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": "def f(x): return x\n" * 900_000}) + "\n")
    _, bytes_ = imports
    argv = ["-m", "data", "view", "--target", str(world["TARGET"]), "--rows", "1", str(long)]
    limits = (bytes_ + 2 * ROOM,) * 2
    process = start(argv, cache, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits))
    _, said = process.communicate(timeout=120)
    assert process.returncode in (0, 2), said
    assert "Traceback" not in said


ABSURD = {
    "n_predict": {"speculator.n_predict": 10**8, "data.seq_length": 64},
    "inner_dim": {"speculator.inner_dim": 10**9},
    "batch": {"stage1.per_device_train_batch_size": 10**12},
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_sizes_are_refused(name, world, cache, imports, tmp_path):
    refused(["train.py", *train_argv(world, tmp_path / "run", **ABSURD[name])], cache, imports)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["num_hidden_layers", "vocab_size", "intermediate_size"])
def test_absurd_targets_are_refused(change, world, cache, imports, tmp_path):
    import shutil

    folder = shutil.copytree(world["TARGET"], tmp_path / "damaged")
    config(**{change: 10**9})(folder)
    argv = ["-m", "speculator", "generate", "--target", str(folder), "--prompt", "x"]
    assert "damaged" in refused(argv, cache, imports)


def test_a_yaml_bomb_is_refused(cache, imports, tmp_path):
    (tmp_path / "run.yaml").write_text(BOMB)
    refused(["train.py", "--config", str(tmp_path / "run.yaml")], cache, imports)


# Ctrl-C and SIGTERM

_SHORT = ["--prompt_tokens", "8", "--max_new_tokens", "64"]


def commands(world: dict[str, Path], out: Path) -> dict[str, tuple[list[str], Callable[[], bool] | None, float]]:
    """Commands with what shows that a phase has begun, and seconds to wait from there."""
    target, head = ["--target", str(world["TARGET"])], ["--speculator", str(world["MLP"])]
    text = ["--suite", str(world["TEXT"])]
    train = ["train.py", *train_argv(world, out / "run", **{"stage1.max_steps": 400, "stage2.generate.max_rows": 400})]
    generate = [
        "-m",
        "data",
        "generate",
        *target,
        *head,
        "--sources",
        str(world["TEXT"]),
        *_SHORT,
        "--output",
        str(out / "g"),
    ]
    prepare = [
        "-m",
        "data",
        "prepare",
        *target,
        "--sources",
        "python-sources",
        "--seq_length",
        "64",
        "--output",
        str(out / "p"),
    ]
    evaluate = ["-m", "eval", *target, *head, *text, *_SHORT, "--output", str(out / "e")]
    begun = {
        "train, stage 1": (train, (out / "run" / "stage1").exists, 1.0),
        "train, a checkpoint": (train, lambda: any((out / "run" / "stage1").glob("checkpoint-*")), 0.0),
        "data prepare": (prepare, lambda: any((out / "cache").glob("*.work")), 0.5),
        "data generate": (generate, (out / "g").exists, 0.5),
        "eval": (evaluate, (out / "e").exists, 0.5),
    }
    for name, argv in {
        "train": train,
        "data generate": generate,
        "data prepare": prepare,
        "eval": evaluate,
        "eval lossless": ["-m", "eval", "lossless", *target, *head, *text, *_SHORT],
        "eval tune": ["-m", "eval", "tune", *target, *head, *text, *_SHORT, "--output", str(out / "t.json")],
        "generate": ["-m", "speculator", "generate", *target, "--prompts", str(world["PROMPTS"]), "--chat"],
        "export": ["-m", "speculator", "export", *head, "--format", "ibm", "--output", str(out / "x")],
    }.items():
        for wait in (0.3, 2.0, 6.0):
            begun[f"{name}, after {wait} s"] = (argv, None, wait)
    return begun


NAMES = list(commands({name: Path(name) for name in ("TARGET", "MLP", "TEXT", "PROMPTS")}, Path("out")))


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_answers_within_two_seconds(name, world, tmp_path):
    argv, begun, wait = commands(world, tmp_path)[name]
    process = start(argv, tmp_path / "cache")
    while begun and not begun() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(wait)
    if process.poll() is not None:
        pytest.skip("it was done before")
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    try:
        _, said = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("twenty seconds after Ctrl-C it was still there")
    took = time.monotonic() - sent
    assert "Traceback" not in said, said
    assert process.returncode in (130, -signal.SIGINT), said
    assert took < 2, f"{took:.1f} s"


def test_sigterm_saves_a_checkpoint(world, cache, tmp_path):
    argv = ["train.py", *train_argv(world, tmp_path / "run", **{"stage1.max_steps": 5000, "stage1.save_steps": 5000})]
    argv = [word.replace("eval_steps=5", "eval_steps=5000") if "stage1" in word else word for word in argv]
    process = start(argv, cache)
    while not (tmp_path / "run" / "stage1").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(3)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "Traceback" not in said
    assert list((tmp_path / "run" / "stage1").glob("checkpoint-*/checksums.json")), said


# Outputs


def test_a_closed_output_is_no_traceback(world, cache):
    prompts = ["--prompts", str(world["PROMPTS"]), "--max_new_tokens", "64"]
    for argv in (
        ["-m", "speculator", "inspect", str(world["MLP"])],
        ["-m", "speculator", "generate", "--target", str(world["TARGET"]), *prompts],
        ["-m", "data", "view", str(world["TEXT"]), "--target", str(world["TARGET"]), "--rows", "50"],
        ["-m", "eval", "compare", str(world["REPORT"]), str(world["REPORT"])],
        ["train.py", "--help"],
    ):
        reading, writing = os.pipe()
        os.close(reading)
        process = start(argv, cache, stdout=writing)
        os.close(writing)
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said, said
        assert "Exception ignored" not in said, said
        shell = f"exec {sys.executable} {' '.join(argv)} >&-"
        done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr, done.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte; grows when asked."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], capture_output=True).returncode:
        pytest.skip("may not mount")
    yield disk
    subprocess.run(["umount", disk])


def test_a_full_disk_is_one_line_and_gone_on_with(small_disk, world, cache, imports):
    argv = ["train.py", *train_argv(world, small_disk / "run")]
    process = start(argv, cache)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 2, said
    assert "Traceback" not in said
    assert "can't write" in said, said
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    finish(argv, cache)


# Servers


class Endless:
    """A server that says how long its answer is, and then takes for ever, or never stops."""

    def __init__(self, head: str, block: bytes, pause: float):
        import socket

        self.socket = socket.create_server(("127.0.0.1", 0))
        self.head, self.block, self.pause = head, block, pause
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            connection, _ = self.socket.accept()
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection) -> None:
        try:
            connection.recv(1 << 16)
            connection.sendall(f"HTTP/1.1 200 OK\r\n{self.head}\r\n\r\n".encode())
            while True:
                connection.sendall(self.block)
                time.sleep(self.pause)
        except OSError:
            pass


SERVERS = {
    "endless": ("Content-Type: application/json", b" " * (1 << 16), 0.0),
    "a gzip bomb": ("Content-Encoding: gzip", gzip.compress(bytes(1 << 28)) * 4, 0.0),
    "endless headers": ("X: y", b"a: b\r\n" * 1000, 0.0),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_without_end_is_refused(name, world, cache, imports, tmp_path):
    server = Endless(*SERVERS[name])
    argv = ["-m", "data", "generate", "--target", str(world["TARGET"]), "--prompts", str(world["PROMPTS"])]
    argv += ["--max_new_tokens", "4", "--temperature", "0"]
    line = refused([*argv, "--server", server.url, "--output", str(tmp_path / "out")], cache, imports, seconds=60)
    assert "127.0.0.1" in line
