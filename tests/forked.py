"""`python train.py` in a process that has imported torch already: it starts in milliseconds instead of seconds.

That holds where pytest runs in the root of the repository; elsewhere each process imports torch itself.
"""

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["train.run", "train.command_line"])


def start(argv: Sequence[str], environment: dict[str, str], out: str, err: str) -> multiprocessing.Process:
    """Start `train.py` with the flags `argv`, in its own process; stdout and stderr go to two files."""
    process = _context.Process(target=_train, args=(list(argv), environment, out, err))
    process.start()
    return process


def run(argv: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Run `train.py` with the flags `argv`, as `subprocess.run` would."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(argv, environment, str(out), str(err))
        try:
            process.join(300)
            assert process.exitcode is not None, "it takes too long"
        finally:
            process.kill()
            process.join()
        return subprocess.CompletedProcess(argv, process.exitcode, out.read_text(), err.read_text())


def _train(argv: list[str], environment: dict[str, str], out: str, err: str) -> None:
    multiprocessing.set_start_method(None, force=True)  # data loaders start as in a user's run, not as this process did
    os.environ.clear()  # after the imports, which took their variables from the first run's environment
    os.environ.update(environment)
    os.chdir(ROOT)
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["train.py", *argv]

    from speculator.errors import start
    from train.__main__ import main

    start()
    try:
        code = main(argv)
    finally:
        atexit._run_exitfuncs()  # a forked process skips them
    sys.exit(code)
