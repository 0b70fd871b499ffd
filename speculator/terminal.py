"""Phases, log lines, progress bars and colours of the commands. Files and pipes get plain lines, without ANSI codes."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import IO, Any

from tqdm import tqdm

from speculator.errors import printable

GREEN, DIM, BOLD, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_SECONDS = 30.0
"""Longest time without a line while a command works, and the time between a progress bar's lines in a file or pipe."""


def colours(stream: IO[str]) -> bool:
    """Return whether to colour the text of a stream: on a terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def log(line: str) -> None:
    """Print a line on stderr, above the progress bars; only in the first process of a distributed launch."""
    if is_first():
        _write(printable(line.replace("\n", " ")))


def phase(number: int, count: int, title: str) -> None:
    """Print the header of a phase, such as "2/6 preparing data"; `title` then names the work in later lines."""
    if is_first():
        header = printable(f"{number}/{count} {title}")
        _write(f"{BOLD}{header}{PLAIN}" if colours(sys.stderr) else header)
        if _Heartbeat.work and isinstance(work := _Heartbeat.work[0], _Named):
            work.title, work.began = title, time.monotonic()


@contextmanager
def working(title: str) -> Iterator[None]:
    """Print `title` and the time elapsed whenever nothing else was printed for half a minute, until the block ends."""
    work = _Named(title)
    _Heartbeat.begin(work)
    try:
        yield
    finally:
        _Heartbeat.end(work)


class _Named:
    """Work that has a title and no progress bar."""

    def __init__(self, title: str):
        self.title, self.began = title, time.monotonic()

    def beat(self) -> None:
        _write(printable(f"{self.title}: {timedelta(seconds=int(time.monotonic() - self.began))} elapsed"))


class _Heartbeat(threading.Thread):
    """Prints the progress of the innermost work when nothing has been printed for half a minute.

    Work is an object with a method `beat`, which prints its progress. `begin` starts the thread.
    """

    work: list[Any] = []  # noqa: RUF012  shared: one thread per process
    written = 0.0
    """Time of the last line, by `time.monotonic`."""
    _thread: _Heartbeat | None = None

    @classmethod
    def begin(cls, work: Any) -> None:
        """Add the innermost work; in other processes than the first of a launch nothing happens."""
        if is_first():
            if not cls.work:
                cls.written = time.monotonic()
            cls.work.append(work)
            if cls._thread is None or not cls._thread.is_alive():  # a forked process has none
                cls._thread = cls(name="heartbeat", daemon=True)
                cls._thread.start()

    @classmethod
    def end(cls, work: Any) -> None:
        cls.work = [each for each in cls.work if each is not work]  # tqdm compares bars by their place

    def run(self) -> None:
        pause = threading.Event()
        while True:
            # Until half a minute has passed since the last line, whoever printed it, but never a busy loop.
            pause.wait(max(_SECONDS / 10, self.written + _SECONDS - time.monotonic()))
            if self.work and time.monotonic() >= self.written + _SECONDS:
                type(self).written = time.monotonic()
                with suppress(Exception):  # the work may end meanwhile
                    self.work[-1].beat()


def is_first() -> bool:
    """Return whether this process prints: it is alone, or the first of a distributed launch."""
    # A shell or a cluster may leave a RANK over; a launcher sets WORLD_SIZE and MASTER_ADDR as well.
    alone = os.environ.get("WORLD_SIZE", "1") == "1" or "MASTER_ADDR" not in os.environ
    return alone or os.environ.get("RANK", "0") == "0"


def _write(line: str) -> None:
    """Print a line on stderr as it is, above the progress bars."""
    _Heartbeat.written = time.monotonic()
    if not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
        return
    with tqdm.external_write_mode(sys.stderr, nolock=True):
        print(line, file=sys.stderr, flush=True)


_TITLE = 60
"""Most characters of a bar's title: longer ones, such as with paths, would push the numbers off a terminal."""


class Progress(tqdm):
    """Progress bar of the first process of a launch. In a file or pipe it is a line every half minute.

    Args:
        items: what to iterate over; None: the caller counts with `update`.
        title: text before the bar; its end, if it is long.
        unit: name of the items, such as "tokens".
        disable: show nothing.
        settings: further arguments of tqdm, such as `total`, the number of items.
    """

    def __init__(
        self, items: Iterable[Any] | None = None, *, title: str, unit: str, disable: bool = False, **settings: Any
    ):
        self.plain = not sys.stderr.isatty()
        if self.plain:
            settings |= {"mininterval": _SECONDS, "delay": _SECONDS}
        known = settings.get("total") is not None or hasattr(items, "__len__")
        super().__init__(
            items,
            desc=title if len(title) <= _TITLE else f"...{title[3 - _TITLE :]}",
            unit=unit,
            disable=disable or not is_first(),
            file=sys.stderr,
            dynamic_ncols=True,
            position=0 if self.plain else None,  # bars below each other would move the cursor
            bar_format=self._format(known),
            **settings,
        )
        if not self.disable:
            _Heartbeat.begin(self)

    def _format(self, known: bool) -> str:
        count = "{n_fmt} of {total_fmt}" if known else "{n_fmt}"
        after = "{elapsed} elapsed" + (", {remaining} left" if known else "") + "{postfix}"
        bar = "{percentage:3.0f}%|{bar}| " if known and not self.plain else ""
        return f"{{desc}}: {bar}{count} {{unit}} [{after}]"

    def reset(self, total: float | None = None) -> None:
        """Begin again at 0 with a new total; None: unknown."""
        self.bar_format = self._format(total is not None)
        super().reset(total)

    def beat(self) -> None:
        """Show the bar with the current time, after half a minute in which nothing was printed."""
        if self.plain:
            _write(str(self))
        else:
            super().refresh()

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """Return the function that prints the bar's text, as tqdm asks for it."""
        if sys.stderr.isatty():
            return tqdm.status_printer(file)
        return lambda line: _write(line) if line else None

    def refresh(self, *args: Any, **kwargs: Any) -> None:
        """Show the bar, in a file or pipe only if its last line is half a minute old."""
        if not self.plain or self._time() >= self.last_print_t + _SECONDS:
            super().refresh(*args, **kwargs)

    def close(self) -> None:
        _Heartbeat.end(self)
        if self.plain:
            self.delay = float("inf")  # as if it had never been shown, so that no line end follows
        super().close()


def quiet_libraries() -> None:
    """Hide the libraries' warnings and their progress bars, except those of downloads on a terminal."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # torch's notes to its own developers, on a GPU: how a softmax was compiled, and that a mode of it may change.
    warnings.filterwarnings("ignore", r"\s*(Online softmax is disabled|Synchronization debug mode)", UserWarning)
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
    (enable_progress_bars if sys.stderr.isatty() else disable_progress_bars)()


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Show until the block ends that `name` is being loaded: by the libraries' bars on a terminal, and by `working`."""
    from transformers.utils import logging

    quiet_libraries()
    if sys.stderr.isatty():
        logging.enable_progress_bar()
        if (datasets := sys.modules.get("datasets")) is not None:
            datasets.enable_progress_bars()
    try:
        with working(f"loading {name}"):
            yield
    finally:
        quiet_libraries()
