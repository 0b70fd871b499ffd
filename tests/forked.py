"""`python FILE ...` and `python -m MODULE ...` in a process that has imported torch: it starts at once, not in seconds.

That holds where pytest runs in the root of the repository; elsewhere each process imports torch itself.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["train.run", "train.command_line", "data.writers.server", "speculator.server.app"])


class Popen:
    """What `subprocess.Popen(["python", *argv], stderr=subprocess.PIPE, text=True)` gives, in the repository's root.

    Args:
        stdout: a file that takes the output, which is lost by default.
        stderr: a file in place of a pipe.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: dict[str, str] | None = None,
        stdout: IO | None = None,
        stderr: IO | None = None,
    ):
        self.stderr, (reader, writer) = stderr, os.pipe()
        with open(os.devnull, "w") as nowhere, os.fdopen(writer, "w") as pipe:
            if stderr is None:
                self.stderr = os.fdopen(reader)
            else:
                os.close(reader)
            # The descriptor of a connection travels to the new process.
            streams = [
                Connection(os.dup(file.fileno()), readable=False) for file in (stdout or nowhere, stderr or pipe)
            ]
        self._process = _context.Process(target=_python, args=(list(argv), dict(env or os.environ), *streams))
        self._process.start()
        for stream in streams:
            stream.close()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run(argv: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Run `python *argv` as `subprocess.run` would, with its output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Popen(argv, environment, out, err)
        try:
            process.wait(300)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(argv, process.returncode, out.read(), err.read())


def launch(processes: int, *argv: str) -> list[Popen]:
    """Start `python *argv` in processes of one group, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [
        Popen(argv, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=tempfile.TemporaryFile("w+"))
        for rank in range(processes)
    ]


def finish(started: list[Popen]) -> None:
    """Wait for all of them, which must end well."""
    codes = []
    with contextlib.suppress(subprocess.TimeoutExpired):  # where one is dead the others wait for it
        codes = [process.wait(400) for process in started]
    for process in started:
        process.kill()
        process.stderr.seek(0)
    assert codes == [0] * len(started), "\n".join(process.stderr.read() for process in started)


def _python(argv: list[str], environment: dict[str, str], *streams: Connection) -> None:
    gc.freeze()  # trainers collect garbage, and would search all modules each time
    multiprocessing.set_start_method(None, force=True)  # data loaders start as in a user's run, not as this process did
    os.environ.clear()  # after the imports, which took their variables from the first run's environment
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process skips them
