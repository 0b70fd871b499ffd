import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import exit_code
from safetensors import SafetensorError

import speculator
from speculator.__main__ import main
from speculator.errors import OneLineParser, UserError, printable, run_command, start


def raising(error: BaseException):
    def work():
        raise error

    return work


ROOT = Path(speculator.__file__).parents[1]
FULL = (
    "CUDA out of memory. Tried to allocate 11.25 GiB. GPU 0 has a total capacity of 79.18 GiB of which 4.19 GiB is free"
)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("the file\nis empty"), 2, "it: the file is empty\n"),
        (PermissionError(13, "Permission denied", "/out"), 2, "it: /out: Permission denied\n"),
        (OSError(30, "Read-only file system", "out"), 2, "it: out: Read-only file system\n"),
        (OSError(28, "No space left on device"), 2, "it: can't write: No space left on device\n"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), 2, "it: can't write: No space"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 2, "it: out of memory: "),
        (MemoryError(), 2, "it: out of memory: MemoryError\n"),
        (torch.OutOfMemoryError(f"{FULL}. Process 1147 has 32.30 GiB"), 2, f"it: out of memory: {FULL}\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error, code, message, capsys):
    assert run_command("it", raising(error)) == code
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("error", [OSError("of no file"), ValueError("a defect")])
def test_a_defect_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        run_command("it", raising(error))


def test_text_passes_a_posix_locale():
    work = "import sys; from speculator.errors import as_text, start; start(); print(as_text(sys.argv[1]), '\\u306f')"
    posix = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PATH": "", "PYTHONPATH": str(ROOT)}
    shown = subprocess.check_output([sys.executable, "-c", work, "\u306f"], env=posix)
    assert shown == b"\\u306f \\u306f\n"


def test_a_closed_pipe_ends_a_command_silently():
    work = "from speculator.errors import run_command; import sys\n"
    work += "def say():\n    while True: print('x' * 10000)\n"
    work += "sys.exit(run_command('it', say))"
    command = subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.read(1)
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait() == 141


def test_control_characters_are_escaped(capsys):
    assert printable("a\tb\n é 中 👩\u200d🔬") == "a\tb\n é 中 👩\u200d🔬"
    assert printable("\x1b[2J\x9b\r\x07\ud800") == "\\x1b[2J\\x9b\\r\\x07\\ud800"
    assert run_command("x", raising(UserError("a \x1b]0;title\x07"))) == 2
    assert capsys.readouterr().err == "x: a \\x1b]0;title\\x07\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--fil", "x"], "unrecognized arguments: --fil x: did you mean --file?\n"),
        (["--bad"], "unrecognized arguments: --bad (--help explains)"),
        (["--early_exit=3", "x"], "--early_exit is gone: drafting with the target's first layers was slower"),
        (["--file", ""], "--file is empty"),
        (["--count", "1\x1b[2J\n2"], "invalid int value: '1\\x1b[2J\\n2'"),
    ],
)
def test_flags_can_not_be_abbreviated_and_errors_are_one_escaped_line(argv, message, capsys):
    parser = OneLineParser(prog="it")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--count", type=int)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def run_python(work: str, **settings) -> subprocess.CompletedProcess:
    code = f"import sys\nfrom speculator.errors import *\nstart()\n{work}\nsys.exit(run_command('it', say))"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=20, **settings)


def test_text_that_stdout_can_not_encode_is_escaped():
    done = run_python(
        "def say():\n    print('né中')", stdout=subprocess.PIPE, env={"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "né\\u4e2d\n".encode("latin-1"), b"")


needs_full = pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_fails_in_one_line(unbuffered):
    with open("/dev/full", "wb") as full:
        done = run_python(
            "def say():\n    print('x')", stdout=full, env={"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
        )
    assert done.stderr == b"it: can't write: No space left on device\n"
    assert done.returncode == 2


@needs_full
@pytest.mark.parametrize("words", ["", "--help", "--version", "export --help", "train --help", "eval gate --help"])
def test_help_on_a_full_disk_fails_in_one_line(words, monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert exit_code(main, words.split()) == 2
    assert re.fullmatch(r"[\w. ]+: can't write: No space left on device\n", capfd.readouterr().err)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("package", ["speculator", "eval"])
def test_ctrl_c_during_the_imports_is_silent(package):
    argv = {"speculator": ["inspect", "x"], "eval": ["tune", "--target", "x", "--speculator", "x"]}[package]
    command = subprocess.Popen([sys.executable, "-m", package, *argv], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while b"torch" not in Path(f"/proc/{command.pid}/maps").read_bytes():  # its libraries are being loaded
        assert command.poll() is None, "it ended without loading them"
        time.sleep(0.01)
    sent = time.monotonic()
    command.send_signal(signal.SIGINT)
    _, error = command.communicate(timeout=20)
    assert (command.returncode, error) == (130, b"")
    assert time.monotonic() - sent < 2


def test_all_public_names_can_be_imported():
    assert all(getattr(speculator, name).__name__ == name for name in speculator.__all__)
    assert set(dir(speculator)) == set(speculator.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = speculator.nonsense


def test_a_closed_stream_takes_what_is_printed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    start()
    print("nowhere")
    assert not sys.stdout.isatty()
