"""A stream of items worked on by several processes, its results in the order of the items."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from speculator.device import cores
from speculator.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

PROCESSES = range(1, 257)
"""How many can be asked for."""
_ALONE = 16  # items that are done here before it is worth while to start processes
_MOST = 8
_FORK = sys.platform == "linux"


def sensible() -> int:
    """How many processes where nobody says: one for each core, up to as many as one process can feed."""
    return min(_MOST, cores())


def in_order(work: Callable[[Item], Result], items: Iterable[Item], processes: int) -> Iterator[Result]:
    """`work` of each item, as `map` gives it; no more items are drawn ahead than there are processes.

    Args:
        work: depends on its item alone; what it raises is raised here.
        processes: 1 works in this one.

    Raises:
        UserError: one of them was killed.
    """
    items = iter(items)
    yield from map(work, islice(items, None if processes == 1 else _ALONE))
    first = next(items, None) if processes > 1 else None
    if first is None:
        return
    with _started(work, processes) as lines:
        busy: deque[Connection] = deque()
        for item in chain([first], items):
            if len(busy) < len(lines):
                _send(lines[len(busy)], item)
                busy.append(lines[len(busy)])
                continue
            line = busy.popleft()
            made = _received(line)
            _send(line, item)  # before the result is used: the process goes on meanwhile
            busy.append(line)
            yield made
        while busy:
            yield _received(busy.popleft())


def _gone() -> UserError:
    return UserError(
        "a process that prepares rows was ended from outside, for want of memory perhaps: take fewer with num_proc"
    )


def _send(line: Connection, item: Any) -> None:
    try:
        line.send(item)
    except ConnectionError:
        raise _gone() from None


def _received(line: Connection) -> Any:
    try:
        made, error = line.recv()
    except (EOFError, ConnectionError):
        raise _gone() from None
    if error is not None:
        raise error
    return made


@contextmanager
def _started(work: Callable[[Any], Any], processes: int) -> Iterator[list[Connection]]:
    """Processes that work; gives the line to each. They end with the block, and with this process however it ends."""
    context = multiprocessing.get_context("fork" if _FORK else "spawn")
    pipes = [context.Pipe() for _ in range(processes)]
    lines = [ours for ours, _ in pipes]
    started: list[BaseProcess] = []
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes take the cores
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads hold nothing that is needed here
            for _, theirs in pipes:
                # A line ends when nobody else holds it: a fork has all of them.
                others = [line for pair in pipes for line in pair if line is not theirs] if _FORK else []
                started.append(context.Process(target=_serve, args=(work, theirs, others), daemon=True))
                started[-1].start()
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
    for _, theirs in pipes:
        theirs.close()
    try:
        yield lines
    finally:
        for line in lines:
            line.close()
        for process in started:
            process.kill()  # SIGTERM in one that has just begun would reach whoever watches ours
            process.join()


def _serve(work: Callable[[Any], Any], line: Connection, others: list[Connection]) -> None:
    signal.set_wakeup_fd(-1)  # a fork has the parent's, who would take our signals for its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    with suppress(EOFError, ConnectionError):
        while True:
            item = line.recv()
            try:
                answer = work(item), None
            except Exception as error:
                answer = None, error
            line.send(answer)
