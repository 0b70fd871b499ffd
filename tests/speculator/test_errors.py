"""How a command ends: a word on stderr where the user can do something, a code of the shell's else."""

import subprocess
import sys

import pytest

from speculator.errors import UserError, printable, run_command
from speculator.files import parse_json


def raising(error: BaseException):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("the file\nis empty"), 2, "it: the file is empty\n"),
        (PermissionError(13, "Permission denied", "/out"), 2, "it: /out: Permission denied\n"),
        (OSError(30, "Read-only file system", "out"), 2, "it: out: Read-only file system\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_command(error, code, message, capsys):
    assert run_command("it", raising(error)) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("error", [OSError("of no file"), ValueError("a defect")])
def test_a_defect_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        run_command("it", raising(error))


def test_a_reader_that_has_gone_ends_it_quietly():
    work = "from speculator.errors import run_command; import sys\n"
    work += "def say():\n    while True: print('x' * 10000)\n"
    work += "sys.exit(run_command('it', say))"
    command = subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.read(1)
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait() == 141


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "9" * 5000])
def test_json_that_is_none_is_named(text):
    with pytest.raises(UserError, match=r"^rows\.jsonl:3: "):
        parse_json(text, "rows.jsonl:3")


def test_what_would_steer_a_terminal_is_shown_as_its_escape(capsys):
    assert printable("a\tb\n é 中 👩\u200d🔬") == "a\tb\n é 中 👩\u200d🔬"
    assert printable("\x1b[2J\x9b\r\x07\ud800") == "\\x1b[2J\\x9b\\r\\x07\\ud800"
    assert run_command("x", raising(UserError("a \x1b]0;title\x07"))) == 2
    assert capsys.readouterr().err == "x: a \\x1b]0;title\\x07\n"
