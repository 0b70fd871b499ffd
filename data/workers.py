"""Map a function over a stream of items in several processes, in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from speculator.device import cores
from speculator.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_SERIAL_ITEMS = 16  # starting processes takes longer than these
_MAX_DEFAULT = 8  # one process can't feed more
_work: Callable[[Any], Any]  # set in each worker


def default_processes() -> int:
    """Return the number of processes to use by default: one per core, up to 8."""
    return min(_MAX_DEFAULT, cores())


def map_in_order(work: Callable[[Item], Result], items: Iterable[Item], processes: int) -> Iterator[Result]:
    """Yield `work(item)` of each item, reading at most `processes` items ahead.

    `multiprocessing.Pool.imap` would read all items ahead, and wait forever for a worker that was killed.

    Raises:
        UserError: a worker was killed.
    """
    items = iter(items)
    yield from map(work, islice(items, None if processes == 1 else _SERIAL_ITEMS))
    first = next(items, None)
    if first is None:
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(work,))
    pending: deque[Future] = deque()
    tokenizers_parallelism = os.environ.get("TOKENIZERS_PARALLELISM", "true")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker; tokenizers reads it when forked
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking while other threads run
            pending.append(pool.submit(_call, first))
        for item in items:
            pending.append(pool.submit(_call, item))
            # Results come in the order of the items: the oldest is waited for, while the others are computed.
            if len(pending) > processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        time.sleep(1)  # SIGTERM to a command's whole group ends this process as well, without a word
        raise UserError("a process that prepares rows was killed, maybe out of memory: lower num_proc") from None
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = tokenizers_parallelism
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[Any], Any]) -> None:
    """Prepare a worker process to run `work`: signals are left to its parent, and it ends when the parent does."""
    global _work
    _work = work
    signal.set_wakeup_fd(-1)  # a forked worker would otherwise report its signals to the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the pool ends its workers by it
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(item: Any) -> Any:
    return _work(item)
