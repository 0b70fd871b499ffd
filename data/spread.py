"""Rows spread over several servers: each is kept busy, and what one leaves behind when it dies the others do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from data.connection import GoneError
from data.tally import tell


class Named(Protocol):
    """A server, which has a URL."""

    url: str


Server = TypeVar("Server", bound=Named)
Item = TypeVar("Item")


async def spread(
    servers: Sequence[Server],
    probe: Callable[[Server], Coroutine[Any, Any, None]],
    work: Callable[[Server, Item], Awaitable[None]],
    items: Sequence[Item],
    concurrency: int,
) -> None:
    """Do all items, each on the first server that is free.

    Args:
        servers: left out with a line when they are gone.
        probe: looks at a server; all of them before any work.
        work: does an item on a server.
        items: the smallest first.
        concurrency: items at a time, on each server.

    Raises:
        GoneError: of the last server, when all are gone.
        Exception: the first of another kind ends everything.
    """
    queue: asyncio.PriorityQueue[Item] = asyncio.PriorityQueue()
    for item in items:
        queue.put_nowait(item)
    left = list(servers)
    failed: list[BaseException] = []

    async def unless_gone(server: Server, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except GoneError as error:
            left[:] = [each for each in left if each is not server]
            if not left:
                raise
            with tqdm.external_write_mode(sys.stderr):
                others = f"{len(left)} other{'s' if len(left) > 1 else ''}"
                tell(f"{error}; {server.url} is left out, and its rows are done by {others}")

    async def serve(server: Server) -> None:
        # A cancel may be lost (wait_for, before Python 3.12), so it is not all that ends a worker.
        while server in left and not failed:
            item = await queue.get()
            try:
                await work(server, item)
            except BaseException as error:
                if not isinstance(error, GoneError | asyncio.CancelledError):
                    failed.append(error)
                queue.put_nowait(item)  # before it counts as done, or the queue would count as finished
                raise
            finally:
                queue.task_done()

    await _together(*(unless_gone(server, probe(server)) for server in servers))
    slots = min(concurrency, len(items))
    serving = _together(*(unless_gone(server, _together(*(serve(server) for _ in range(slots)))) for server in left))
    tasks = [asyncio.ensure_future(serving), asyncio.ensure_future(queue.join())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if failed:
            raise failed[0]
        if not tasks[1].done():
            tasks[0].result()
    finally:
        left.clear()
        await _end(tasks)


async def _together(*jobs: Coroutine[Any, Any, None]) -> None:
    """Side by side; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
