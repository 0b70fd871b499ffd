"""Ctrl-C and SIGTERM end a run at once, wherever it is; what a thread is writing is finished first.

Python runs a signal handler between two steps of the main thread, which may be seconds away inside a library. So a
thread reads the signals from a pipe and ends the process itself, without unwinding: a run may be killed anywhere, and
the same command resumes it.

A scheduler, torchrun or a shell may signal all processes of a run, some of them twice. The run's own process answers;
those that it forks, such as data loaders, work on until it ends.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from speculator.terminal import is_first

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_WRITING_SECONDS = 60.0
"""How long a signal waits for what a thread writes: a disk may be gone."""
_unwritten: set[futures.Future[None]] = set()
Found = TypeVar("Found")
_temporary: list[Path] = []
_last_words = ""
_stop = threading.Event()
_saves = threading.Event()


def install() -> None:
    """Make Ctrl-C end the process with code 130, SIGTERM with 143: at once, or inside `saving` after a checkpoint."""
    # A mask, because torch installs handlers of its own in data loaders.
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _CODES))
    atexit.register(_end_children)  # it runs before the handler of `multiprocessing.util`, which waits for them
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in _CODES:
        signal.signal(number, lambda *_: None)  # without a handler of Python's nothing is written to the pipe
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def _watch(reader: int) -> None:
    """Read the numbers of signals from a pipe, and end the process; it runs in a thread of its own."""
    while True:
        # The C handler writes the signal's number into the pipe, even while the main thread is inside a library.
        (number,) = os.read(reader, 1)
        if number == signal.SIGTERM and _saves.is_set():
            _stop.set()
        elif number in _CODES:
            if writing := list(_unwritten):
                with suppress(OSError):
                    os.write(2, b"\nfinishing what is being written\n" * is_first())
                futures.wait(writing, _WRITING_SECONDS)
            for folder in _temporary:
                shutil.rmtree(folder, ignore_errors=True)
            _kill_children()
            if _last_words:
                with suppress(OSError):
                    os.write(2, f"\n{_last_words}\n".encode())  # below what Ctrl-C shows, and the progress bar
            os._exit(_CODES[signal.Signals(number)])


class Background:
    """A thread that reads and writes files, in the order in which it is asked; the block `with` it waits at its end.

    An error of writing is raised by the next call of `check`, `wait` or `write`.
    """

    def __init__(self) -> None:
        self._thread, self._writes = futures.ThreadPoolExecutor(1), deque[futures.Future[None]]()

    def write(self, work: Callable[[], None]) -> None:
        """Let the thread write something; a signal that ends the process waits for it."""
        self.check()
        writing = self._thread.submit(work)
        self._writes.append(writing)
        _unwritten.add(writing)
        writing.add_done_callback(_unwritten.discard)

    def read(self, work: Callable[[], Found]) -> futures.Future[Found]:
        return self._thread.submit(work)

    def check(self) -> None:
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    def wait(self) -> None:
        """Wait until all is written."""
        while self._writes:
            self._writes.popleft().result()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.wait()


def print_when_interrupted(line: str) -> None:
    """Set the line that is printed when a signal ends the process; only the first process of a launch prints it."""
    global _last_words
    _last_words = line if is_first() else ""


def _end_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a data loader that was killed
    _kill_children()


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()


@contextmanager
def saving() -> Iterator[None]:
    """Keep SIGTERM from ending the process in this block: the loop asks `stop_asked`, saves a checkpoint and stops."""
    _saves.set()
    try:
        yield
    finally:
        _saves.clear()


def stop_asked() -> bool:
    """Return whether SIGTERM has arrived inside `saving`."""
    return _stop.is_set()


def wait_for_end(seconds: float) -> None:
    """Wait `seconds` for a launcher's SIGTERM, which ends the process with code 143; one noted in `saving` counts."""
    _saves.clear()
    if _stop.wait(seconds):
        os._exit(_CODES[signal.SIGTERM])


@contextmanager
def temporary(folder: Path) -> Iterator[None]:
    """Delete a folder at the end of the block, also if the process is interrupted."""
    _temporary.append(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder)
        _temporary.remove(folder)
