"""Phases, log lines, progress bars and colours of the commands. Files and pipes get plain lines, without ANSI codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from tqdm import tqdm

from speculator.errors import printable

GREEN, DIM, BOLD, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_SECONDS = 30.0
"""Time between the lines of a progress bar in a file or pipe."""


def colours(stream: IO[str]) -> bool:
    """Return whether to colour the text of a stream: on a terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def log(line: str) -> None:
    """Print a line on stderr, above the progress bars; on the first process of a launch only."""
    if _is_first():
        _write(printable(line.replace("\n", " ")))


def phase(number: int, count: int, title: str) -> None:
    """Print the header of a command's phase, such as "2/6 preparing data"."""
    if _is_first():
        header = printable(f"{number}/{count} {title}")
        _write(f"{BOLD}{header}{PLAIN}" if colours(sys.stderr) else header)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _write(line: str) -> None:
    if not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
        return
    with tqdm.external_write_mode(sys.stderr, nolock=True):
        print(line, file=sys.stderr, flush=True)


class Progress(tqdm):
    """Progress bar of the first process. In a file or pipe it is a line every half minute."""

    def __init__(
        self, items: Iterable[Any] | None = None, *, title: str, unit: str, disable: bool = False, **settings: Any
    ):
        self.plain = not sys.stderr.isatty()
        known = settings.get("total") is not None or hasattr(items, "__len__")
        count = "{n_fmt} of {total_fmt}" if known else "{n_fmt}"
        after = "{elapsed} elapsed" + (", {remaining} left" if known else "") + "{postfix}"
        if self.plain:
            settings |= {"mininterval": _SECONDS, "delay": _SECONDS}
        bar = "{percentage:3.0f}%|{bar}| " if known and not self.plain else ""
        super().__init__(
            items,
            desc=title,
            unit=unit,
            disable=disable or not _is_first(),
            file=sys.stderr,
            dynamic_ncols=True,
            position=0 if self.plain else None,  # bars below each other would move the cursor
            bar_format=f"{{desc}}: {bar}{count} {{unit}} [{after}]",
            **settings,
        )

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        if sys.stderr.isatty():
            return tqdm.status_printer(file)
        return lambda line: print(line, file=file, flush=True) if line else None

    def refresh(self, *args: Any, **kwargs: Any) -> None:
        if not self.plain or self._time() >= self.last_print_t + _SECONDS:
            super().refresh(*args, **kwargs)

    def close(self) -> None:
        if self.plain:
            self.delay = float("inf")  # as if it had never been shown, so that no line end follows
        super().close()


def quiet_libraries() -> None:
    """Hide the libraries' warnings and their progress bars, except those of downloads on a terminal."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
    (enable_progress_bars if sys.stderr.isatty() else disable_progress_bars)()


@contextmanager
def library_bars() -> Iterator[None]:
    """On a terminal, show the libraries' bars: of a download, of weights that are read."""
    from transformers.utils import logging

    quiet_libraries()
    if sys.stderr.isatty():
        logging.enable_progress_bar()
        if (datasets := sys.modules.get("datasets")) is not None:
            datasets.enable_progress_bars()
    try:
        yield
    finally:
        quiet_libraries()
