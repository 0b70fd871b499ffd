"""Ctrl-C and SIGTERM end a run at once, wherever it is.

Python runs a signal handler between two steps of the main thread, which may be seconds away inside a library. So a
thread reads the signals from a pipe and ends the process itself, without unwinding: a run may be killed anywhere, and
the same command resumes it.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_temporary: list[Path] = []
_stop = threading.Event()
_saves = threading.Event()


def install() -> None:
    """Make Ctrl-C end the process with code 130, SIGTERM with 143: at once, or inside `saving` after a checkpoint."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in _CODES:
        signal.signal(number, lambda *_: None)  # without a handler of Python's nothing is written to the pipe
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def _watch(reader: int) -> None:
    while True:
        (number,) = os.read(reader, 1)
        if number == signal.SIGTERM and _saves.is_set() and not _stop.is_set():
            _stop.set()
        elif number in _CODES:
            for folder in _temporary:
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(_CODES[signal.Signals(number)])


@contextmanager
def saving() -> Iterator[None]:
    """Only note the first SIGTERM in this block: the trainer asks `stop_asked`, saves a checkpoint and ends the run."""
    _saves.set()
    try:
        yield
    finally:
        _saves.clear()


def stop_asked() -> bool:
    """Return whether SIGTERM has arrived."""
    return _stop.is_set()


def wait_for_end(seconds: float) -> None:
    """Give a launcher time to end this process by SIGTERM; one that was only noted counts."""
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
